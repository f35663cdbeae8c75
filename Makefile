# make demo         trains a small language model on two CPU ranks, with and without overlap
# make test         runs the tests in two processes; ARGS are pytest's: make test ARGS="tests/plan -x"; "-n 0" for one process
# make bench        the collective-matmul benchmark on two CPU ranks
# make lint         ruff, mypy, clang-format
# make cuda-build   compiles for GPUs against a CUDA build of torch (about 5 GB), and runs the tests of what calls torch there,
#                   and some of the GPU tests on a GPU made of threads (tests/host_gpu); needs no GPU
# make host-gpu     runs all GPU tests that can run on it: make host-gpu ARGS="-k reduce"
# make clean        removes the environments and all build results
#
# Each does all the set-up it needs (Python >= 3.10, make, g++) and none that is done already.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_CUDA ?= torch==2.11.0
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CSRC := $(shell find csrc -type f)
HOST_GPU := $(shell find tests/host_gpu -type f)

.PHONY: demo test bench lint cuda-build cuda-tree cuda-check host-gpu host-gpu-check clean FORCE
.DELETE_ON_ERROR:

demo: $(VENV)/.built
	$(BIN)/symm-overlap train --compare --tp 2 --device cpu $(ARGS)

# With byte code, also where the environment says not to write it: a run starts two hundred processes.
test: $(VENV)/.test
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

bench: $(VENV)/.built
	$(BIN)/python -m bench.collective_matmul --device cpu --world 2 $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(filter %.h %.cuh %.cpp %.cu,$(CSRC) $(HOST_GPU))

# A compiled module in the tree belongs to one torch, so the second environment gets a copy of the tree. The copy keeps
# the times of the files, and so what was compiled from them.
CUDA_TREE := build/cuda-tree
CUDA_MAKE := SYMM_OVERLAP_CUDA=1 $(MAKE) --no-print-directory -C $(CUDA_TREE) VENV=$(CURDIR)/.venv-cuda TORCH="$(TORCH_CUDA)"

# What another version of torch could break: not plans, kernels of the same Triton, benchmarks, commands and pages.
OF_TORCH := -m 'not slow' $(addprefix tests/,collective demo fsdp inductor nn pipeline runtime) \
    $(addprefix --ignore=tests/,collective/planners pipeline/search)

# What C++ issues and what its kernels do; the other GPU tests take four more minutes.
ON_HOST_GPU := $(addprefix tests/gpu/test_,capture.py collectives.py meetings.py memory_operations.py reduce.py replays.py signals.py)

cuda-build: cuda-tree
	$(CUDA_MAKE) cuda-check
	$(CUDA_MAKE) test ARGS="$(OF_TORCH)"
	$(CUDA_MAKE) host-gpu-check ARGS="-n 3 --dist worksteal $(ON_HOST_GPU)"

host-gpu: cuda-tree
	$(CUDA_MAKE) host-gpu-check

cuda-tree:
	@test -x "$${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" || command -v nvcc > /dev/null || { \
	    echo "make cuda-build: no nvcc at CUDA_HOME, in /usr/local/cuda or on the PATH; install the CUDA toolkit" >&2; \
	    exit 1; }
	@mkdir -p $(CUDA_TREE)/symm_overlap
	@cd $(CUDA_TREE) && rm -rf csrc tests bench docs && find symm_overlap -name '*.py' -delete
	@tar -cf - --exclude='*.so' --exclude=__pycache__ Makefile setup.py pyproject.toml MANIFEST.in LICENSE README.md CONTRIBUTING.md \
	    csrc symm_overlap tests bench docs | tar -xf - -C $(CUDA_TREE)

cuda-check: $(VENV)/.test
	$(BIN)/python -m tests.cuda_build_check

host-gpu-check: $(VENV)/.test
	$(BIN)/python -m tests.host_gpu $(ARGS)

clean:
	rm -rf $(VENV) .venv-cuda build dist symm_overlap.egg-info symm_overlap/_C.*.so symm_overlap/_sim.*.so

# The environment: each stamp is newer than all it was made from.
#
# torch comes first and by name, and what is installed later must not make pip resolve it again: where pip finds torch's
# CPU build, that could bring its CUDA packages.

# Holds the requirement, so that another TORCH makes the environment anew.
$(VENV)/.torch: FORCE
	@echo '$(TORCH)' | cmp -s - $@ || { set -e; \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "symm_overlap needs Python 3.10 or newer; " + \
	        "$(PYTHON) is " + sys.version.split()[0] + ". Choose another: make PYTHON=python3.12 ...")'; \
	    command -v g++ > /dev/null || { echo "g++ is missing; install it (Debian, Ubuntu: apt install g++)" >&2; exit 1; }; \
	    echo "installing $(TORCH) into $(VENV)"; \
	    $(PYTHON) -m venv --clear $(VENV); \
	    $(PIP_INSTALL) '$(TORCH)' "setuptools>=77" ninja numpy 'tomli>=2; python_version < "3.11"'; \
	    echo '$(TORCH)' > $@; }

$(VENV)/.built: $(VENV)/.torch $(CSRC) setup.py pyproject.toml $(if $(wildcard symm_overlap/_C.*.so),,FORCE) $(if $(wildcard symm_overlap/_sim.*.so),,FORCE)
	@echo "compiling symm_overlap (minutes when all is new)"
	@$(PIP_INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@

# The tools of an extra in pyproject.toml, without the project itself and so without its requirement of torch. Isolated
# (-I), so that what an earlier build has left in the tree does not answer.
$(VENV)/.test $(VENV)/.lint: $(VENV)/.%: $(VENV)/.built
	@$(BIN)/python -I -c 'import importlib.metadata as m; \
	    print(*(r.split(";")[0] for r in m.requires("symm-overlap") if "extra == \"$*\"" in r), sep="\n")' > $(VENV)/$*.txt
	@$(PIP_INSTALL) --requirement $(VENV)/$*.txt
	@touch $@
