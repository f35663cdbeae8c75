#!/usr/bin/env bash
# Everything to be done on a machine with GPUs: build, test, measure. Prints a table last.
#
#   bench/gpu_session.sh                      all parts
#   bench/gpu_session.sh build tests          some of them: build, primitives, tests, collectives, train
#
# Environment: PYTHON (default python3) has torch with CUDA, setuptools, pytest and numpy, and nvcc is of its CUDA version.
# OUT (default gpu_results) gets the logs and JSON, at most 8 files. LIMIT (default 540) is the most seconds for all parts
# together; a part that has no time left is interrupted, and ends with the report that it gives at Ctrl-C.
# It changes nothing on the machine but OUT, build/ and the compiled module in symm_overlap/.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${OUT:-gpu_results}
limit=${LIMIT:-540}
parts=("$@")
((${#parts[@]})) || parts=(build primitives tests collectives train)
for name in "${parts[@]}"; do
    case $name in
        build | primitives | tests | collectives | train) ;;
        *)
            echo "gpu_session.sh: no part $name; there are build, primitives, tests, collectives, train" >&2
            exit 2
            ;;
    esac
done
mkdir -p "$out"

# A log ends with what was printed last, also that of a part which had to be killed.
export PYTHONUNBUFFERED=1
# Streams that share a hardware queue wait for each other; CUDA gives a process 8 queues unless told so.
export CUDA_DEVICE_MAX_CONNECTIONS=32

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 2
if ((gpus == 0)); then
    echo "gpu_session.sh: $python sees no GPU; choose another with PYTHON=..." >&2
    exit 2
fi

{
    "$python" -c 'from importlib.metadata import distributions
print(*sorted({f"{d.name} {d.version}" for d in distributions() if d.name in ("torch", "setuptools", "pytest", "numpy")}))'
    nvidia-smi
    "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" --version || nvcc --version
    "$python" -m torch.utils.collect_env
} > "$out/environment.txt" 2>&1
head -n 1 "$out/environment.txt"

table=()
failed=0

# part NAME COMMAND...: runs it with its output in OUT/NAME.log, and adds a line to the table.
part() {
    local name=$1 status start=$SECONDS left=$((limit - SECONDS))
    shift
    if ((left <= 0)); then
        failed=1
        skip "$name" "the $limit s of LIMIT are over"
        return
    fi
    echo "== $name: $*"
    timeout --signal=INT --kill-after=45 "$left" "$@" > "$out/$name.log" 2>&1
    status=$?
    ((status == 0)) || failed=1
    table+=("$(printf '%-12s exit %-4s %5s s  %s' "$name" "$status" "$((SECONDS - start))" "$(tail -n 1 "$out/$name.log" | cut -c 1-90)")")
}

skip() {
    table+=("$(printf '%-12s not run       %s' "$1" "$2")")
}

# The newest architecture of this machine alone: 9.0a, not all that a release is built for.
build() {
    local arch
    if ! arch=$("$python" -c 'import torch; a, b = torch.cuda.get_device_capability(); print(f"{a}.{b}" + "a" * (a >= 9))'); then
        failed=1
        skip build "torch cannot tell the GPU's architecture"
        return
    fi
    SYMM_OVERLAP_CUDA=1 TORCH_CUDA_ARCH_LIST=$arch MAX_JOBS=$(nproc) part build "$python" setup.py build_ext --inplace
}

for name in "${parts[@]}"; do
    case $name in
        build)
            build
            ;;
        primitives)
            part primitives "$python" -m bench.gpu_primitives --json "$out/primitives.json"
            ;;
        tests)
            # Few failures are enough: a rank that hangs takes a minute to be found.
            part tests "$python" -m pytest -m gpu tests/gpu -v --maxfail=5 --durations=10
            ;;
        collectives)
            if ((gpus < 2)); then
                skip collectives "needs two GPUs: ranks that share one have nothing to overlap"
            else
                part collectives "$python" -m bench.collective_matmul --device cuda --world "$gpus" \
                    --shapes llama gpt3 small ragged --json "$out/collectives.json"
            fi
            ;;
        train)
            if ((gpus < 2)); then
                skip train "needs two GPUs"
            else
                part train "$python" -m symm_overlap.cli train --device cuda --tp 2 --compare
            fi
            ;;
    esac
done

if [[ -s $out/primitives.log ]]; then
    grep -A 100 'primitive  ' "$out/primitives.log"
fi
echo
printf '%s\n' "${table[@]}"
exit "$failed"
