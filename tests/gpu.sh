#!/bin/bash
# What has to pass on a machine with 1, 2 or 4 GPUs, from small to large: tests/gpu.sh [PART...]
# Each part takes 9 minutes at most, and the next ones run whatever it says; tests that need more GPUs are skipped. Where
# a command may not last longer, run the parts one by one: tests/gpu.sh kernels-moe; `kernels` are all whose names begin
# so; tests/gpu.sh list names them. PYTHON chooses the interpreter.
# WORKERS=16 sets how many processes a part has where several may share a GPU.
# NVLink's multicast is off: containers often forbid it. TEST_DEVICE=cuda: what needs more GPUs than there are is
# skipped, not run on CPUs as in `make test`.
set -u
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-.venv/bin/python}
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1 TEST_DEVICE=cuda
tests=("$python" -m pytest -q --tb=short)
several=("${tests[@]}")  # processes on one GPU, where pytest-xdist is there
"$python" -c 'import xdist' 2>/dev/null && several+=(-n "${WORKERS:-8}")
asked=("$@")
names=()
found=0
failed=0

# Whether part $1 is asked for.
chosen() {
    local one
    [ ${#asked[@]} = 0 ] && return 0
    for one in "${asked[@]}"; do
        [[ $1 == "$one" || $1 == "$one"-* ]] && return 0
    done
    return 1
}

# part NAME SECONDS COMMAND...
part() {
    local name=$1 limit=$2
    shift 2
    names+=("$name")
    chosen "$name" || return 0
    found=1
    echo "== $name"
    timeout -k 5 "$limit" "$@" || { echo "== $name: code $?"; failed=1; }
}

rank=tests/rank
worker=$rank/worker
part topology 30 nvidia-smi topo -m
part kernels-small 540 "${several[@]}" tests/kernels/{activation,cache,collective,embedding,norm,rope,sampling}/*_gpu.py \
    tests/kernels/*_gpu.py
part kernels-attention 540 "${several[@]}" tests/kernels/attention/*_gpu.py
part kernels-recurrent 540 "${several[@]}" tests/kernels/recurrent/*_gpu.py
part kernels-gemm 540 "${several[@]}" tests/kernels/gemm/*_gpu.py
part kernels-moe 540 "${several[@]}" tests/kernels/moe/*_gpu.py
part kernels-quantized 540 "${several[@]}" tests/kernels/quantized/*_gpu.py
# In C++: hosts of GPUs have AMX, which other machines may lack.
part kernels-cpu 540 "${several[@]}" tests/kernels/*/test_*cpu*.py tests/kernels/cpp/test_*.py \
    tests/kernels/collective/test_shm_allreduce.py tests/kernels/moe/test_host_{choice,experts,service}.py \
    tests/kernels/moe/test_nibble_permutation.py tests/kernels/quantized/test_{gpu_layout,q8_0,stack,super_blocks}.py
part groups 150 "${tests[@]}" tests/comm/test_gpus.py tests/comm/test_symmetric_memory.py \
    tests/comm/test_custom_allreduce.py
part worker 300 "${several[@]}" $worker/test_{swap,batch_builder,decode_batch,piecewise_graphs,sampler_gpu,query_len_gpu,images_gpu,draft_graphs,draft_graphs_gpu}.py
part models 540 "${tests[@]}" $rank/model/experts/*_gpu.py $rank/model/formats/*_gpu.py \
    $rank/model/stored_formats/*_gpu.py $rank/model/layers/*_gpu.py $rank/model/*_gpu.py $rank/model/vision/*_gpu.py
part shapes 540 "${tests[@]}" -rs $rank/test_gpus.py
part generation 300 "${tests[@]}" -m "not long" $rank/test_generation.py
part speculation 300 "${several[@]}" $rank/test_speculation_gpu.py
part faults 300 "${tests[@]}" -m "not long" $rank/test_faults.py
part offloading 540 "${tests[@]}" $rank/test_offloading.py $rank/test_layer_offload.py
part swapping 300 "${tests[@]}" $rank/test_swapping.py $rank/test_freeing.py
part reloading 300 "${tests[@]}" $rank/test_reloading.py
part served-1 540 "${tests[@]}" $rank/test_served.py -k tp1
part served-2 540 "${tests[@]}" -m "not long" $rank/test_served.py
part served-3 540 "${tests[@]}" $rank/test_served.py -k "tp2 and not pp2"
[ "${1:-}" = list ] && { printf '%s\n' "${names[@]}"; exit 0; }
[ $found = 1 ] || { echo "tests/gpu.sh: no part ${asked[*]}; the parts: ${names[*]}" >&2; exit 2; }
exit $failed
