"""``python -m symm_overlap`` is the command ``symm-overlap``."""

import sys

from symm_overlap.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
