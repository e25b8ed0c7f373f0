#!/bin/bash
# What has to pass on a machine with 1, 2 or 4 GPUs, from small to large: tests/gpu.sh [kernels]
# Each part has a time limit of its own and the next ones run whatever it says; parts that need more GPUs skip. Ten
# minutes on 4 GPUs. PYTHON chooses the interpreter. Multicast over NVLink is left alone: containers often forbid it.
# TEST_DEVICE=cuda: what would run on CPUs where GPUs are too few for it is left to `make test`.
set -u
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-.venv/bin/python}
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1
tests=("$python" -m pytest -q --tb=short)
several=()  # processes on one GPU, where pytest-xdist is there
"$python" -c 'import xdist' 2>/dev/null && several=(-n 8)
failed=0

part() {
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout -k 5 "$limit" "$@" || { echo "== $name: code $?"; failed=1; }
}

part topology 30 nvidia-smi topo -m
part kernels 300 "${tests[@]}" "${several[@]}" tests/kernels
[ "${1:-}" = kernels ] && exit $failed
part groups 150 "${tests[@]}" tests/comm/test_gpus.py tests/comm/test_symmetric_memory.py tests/comm/test_custom_allreduce.py
part shapes 300 "${tests[@]}" -rs tests/rank/test_gpus.py
TEST_DEVICE=cuda part generation 300 "${tests[@]}" -m "not long" tests/rank/test_generation.py tests/rank/test_faults.py
exit $failed
