#!/usr/bin/env bash
# Build, test, check and measure on a machine with GPUs. See bench/session.py, or --help.
#
#   bench/gpu_session.sh                      all parts; if time ran out, run it again to continue
#   bench/gpu_session.sh build tests          only these parts
#   bench/gpu_session.sh --dry-run            all parts without a GPU, as far as a CPU can run them
#
# PYTHON (default python3) must have torch with CUDA, setuptools, ninja, pytest 9 and numpy. nvcc must be of the CUDA
# version that this torch was built for.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m bench.session "$@"
