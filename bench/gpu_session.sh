#!/usr/bin/env bash
# Everything to be done on a machine with GPUs: build, test, check, measure. See bench/session.py, or --help.
#
#   bench/gpu_session.sh                      all parts; run it again to go on where the time was over
#   bench/gpu_session.sh build tests          some of them
#   bench/gpu_session.sh --dry-run            all parts with no GPU, as far as a CPU can
#
# PYTHON (default python3) has torch with CUDA, setuptools, ninja, pytest 9 and numpy, and nvcc is of its CUDA version.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m bench.session "$@"
