"""Flags of other servers: processes, nodes, devices, and how they share the work."""

from __future__ import annotations

from .flag import note, refuse

MPIRUN = "mpirun starts a job on several nodes: mpirun -np N -hostfile FILE phalanx serve …"

FLAGS = {
    **refuse(MPIRUN, "--nnodes X, --num-nodes X", "1"),
    **refuse(MPIRUN, "--node-rank X", "0"),
    **refuse(
        MPIRUN,
        """--master-addr X, --master-port X, --hostfile X, --dist-init-addr X, --nccl-init-addr X, --headless
        --rpc X, --data-parallel-* X, -dpa X, -dpl X, -dpn X, -dpp X, -dpr X, -dph, -dpe, -dpm""",
    ),
    **refuse("--max-tokens N limits answers; mpirun is told how many nodes there are", "-n X"),
    **refuse("mpirun numbers the ranks; the texts that end an answer are a request's `stop`", "-r X"),
    **note(
        "ranks are MPI processes",
        """--distributed-executor-backend X, --data-parallel-backend X, -dpb X, --worker-use-ray, --use-ray
        --ray-workers-use-nsight""",
    ),
    **note("every rank is a process", "--multi-process"),
    **refuse(
        "say over how many ranks: --ep N, as many as --tp or a divisor of it, or 0",
        "--enable-expert-parallel, -ep, --enable-ep-moe",
    ),
    **refuse(
        "--tp N splits attention over N ranks; --dp N serves N replicas, each on tp * pp ranks",
        """--enable-dp-attention, --enable-dp-lm-head, --attn-dp-size X, --attention-data-parallel-size X
        --moe-dp-size X, --moe-data-parallel-size X""",
    ),
    **refuse(
        "a sequence is not split over ranks; --tp N splits the heads",
        """--decode-context-parallel-size X, -dcp X, --dcp-size X, --prefill-context-parallel-size X, -pcp X
        --attention-context-parallel-size X, --attn-cp-size X""",
        "1",
    ),
    **note(
        "each rank keeps the experts that it has loaded",
        """--enable-eplb, --eplb-config X, --eplb-algorithm X, --num-redundant-experts X
        --ep-num-redundant-experts X, --init-expert-location X, --expert-placement-strategy X, --enable-elastic-ep""",
    ),
    **note(
        "the ranks choose how they exchange data",
        """--disable-custom-all-reduce, --enable-p2p-check, --enable-nccl-nvls, --enable-symm-mem
        --enable-torch-symm-mem, --enable-mscclpp, --enable-flashinfer-allreduce-fusion, --nccl-port X
        --all2all-backend X, --moe-a2a-backend X, --deepep-mode X, --deepep-config X, --enable-deepep-moe
        --moe-dense-tp-size X""",
    ),
    **refuse(
        "--timeout S says how long a silent rank is waited for",
        "--dist-timeout X, --watchdog-timeout X, --soft-watchdog-timeout X, --distributed-timeout-seconds X",
    ),
    **refuse("GPUs are chosen by --d 0,1,…", "--base-gpu-id X, --gpu-id-step X, --main-gpu X, -mg X, -dev X"),
    **refuse("use --device cpu", "--cpu"),
    **note(
        "a rank is bound to cores near its GPU, or to its share of them; MAP_NUMA_NODE=0,0,1,1 says it by hand",
        "--numa X, --numa-node N .., --numa-bind, --numa-bind-* X",
    ),
    **note(
        "a rank takes the cores that it is bound to; more ranks take more: --np N --device cpu",
        """--threads X, -t X, --threads-batch X, -tb X, --cpu-mask X, -C X, --cpu-range X, -Cr X, --cpu-strict X
        --cpu-mask-batch X, -Cb X, --cpu-range-batch X, -Crb X, --cpu-strict-batch X, --prio X, --prio-batch X
        --poll X, --poll-batch X""",
    ),
    **refuse("--tp N splits layers over N ranks, --pp N puts layers on N ranks", "--split-mode X, -sm X", "none"),
    **refuse("--tp N splits layers evenly", "--tensor-split X, -ts X"),
    **note(
        "a request goes to the replica with the least work, less what its prefix cache has", "--load-balance-method X"
    ),
}
