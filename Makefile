# make demo         trains a small language model on two CPU ranks, with and without overlap
# make test         runs the tests in three processes, except those that take long; ARGS are arguments of pytest:
#                   make test ARGS="tests/plan -x"; ARGS="-n 0" runs them in one process
# make test-slow    runs those that take long
# make bench        the collective-matmul benchmark on two CPU ranks
# make lint         ruff, mypy, clang-format
# make cuda-build   compiles for GPUs against a CUDA build of torch (about 5 GB); with that build, runs the tests of code that
#                   calls torch, and some of the GPU tests on a GPU made of host threads (tests/host_gpu); needs no GPU
# make host-gpu     runs all GPU tests that can run on that GPU: make host-gpu ARGS="-k reduce"
# make clean        removes the environments and all build results
#
# Each target also does the set-up that it needs, and skips what is done already. It expects Python >= 3.10, make and g++.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_CUDA ?= torch==2.11.0
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CSRC := $(shell find csrc -type f)
HOST_GPU := $(shell find tests/host_gpu -type f)

.PHONY: demo test test-slow bench lint cuda-build cuda-tree cuda-check host-gpu host-gpu-check clean FORCE
.DELETE_ON_ERROR:

demo: $(VENV)/.built
	$(BIN)/symm-overlap train --compare --tp 2 --device cpu $(ARGS)

# Write byte code even if the environment forbids it: a run starts two hundred processes, which all load it. Tests also
# wait for processes that they start, so three at a time keep two cores busy.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

test: $(VENV)/.test
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/.test
	$(PYTEST) -m slow $(ARGS)

bench: $(VENV)/.built
	$(BIN)/python -m bench.collective_matmul --device cpu --world 2 $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(filter %.h %.cuh %.cpp %.cu,$(CSRC) $(HOST_GPU))

# A compiled module in the tree works with one version of torch only, so the second environment gets a copy of the tree.
# The copy keeps the times of the files, so that make does not compile unchanged files again.
CUDA_TREE := build/cuda-tree
CUDA_MAKE := SYMM_OVERLAP_CUDA=1 $(MAKE) --no-print-directory -C $(CUDA_TREE) VENV=$(CURDIR)/.venv-cuda TORCH="$(TORCH_CUDA)"

# The tests that another version of torch could break. It cannot break plans, kernels of the same Triton, benchmarks,
# commands and pages. The tests in ANY_TORCH guard the package's own rules (signals, failures, lanes, chooser, schedules,
# memory), so the run on the first torch is enough for them. The demo combines what other tests show one by one.
#
# TORCH_ELSEWHERE are tests that compute with torch, but with no part of it that the other tests leave out:
# - Kept products and gathered weights: test_torch_integration.py compares the ops with torch's own
#   and runs opcheck on them, test_fake_group.py has their sizes on every path, and test_autograd.py their gradients.
# - Sums of scaled matmuls: test_scaled_matmul.py and test_scaled_sums.py call torch's scaled matmul for the same factors.
# - Programs on which the pass runs: test_patterns.py traces the same ones, and test_models.py has values.
# - Plans that C++ runs: all calls on the path "pipelined" are such plans.
# - Pipelined models and values that stages send: test_cut.py traces the same models, test_gradients.py trains pipelines,
#   and test_pipeline_model.py and test_contract.py do both.
TORCH_ELSEWHERE := $(patsubst %,collective/test_%.py,gathered_weight kept_products scaled_scatter) \
    inductor/test_values.py pipeline/model/test_training.py pipeline/runtime/test_values.py runtime/test_cpu_script.py
ANY_TORCH := collective/planners pipeline/search \
    $(patsubst %,collective/test_%.py,accesses autotune autotuned_calls chooser_table copying_plans deadline_length \
        errors failures fused fused_failures fused_prediction hosts interleavings lane_memory lanes mismatch one_shot paths \
        paths_of_ops prediction prediction_properties prepare prepare_fused rank_order sliced_matmul symmetric_input) \
    $(patsubst %,fsdp/test_%.py,planners slots step_plan) \
    $(patsubst %,pipeline/test_%.py,cost generators lowering step_plan unit_time verify) \
    $(patsubst %,pipeline/runtime/test_%.py,faults waits) \
    $(patsubst %,runtime/test_%.py,call_hash deadlines epoch_slot host_lane interpreter_exit launches open_files shared_memory \
        signal_protocol store_host waiting_beside_others)
OF_TORCH := $(addprefix tests/,collective fsdp inductor nn pipeline runtime) \
    $(addprefix --ignore=tests/,$(ANY_TORCH) $(TORCH_ELSEWHERE))

# Of the tests that take long, those of ops, of FSDP2, and of the compiler, whose graphs differ most from one torch to the next.
# The two ignored files have only more ranks for what `make test` shows. Tests that are alike need not run again.
SLOW_OF_TORCH := $(addprefix tests/,collective fsdp inductor) $(filter --ignore=%,$(OF_TORCH)) \
    $(patsubst %,--ignore=tests/%.py,collective/test_autograd fsdp/test_sharded_linear) -m "slow and not alike" --at-most 2

# The tests of what C++ issues and of what its kernels do. The other GPU tests take five more minutes.
ON_HOST_GPU := $(addprefix tests/gpu/test_,capture.py collectives.py failed_cuda.py fsdp_async.py graph_trees.py meetings.py memory_operations.py process_end.py reduce.py replays.py signals.py slots.py spans.py)

# The first tests run with the comparison of calls (symm_overlap/collective/exchange/comparison.py), which is off by default,
# and with some cases of each test: what another torch breaks, it seldom breaks in one case of many alone.
cuda-build: cuda-tree
	$(CUDA_MAKE) cuda-check
	SYMM_OVERLAP_CHECK=1 $(CUDA_MAKE) test ARGS="--at-most 3 $(OF_TORCH)"
	$(CUDA_MAKE) test-slow ARGS='$(SLOW_OF_TORCH)'
	$(CUDA_MAKE) host-gpu-check ARGS="-n 3 --dist worksteal --at-most 3 $(ON_HOST_GPU)"

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

# The environment. Each stamp file is newer than everything it depends on.
#
# torch is installed first and by name. Later installations must not make pip resolve torch again: on a machine where pip
# finds torch's CPU build, that could install its CUDA packages.

# This stamp contains the requirement, so that another value of TORCH creates the environment anew.
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

# Install the tools of an extra in pyproject.toml, but not the project itself, so that its requirement of torch is not
# resolved. Python is isolated (-I), so that it does not read metadata that an earlier build has left in the tree.
$(VENV)/.test $(VENV)/.lint: $(VENV)/.%: $(VENV)/.built
	@$(BIN)/python -I -c 'import importlib.metadata as m; \
	    print(*(r.split(";")[0] for r in m.requires("symm-overlap") if "extra == \"$*\"" in r), sep="\n")' > $(VENV)/$*.txt
	@$(PIP_INSTALL) --requirement $(VENV)/$*.txt
	@touch $@
