"""Flags of other servers: memory, batches and kernels."""

from __future__ import annotations

from .flag import note, refuse

FLAGS = {
    **note(
        "layers lie on the GPU; --device cpu computes without one, --cpu-offload-gb GiB keeps some in host memory",
        "--n-gpu-layers X, --gpu-layers X, -ngl X",
    ),
    **note("what fits is found out while the model is loaded", "--fit [X], -fit [X], --fit-* X, -fitt X, -fitc X"),
    **refuse(
        "--num-experts-offload-per-rank N keeps N experts of each layer in host memory",
        "--n-cpu-moe X, -ncmoe X, --cpu-moe, -cmoe, --override-tensor X, -ot X, --kt-* X",
    ),
    **refuse(
        "--cpu-offload-gb GiB keeps layers in host memory",
        "--n-cpu-ffn X, -ncffn X, --cpu-offload-params X, --offload-* X",
    ),
    **refuse("--expert-memory MB says what experts take of a rank's GPU", "--moe-cache-mib X", "0"),
    **refuse(
        "--kvcache-mem-cpu MB gives the KV cache host memory, in MB of each rank",
        """--swap-space X, --kv-offloading-* X, --enable-hierarchical-cache, --enable-hicache, --hicache-* X
        --cache-ram X, -cram X, --enable-lmcache""",
        "0",
    ),
    **note("the KV cache lies on the GPU; --kvcache-mem-cpu MB adds host memory", "--kv-offload, -kvo, -nkvo"),
    **refuse(
        "there is no transfer of the KV cache between servers: each computes prompts and decodes",
        "--kv-transfer-config X, --kv-events-config X, --ec-transfer-config X, --disaggregation-* X",
        "null",
    ),
    **refuse(
        "--mem MB sizes the KV cache of a rank",
        "--kv-cache-memory-bytes X, --kv-cache-memory X, --num-gpu-blocks-override X, --max-total-tokens X",
    ),
    **refuse(
        "--kv-cache-dtype fp8 keeps 8 bits; otherwise keys and values have the type of --dtype",
        "--cache-type-k X, -ctk X, --cache-type-v X, -ctv X",
        "f16 bf16",
    ),
    **note("--kv-cache-dtype fp8 scales each head of each token", "--calculate-kv-scales, --quantization-param-path X"),
    **note(
        "the KV cache has pages, which all sequences share",
        """--kv-unified, -kvu, -no-kvu, --swa-full, --defrag-thold X, -dt X, --cache-reuse X, --cache-idle-slots
        --ctx-checkpoints X, --swa-checkpoints X, -ctxcp X, --checkpoint-min-step X, -cms X
        --slot-prompt-similarity X, -sps X, --disable-hybrid-kv-cache-manager, --swa-full-tokens-ratio X""",
    ),
    **note(
        "the prefix cache drops what was not used for longest",
        "--radix-eviction-policy X, --prefix-cache-retention-interval X",
    ),
    **note("there is one kind of prefix cache", "--prefix-caching-hash-algo X, --disable-chunked-prefix-cache"),
    **refuse(
        "every free block may hold a prefix; --disable-prefix-cache switches it off", "--prefix-cache-max-tokens X"
    ),
    **refuse("recurrent states get what --max-num-seqs sequences need", "--mamba-fraction X, --max-mamba-cache-size X"),
    **refuse("a sequence ends at --max-model-len; nothing of it is dropped", "--context-shift, --keep X", "0"),
    **refuse("--max-num-seqs N says how many sequences run at once; --np are ranks here", "--parallel X, -np X"),
    **refuse(
        "--max-model-len N limits each sequence; llama.cpp's N is shared by all slots",
        "--ctx-size X, -c X, --kv-unified-per-slot X",
        "0",
    ),
    **note("requests join the running batch at once", "--holding-time X, --cont-batching, -cb, -nocb"),
    **note(
        "--max-num-batched-tokens N sets how many tokens a step has",
        "--batch-size X, -b X, --ubatch-size X, -ub X, --max-prefill-tokens X",
    ),
    **note("it is always on", "--enable-chunked-prefill [X], --enable-mixed-chunk"),
    **note(
        "steps are scheduled in one way; --max-num-seqs and --max-num-batched-tokens limit them",
        """--async-scheduling, --disable-overlap-schedule, --num-scheduler-steps X
        --multi-step-stream-outputs [X], --scheduler-delay-factor X, --schedule-conservativeness X
        --preemption-mode X, --use-v2-block-manager, --num-lookahead-slots X, --max-num-partial-prefills X
        --max-long-partial-prefills X, --long-prefill-token-threshold X, --enable-dynamic-chunking
        --prefill-max-requests X, --num-continuous-decode-steps X, --pp-max-micro-batch-size X
        --pp-async-batch-depth X, --enable-two-batch-overlap, --enable-single-batch-overlap, --enable-dbo
        --performance-mode X, --disable-cascade-attn, --kv-sharing-fast-prefill, --disable-async-output-proc
        --scheduler-reserve-full-isl, --scheduler-recv-interval X, --dbo-* X, --enable-prefill-delayer
        --prefill-delayer-* X""",
    ),
    **note("tokens are sent as they come", "--stream-interval X"),
    **note(
        "requests go by their `priority`, a lower number first, and then by their arrival",
        """--scheduling-policy X, --schedule-policy X, --enable-priority-scheduling
        --schedule-low-priority-values-first""",
    ),
    **note(
        "graphs are used where they are faster, and results differ by rounding at most",
        """--disable-cuda-graph, --enforce-eager, --cuda-graph-sizes N .., --cudagraph-capture-sizes N ..
        --cuda-graph-bs-decode N .., --cuda-graph-bs-prefill N .., --disable-prefill-cuda-graph
        --disable-decode-cuda-graph, --full-cuda-graph, --cuda-graph-bs N .., --cuda-graph-max-bs X
        --cuda-graph-* X, --cudagraph-mode X, --max-cudagraph-capture-size X, --max-seq-len-to-capture X
        --compilation-config X, -cc X, -O X, --optimization-level X, --enable-torch-compile
        --torch-compile-max-bs X, --disable-cuda-graph-padding, --enable-piecewise-cuda-graph
        --disable-piecewise-cuda-graph, --piecewise-cuda-graph-max-tokens X, --enable-layerwise-nvtx-marker""",
    ),
    **note(
        "kernels are chosen for the device and the shapes",
        """--attention-backend X, --attention-config X, -ac X, --prefill-attention-backend X
        --decode-attention-backend X, --mm-attention-backend X, --sampling-backend X, --flash-attn [X], -fa [X]
        --moe-backend X, --moe-runner-backend X, --fp8-gemm-backend X, --fp4-gemm-backend X, --linear-backend X
        --linear-attn-* X, --mamba-backend X, --fp8-gemm-runner-backend X, --fp4-gemm-runner-backend X
        --bf16-gemm-backend X, --dsa-* X, --kernel-config X, --enable-flashmla, --enable-flashinfer-mla
        --disable-flashinfer, --enable-flashinfer-autotune, --disable-flashinfer-autotune, --gdn-prefill-backend X
        --ir-op-priority X, --op-offload, --no-host, --triton-attention-num-kv-splits X, --backend-sampling, -bs""",
    ),
    **note("weights are repacked for the device when they are loaded", "--nk X, --repack, -nr"),
    **note(
        "structured output has one backend",
        """--grammar-backend X, --guided-decoding-backend X, --structured-outputs-config X
        --guided-decoding-disable-fallback""",
    ),
    **note("kernels are made ready before the first request", "--warmup, --warmups X, --skip-server-warmup"),
    **refuse(
        "there is no such mode: a result may differ by rounding with what runs beside",
        "--enable-deterministic-inference",
    ),
    **note("recurrent states are kept in one way", "--mamba-* X"),
}
