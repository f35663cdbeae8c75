#!/usr/bin/env bash
# Everything to be done on a machine with GPUs: build, test, measure. Prints a table last.
#
#   bench/gpu_session.sh                      all parts
#   bench/gpu_session.sh build tests          some of them: build, tests, primitives, collectives, train
#
# Environment: PYTHON (default python3) has torch with CUDA, setuptools, pytest and numpy, and nvcc is of its CUDA version.
# OUT (default gpu_results) gets the logs and JSON. LIMIT (default 600) is the most seconds for one part.
# It changes nothing on the machine but OUT, build/ and the compiled module in symm_overlap/.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${OUT:-gpu_results}
limit=${LIMIT:-600}
parts=("$@")
((${#parts[@]})) || parts=(build tests primitives collectives train)
mkdir -p "$out"

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 2
if ((gpus == 0)); then
    echo "gpu_session.sh: $python sees no GPU; choose another with PYTHON=..." >&2
    exit 2
fi

{
    nvidia-smi || true
    "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" --version || true
    "$python" -m torch.utils.collect_env || true
} > "$out/environment.txt" 2>&1

table=()
failed=0

# part NAME COMMAND...: runs it with its output in OUT/NAME.log, and adds a line to the table.
part() {
    local name=$1 status start=$SECONDS
    shift
    echo "== $name: $*"
    timeout "$limit" "$@" > "$out/$name.log" 2>&1
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
    arch=$("$python" -c 'import torch; a, b = torch.cuda.get_device_capability(); print(f"{a}.{b}" + "a" * (a >= 9))') || return
    SYMM_OVERLAP_CUDA=1 TORCH_CUDA_ARCH_LIST=$arch MAX_JOBS=$(nproc) part build "$python" setup.py build_ext --inplace
}

for name in "${parts[@]}"; do
    case $name in
        build)
            build
            ;;
        tests)
            part tests "$python" -m pytest -m gpu tests/gpu -q --maxfail=20 --durations=10 --junitxml="$out/tests.xml"
            ;;
        primitives)
            part primitives "$python" -m bench.gpu_primitives --json "$out/primitives.json"
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
        *)
            echo "gpu_session.sh: no part $name; there are build, tests, primitives, collectives, train" >&2
            exit 2
            ;;
    esac
done

if [[ -s $out/primitives.log ]]; then
    grep -A 100 'primitive  ' "$out/primitives.log"
fi
echo
printf '%s\n' "${table[@]}"
exit "$failed"
