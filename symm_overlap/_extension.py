"""Import the extension module before anything else needs it: it works only with the torch that it was compiled for."""

import torch

try:
    from . import _C  # noqa: F401
except ImportError as error:
    why = "it was compiled for another torch" if "undefined symbol" in str(error) else "it does not load"
    raise ImportError(
        f"the extension module of symm_overlap cannot be used with torch {torch.__version__}, because {why}. Install "
        f"symm_overlap again, with pip install --no-build-isolation --force-reinstall --no-deps. ({error})"
    ) from error
