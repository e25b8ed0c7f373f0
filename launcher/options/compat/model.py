"""Flags of other servers: the model, its files, and what is added to it."""

from __future__ import annotations

from .flag import note, refuse

FLAGS = {
    **refuse(
        "give the hub id in place of the file: phalanx serve ID, or --m ID --f FILE for one GGUF file of it",
        "--hf-repo X, -hf X, -hfr X, --hf-file X, -hff X, --gpt-oss-20b-default, --gpt-oss-120b-default",
    ),
    **refuse("fetch the file first, and give its path", "--model-url X, -mu X, --docker-repo X, -dr X"),
    **refuse("set HF_TOKEN, or log in with `hf auth login`", "--hf-token X, --hf-token-path X, -hft X"),
    **refuse("set HF_HOME to where models from the hub lie", "--download-dir X"),
    **refuse("set HF_HUB_OFFLINE=1", "--offline"),
    **refuse(
        "`phalanx pull ID --revision REV --to DIR` fetches it; then serve DIR",
        "--revision X, --code-revision X, --tokenizer-revision X",
    ),
    **refuse(
        "--models-config FILE names several models",
        "--models-dir X, --models-preset X, --models-max X, --models-autoload",
    ),
    **note("no code of the checkpoint is run", "--trust-remote-code"),
    **refuse(
        "the tokenizer is read from the model's directory", "--tokenizer X, --tokenizer-path X, --skip-tokenizer-init"
    ),
    **refuse(
        "files are read as transformers writes them: config.json, tokenizer.json, safetensors",
        "--tokenizer-mode X, --config-format X, --hf-config-path X",
        "auto hf slow",
    ),
    **refuse("each architecture has one implementation", "--model-impl X", "auto vllm sglang"),
    **note(
        "--load says how weights are read",
        """--mmap, --mlock, --direct-io, -dio, --load-mode X, -lm X, --lazy-mode X, -lzm X, --check-tensors
        --model-loader-extra-config X, --ignore-patterns X, --use-tqdm-on-load, --pt-load-map-location X
        --weight-loader-prefetch-checkpoints, --weight-loader-drop-cache-after-load
        --weight-loader-prefetch-num-threads X, --safetensors-prefetch-* X, --max-parallel-loading-workers X
        --safetensors-load-strategy X, --weight-loader-disable-mmap""",
    ),
    **refuse(
        "write rope_parameters into the model's config.json",
        """--rope-scaling X, --rope-theta X, --rope-scale X, --rope-freq-base X, --rope-freq-scale X
        --yarn-scaling-factor X, --yarn-* X""",
    ),
    **refuse("write the values into the model's config.json", "--hf-overrides X, --json-model-override-args X, -hfo X"),
    **refuse("a GGUF file's values are taken as they are", "--override-kv X"),
    **refuse("windows are part of the model", "--disable-sliding-window"),
    **refuse(
        "LoRA adapters are not supported; merge one into the model's weights, and serve those",
        """--enable-lora, --lora X, --lora-* X, --max-loras X, --max-loras-per-batch X, --max-loaded-loras X
        --max-lora-rank X, --max-cpu-loras X, --fully-sharded-loras, --enable-lora-bias
        --enable-lora-overlap-loading, --max-prompt-adapters X, --default-mm-loras X, --control-vector X
        --control-vector-* X, --enable-prompt-adapter, --prompt-adapters X, --qlora-adapter-name-or-path X""",
    ),
    **refuse(
        "there is no speculative decoding",
        """--speculative-config X, -sc X, --speculative-* X, --num-speculative-tokens X, --ngram-prompt-lookup-* X
        --model-draft X, -md X, --draft X, --draft-* X, --spec-* X, --gpu-layers-draft X, --n-gpu-layers-draft X
        -ngld X, --ctx-size-draft X, -cd X, --device-draft X, -devd X, --hf-repo-draft X, -hfd X, -hfrd X
        --cache-type-k-draft X, -ctkd X, --cache-type-v-draft X, -ctvd X, --lookup-cache-static X, -lcs X
        --lookup-cache-dynamic X, -lcd X, --threads-draft X, -td X, --threads-batch-draft X, -tbd X
        --override-tensor-draft X, -otd X, --cpu-moe-draft, -cmoed, --n-cpu-moe-draft X, -ncmoed X
        --enable-multi-layer-eagle""",
    ),
    **refuse(
        "text alone is served: there are no images, video or audio",
        "--mmproj X, -mm X, --mmproj-url X, -mmu X, --enable-multimodal",
    ),
    **note(
        "text alone is served",
        """--limit-mm-per-prompt X, --language-model-only, --skip-mm-profiling, --mm-enable-dp-encoder, --mm-* X
        --mmproj-auto, --no-mmproj, --mmproj-offload, --mmproj-device X, -mmdev X, --disable-mm-preprocessor-cache
        --disable-chunked-mm-input, --interleave-mm-strings, --allowed-local-media-path X
        --allowed-media-domains X, --media-path X, --image-min-tokens X, --image-max-tokens X, --media-io-kwargs X
        --video-* X, --mtmd-* X, --enable-mm-embeds""",
    ),
    **refuse(
        "text is generated, and the endpoints for embeddings and ranks are always there",
        "--task X, --runner X, --convert X",
        "auto none generate pooling embed embedding score rank",
    ),
    **note("it is always there", "--embedding, --embeddings, --rerank, --reranking, --is-embedding"),
    **refuse(
        "the model says how it pools, or a request by its `embedding_type`",
        "--pooling X, --pooler-config X, --override-pooler-config X",
    ),
    **refuse(
        "no code from outside is loaded; docs/extending.md says how Phalanx is extended",
        """--worker-cls X, --worker-extension-cls X, --scheduler-cls X, --tool-parser-plugin X
        --reasoning-parser-plugin X, --middleware X, --logits-processors X, --logits-processor-pattern X
        --enable-custom-logit-processor, --io-processor-plugin X, --custom-weight-loader X, --additional-config X""",
    ),
    **refuse("config.json says how a checkpoint is quantised", "--quantization-config X"),
    **refuse("--isq quantises weights while they are loaded", "--modelopt-* X, --quantize-and-serve"),
    **refuse("prompts are texts or tokens", "--enable-prompt-embeds"),
}
