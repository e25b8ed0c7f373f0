"""Every choice a user has, once: its field, its flags, its meaning. Frozen; what is discovered later lives elsewhere.

An option can come from the command line, from the environment (`PHALANX_` and the field's name in capitals), from a
YAML file (`--config`; the field's or any flag's name) or from the default below, in this order. launcher/options
reads the sources; ranks and server process only receive an `Options`.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from .flags import BATCH, ENGINE, LAUNCHER, SERVER, read
from .flags import Spec as Spec
from .flags import flag as flag
from .gguf import mixes
from .protocol import MAX_DRAFTS
from .sampling_fields import MAX_SEED, MinP, Penalty, RepetitionPenalty, Temperature, TopK, TopP

LONGEST = 1e6  # seconds of --timeout: Linux polls for 24 days at most

GROUPS = ("Model", "Server", "Ranks", "Memory and batching", "Sampling defaults", "Running")

KV_DTYPES = {"fp8_e4m3": "fp8", "e4m3": "fp8", "float8_e4m3fn": "fp8"}  # vLLM's and candle-vLLM's
_LOADS = dict.fromkeys(("safetensors", "hf", "gguf"), "auto")  # vLLM's; the files tell
_GENERATION = {"auto": "on", "vllm": "off"}  # vLLM's values
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "half": "f16", "fp16": "f16", "float32": "f32", "float": "f32"}

# The formats that weights can be quantised to while they are loaded: ggml's, others of a file each; and mixes.
_FORMATS = (Path(__file__).parent / "model" / "formats").glob("[a-z]*.py")
IN_SITU = tuple(sorted({path.stem for path in _FORMATS} | mixes.IN_SITU.keys() | mixes.MIXES.keys()))
ISQ_SPELLINGS = {name.upper(): name for name in IN_SITU}  # llama.cpp's
ISQ_SPELLINGS |= {f"{name[:2]}_k": name for name in IN_SITU if name.endswith("k")}
ISQ_SPELLINGS |= {f"{name[:2]}_k_m": name for name in mixes.MIXES}
ISQ_SPELLINGS |= {spelled.upper(): name for spelled, name in ISQ_SPELLINGS.items()}

# How quantised checkpoints may be stored: a file each.
_STORED = (Path(__file__).parent / "model" / "stored_formats").glob("[a-z]*.py")
STORED = tuple(sorted(path.stem.replace("_", "-") for path in _STORED))
STORED_SPELLINGS = {  # other engines', of which some name the kernel as well
    "gptq_marlin": "gptq", "awq_marlin": "awq", "compressed_tensors": "compressed-tensors",
}  # fmt: skip

# How models write tool calls and mark their thoughts: a file each.
_TEXT = Path(__file__).parent / "server" / "text"
TOOL_FORMATS = tuple(sorted(path.stem for path in (_TEXT / "tool_formats").glob("[a-z]*.py")))
REASONING = tuple(sorted(path.stem for path in (_TEXT / "reasoning").glob("[a-z]*.py")))
TOOL_SPELLINGS = {  # vLLM's and SGLang's
    "llama3_json": "llama3", "llama4_json": "llama3", "llama": "llama3", "llama4_pythonic": "pythonic",
    "olmo3": "pythonic", "qwen": "hermes", "granite4": "hermes", "ernie45": "hermes", "qwen3_xml": "qwen3_coder",
    "glm47": "glm45", "minimax": "minimax_m2", "phi4_mini_json": "phi4", "openai": "harmony", "seed_oss": "seed",
    "functiongemma": "gemma", "gemma4": "gemma", "hunyuan_a13b": "jamba",
    "qwen25": "hermes", "gpt-oss": "harmony", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32", "deepseekv4": "deepseek_v4", "minimax-m3": "minimax_m3",
}  # fmt: skip
REASONING_SPELLINGS = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "deepseek_v4", "qwen3", "glm45", "minimax_m2", "step3", "ernie45"), "think"
    ),
    **dict.fromkeys(("deepseek-r1", "deepseek-v3", "qwen3-thinking"), "think"),
    "openai_gptoss": "harmony", "gpt-oss": "harmony", "seed_oss": "seed",
}  # fmt: skip

_MODEL, _SERVER, _RANKS, _MEMORY, _SAMPLING, _RUNNING = GROUPS

engine, launcher, server = (partial(flag, scope=(scope,)) for scope in (ENGINE, LAUNCHER, SERVER))
server_or_batch = partial(flag, scope=(SERVER, BATCH))
sampling = partial(engine, group=_SAMPLING, metavar="X")  # limits and meaning are those of requests


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The user's options; 0, "" and "auto" leave the choice to the program."""

    model: Annotated[
        str, engine("--model", "--w", "--weight-path", "--m", "--model-id", group=_MODEL, metavar="DIR",
                    positional=True, help="directory, GGUF file, or hub id; none: the built-in model"),
    ] = ""  # fmt: skip
    weight_file: Annotated[
        str, engine("--f", "--weight-file", group=_MODEL, metavar="FILE",
                    help="a GGUF file, its first shard; in --model's directory or hub id"),
    ] = ""  # fmt: skip
    models_config: Annotated[
        str, server("--models-config", group=_MODEL, metavar="FILE", variable="CANDLE_VLLM_MODELS_CONFIG",
                    help="models.yaml: several models, of which one is loaded at a time"),
    ] = ""  # fmt: skip
    served_model_name: Annotated[
        str, server_or_batch("--served-model-name", group=_MODEL, metavar="NAME,…", help="what clients call the model")
    ] = ""
    dtype: Annotated[
        str, engine("--dtype", group=_MODEL, choices=("auto", "bf16", "f16", "f32"), spellings=_DTYPES,
                    help="of weights and arithmetic; auto: the checkpoint's, f32 on CPUs"),
    ] = "auto"  # fmt: skip
    isq: Annotated[
        str, engine("--isq", group=_MODEL, choices=("none", *IN_SITU), spellings=ISQ_SPELLINGS,
                    help="quantise the weights while they are loaded"),
    ] = "none"  # fmt: skip
    quantization: Annotated[
        str, engine("--quantization", "--quant", group=_MODEL, choices=("auto", *STORED), spellings=STORED_SPELLINGS,
                    help="how the checkpoint is quantised; auto: as its config.json says"),
    ] = "auto"  # fmt: skip
    max_model_len: Annotated[
        int, engine("--max-model-len", group=_MODEL, metavar="N", low=0, help="longest prompt + output; 0: the model's")
    ] = 0
    load_format: Annotated[
        str, engine("--load-format", group=_MODEL, choices=("auto", "dummy"), spellings=_LOADS,
                    help="dummy: random weights, for measuring"),
    ] = "auto"  # fmt: skip
    load: Annotated[
        str, engine("--load", group=_MODEL, choices=("auto", "direct", "striped"),
                    help="striped: each byte is read once a job; auto: if over a network"),
    ] = "auto"  # fmt: skip
    stage: Annotated[
        str,
        engine("--stage", group=_MODEL, metavar="DIR", help="copy the weights there on each node, and load the copy"),
    ] = ""
    generation_config: Annotated[
        bool, engine("--generation-config", group=_MODEL, off=("--no-generation-config",), spellings=_GENERATION,
                     help="ignore the sampling defaults in the model's generation_config.json"),
    ] = True  # fmt: skip

    host: Annotated[str, server("--host", "--h", group=_SERVER, metavar="HOST", help="address to listen on")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, server("--port", "--p", group=_SERVER, metavar="N", low=0, high=65535, help="0 picks a free one")
    ] = 2000
    api_key: Annotated[  # of several, read from a file, each is a line: KEY, or NAME KEY
        str, server("--api-key", group=_SERVER, metavar="KEY", secret=True,
                    help="clients must send it; better in a file; if unset, no authentication"),
    ] = ""  # fmt: skip
    api_key_file: Annotated[
        str, server("--api-key-file", group=_SERVER, metavar="FILE",
                    help="a file of keys, a line each: KEY, or NAME KEY; # begins a comment"),
    ] = ""  # fmt: skip
    tls_cert: Annotated[
        str, server("--tls-cert", "--ssl-certfile", group=_SERVER, metavar="FILE",
                    help="serve HTTPS with this certificate (PEM, with its chain)"),
    ] = ""  # fmt: skip
    tls_key: Annotated[
        str, server("--tls-key", "--ssl-keyfile", group=_SERVER, metavar="FILE",
                    help="the certificate's private key; none: it is in --tls-cert's file"),
    ] = ""  # fmt: skip
    allowed_origins: Annotated[
        tuple[str, ...],
        server("--allowed-origins", group=_SERVER, metavar="URL,..", help="whose web pages may call it; * for any"),
    ] = ()  # fmt: skip
    allowed_hosts: Annotated[
        tuple[str, ...],
        server("--allowed-hosts", group=_SERVER, metavar="NAME,..", help="more names that it is called by; * for any"),
    ] = ()  # fmt: skip
    strict: Annotated[
        bool,
        server_or_batch(
            "--strict", group=_SERVER, off=("--no-strict",), help="404 to other model names, 400 to unknown fields"
        ),
    ] = False
    queue_size: Annotated[
        int,
        server("--queue-size", group=_SERVER, metavar="N", low=1,
               help="429 beyond this many open sequences plus --max-num-seqs"),
    ] = 1024  # fmt: skip
    requests_per_key: Annotated[
        int,
        server("--requests-per-key", group=_SERVER, metavar="N", low=0,
               help="429 beyond so many open requests of a key; 0: half, of several keys"),
    ] = 0  # fmt: skip
    client_priorities: Annotated[
        bool,
        server("--client-priorities", group=_SERVER, off=("--no-client-priorities",),
               help="obey clients' `priority`, below 0 for a key's share of --max-num-seqs"),
    ] = False  # fmt: skip
    response_store: Annotated[
        int,
        server("--response-store", group=_SERVER, metavar="N", low=0,
               help="responses kept in memory to go on from, up to 256 MiB; 0: none"),
    ] = 1024  # fmt: skip
    conversation_store: Annotated[
        int,
        server("--conversation-store", group=_SERVER, metavar="N", low=0,
               help="conversations kept where chats ask, up to 64 MiB; 0 keeps none"),
    ] = 1024  # fmt: skip
    record_conversation: Annotated[
        bool,
        server("--record-conversation", group=_SERVER, off=("--no-record-conversation",),
               help="record chats with a conversation_id unless they say otherwise"),
    ] = False  # fmt: skip
    ui_server: Annotated[
        bool,
        server("--ui-server", group=_SERVER, off=("--no-ui-server",), help="a page to chat with, at the server's /"),
    ] = False
    admin: Annotated[
        bool,
        server("--admin", group=_SERVER, off=("--no-admin",),
               help="key holders may call /sleep, /wake_up and /admin/log-level"),
    ] = False  # fmt: skip
    metrics_push: Annotated[
        str,
        server("--metrics-push", group=_SERVER, metavar="URL",
               help="send /metrics there every 15 s, such as to a Pushgateway"),
    ] = ""  # fmt: skip
    otlp_endpoint: Annotated[
        str,
        server("--otlp-endpoint", "--otlp-traces-endpoint", group=_SERVER, metavar="URL",
               help="send traces there by OTLP over HTTP; needs phalanx[otel]"),
    ] = ""  # fmt: skip
    file_store: Annotated[
        str,
        server("--file-store", group=_SERVER, metavar="DIR",
               help="keep /v1/files and /v1/batches there; none: there are none"),
    ] = ""  # fmt: skip

    chat_template: Annotated[
        str, engine("--chat-template", group=_SERVER, metavar="FILE", help="a template that replaces the model's")
    ] = ""
    tool_call_parser: Annotated[
        str,
        engine("--tool-call-parser", group=_SERVER, metavar="NAME", choices=("auto", "none", *TOOL_FORMATS),
               spellings=TOOL_SPELLINGS, help="how the model writes tool calls; auto: as its template shows"),
    ] = "auto"  # fmt: skip
    reasoning_parser: Annotated[
        str,
        engine("--reasoning-parser", group=_SERVER, choices=("auto", "none", *REASONING), spellings=REASONING_SPELLINGS,
               help="how the model marks its thoughts; auto: as its template shows"),
    ] = "auto"  # fmt: skip
    thinking: Annotated[
        bool | None, engine("--thinking", group=_SERVER, off=("--no-thinking",),
                            help="whether requests that do not say let the model reason"),
    ] = None  # fmt: skip
    mcp_config: Annotated[
        str,
        server("--mcp-config", group=_SERVER, metavar="FILE", variable="CANDLE_VLLM_MCP_CONFIG", runs_code=True,
               help="mcp.json: tool servers, whose tools chats may call"),
    ] = ""  # fmt: skip
    images_per_prompt: Annotated[
        int, engine("--images-per-prompt", group=_SERVER, metavar="N", low=0, high=1024,
                    help="most images of a request; 0: text alone, and no tower is loaded"),
    ] = 16  # fmt: skip
    mmproj: Annotated[
        str, engine("--mmproj", group=_SERVER, metavar="FILE",
                    help="the GGUF file with the tower of a GGUF model that takes images"),
    ] = ""  # fmt: skip
    allowed_media_hosts: Annotated[
        tuple[str, ...],
        server_or_batch("--allowed-media-hosts", "--allowed-media-domains", group=_SERVER, metavar="NAME,..",
                        help="hosts that images' URLs may name; * for any public one"),
    ] = ()  # fmt: skip
    allowed_media_dir: Annotated[
        str,
        server_or_batch("--allowed-media-dir", "--allowed-local-media-path", group=_SERVER, metavar="DIR",
                        help="where the images may lie that file: URLs name"),
    ] = ""  # fmt: skip
    access_log: Annotated[
        bool, server("--access-log", group=_SERVER, off=("--no-access-log",), help="log a line for every HTTP request")
    ] = False

    ranks: Annotated[
        int,
        launcher(
            "--np",
            "--ranks",
            group=_RANKS,
            metavar="N",
            low=0,
            slurm_decides=True,
            help="ranks to start; 0: one per device in --d",
        ),
    ] = 0
    devices: Annotated[
        tuple[int, ...],
        launcher("--d", "--devices", "--device-ids", group=_RANKS, metavar="0,1,..", low=0,
                 help="visible GPUs of each node, from 0; local rank i gets the i-th"),
    ] = ()  # fmt: skip
    device: Annotated[
        str, launcher("--device", group=_RANKS, choices=("auto", "cpu", "cuda", "mps"),
                      help="what the ranks compute on; mps: a Mac's GPU, by PyTorch alone")
    ] = "auto"  # fmt: skip
    tp: Annotated[
        int,
        launcher("--tp", "--tensor-parallel-size", group=_RANKS, metavar="N", low=0,
                 help="ranks that share each layer; 0: ranks / pp"),
    ] = 0  # fmt: skip
    pp: Annotated[
        int,
        launcher("--pp", "--pipeline-parallel-size", group=_RANKS, metavar="N", low=0,
                 help="pipeline stages; 0: 1, or ranks / tp"),
    ] = 0  # fmt: skip
    dp: Annotated[
        int, launcher("--dp", "--data-parallel-size", group=_RANKS, metavar="N", low=0,
                      help="replicas of the model, each on tp * pp ranks"),
    ] = 0  # fmt: skip
    ep: Annotated[
        int, launcher("--ep", "--expert-parallel-size", group=_RANKS, metavar="N", low=1,
                      help="ranks of tp that divide the experts; 1: each is split"),
    ] = 1  # fmt: skip
    multithread: Annotated[
        bool, launcher("--multithread", group=_RANKS, off=("--no-multithread",),
                       help="ranks as threads of one process, for tests on CPU"),
    ] = False  # fmt: skip

    mem: Annotated[
        int,
        engine(
            "--mem", "--kvcache-mem-gpu", group=_MEMORY, metavar="MB", low=0, help="KV cache of a rank; 0: by share"
        ),
    ] = 0
    num_experts_offload_per_rank: Annotated[
        int, engine("--num-experts-offload-per-rank", group=_MEMORY, metavar="N", low=0,
                    help="experts of a layer on each rank in host memory alone"),
    ] = 0  # fmt: skip
    expert_memory: Annotated[
        int, engine("--expert-memory", group=_MEMORY, metavar="MB", low=0,
                    help="of a rank's GPU for experts, the others being in host memory"),
    ] = 0  # fmt: skip
    expert_placement: Annotated[
        str, engine("--expert-placement", group=_MEMORY, choices=("auto", "cpu", "stream"),
                    help="how experts in host memory are served; auto: the fastest"),
    ] = "auto"  # fmt: skip
    expert_deferral: Annotated[
        bool, engine("--expert-deferral", group=_MEMORY, off=("--no-expert-deferral",),
                     help="apply CPU experts' output a layer later; changes tokens"),
    ] = False  # fmt: skip
    cpu_offload_gb: Annotated[
        float,
        engine(
            "--cpu-offload-gb", group=_MEMORY, metavar="GiB", low=0, help="a rank's tables and layers in host memory"
        ),
    ] = 0.0
    kvcache_mem_cpu: Annotated[
        int, engine("--kvcache-mem-cpu", group=_MEMORY, metavar="MB", low=0,
                    help="host memory of a rank for what the KV cache has no room for"),
    ] = 0  # fmt: skip
    mm_cache_gb: Annotated[
        float, engine("--mm-cache-gb", "--mm-processor-cache-gb", group=_MEMORY, metavar="GiB", low=0,
                      help="host memory of a rank for features of images, for later requests"),
    ] = 0.5  # fmt: skip
    kv_fraction: Annotated[
        float, engine("--kv-fraction", "--gpu-memory-utilization", group=_MEMORY, metavar="X", low=0, high=1,
                      help="KV cache's share of the memory free after loading; 0: automatic"),
    ] = 0.0  # fmt: skip
    kv_cache_dtype: Annotated[
        str,
        engine("--kv-cache-dtype", "--kvcache-dtype", group=_MEMORY, choices=("auto", "fp8"), spellings=KV_DTYPES,
               short={"--fp8-kvcache": "fp8"}, help="fp8: e4m3 with scales, twice the tokens; auto: --dtype"),
    ] = "auto"  # fmt: skip
    block_size: Annotated[
        int, engine("--block-size", group=_MEMORY, metavar="N", low=0, help="tokens in a cache block; 0: automatic")
    ] = 0
    max_num_seqs: Annotated[
        int,
        engine("--max-num-seqs", group=_MEMORY, metavar="N", low=1, high=65535,
               help="sequences that run at once on each copy"),
    ] = 256  # fmt: skip
    max_num_batched_tokens: Annotated[
        int,
        engine("--max-num-batched-tokens", "--prefill-chunk-size", group=_MEMORY, metavar="N", low=0,
               help="token budget of a step; 0: automatic, on GPUs 8192 or a bit more"),
    ] = 0  # fmt: skip
    prefix_cache: Annotated[
        bool,
        engine("--prefix-cache", "--enable-prefix-caching", group=_MEMORY,
               off=("--disable-prefix-cache", "--no-prefix-cache", "--no-enable-prefix-caching"),
               help="compute equal prompt beginnings anew"),
    ] = True  # fmt: skip
    speculate: Annotated[
        str, engine("--speculate", group=_MEMORY, choices=("auto", "none", "ngram", "mtp", "eagle3", "draft"),
                    spellings={"off": "none"},
                    help="how tokens are guessed; auto: by --draft-model, else ngram on CPUs"),
    ] = "auto"  # fmt: skip
    draft_model: Annotated[
        str, engine("--draft-model", group=_MEMORY, metavar="DIR",
                    help="guesses tokens: an EAGLE-3 head, or a smaller model"),
    ] = ""  # fmt: skip
    draft_tensor_parallel_size: Annotated[
        int, engine("--draft-tensor-parallel-size", group=_MEMORY, metavar="N", low=0,
                    help="ranks that a smaller model is split over, 1; 0: the target's"),
    ] = 0  # fmt: skip
    num_speculative_tokens: Annotated[
        int, engine("--num-speculative-tokens", group=_MEMORY, metavar="N", low=0, high=MAX_DRAFTS,
                    help="most guessed tokens of a sequence in a step; 0: automatic"),
    ] = 0  # fmt: skip

    temperature: Annotated[Temperature | None, sampling("--temperature")] = None
    top_p: Annotated[TopP | None, sampling("--top-p")] = None
    top_k: Annotated[TopK | None, sampling("--top-k", metavar="N")] = None
    min_p: Annotated[MinP | None, sampling("--min-p")] = None
    repetition_penalty: Annotated[RepetitionPenalty | None, sampling("--repetition-penalty", "--penalty")] = None
    presence_penalty: Annotated[Penalty | None, sampling("--presence-penalty")] = None
    frequency_penalty: Annotated[Penalty | None, sampling("--frequency-penalty")] = None
    max_tokens: Annotated[
        int | None,
        engine("--max-tokens", "--max-gen-tokens", group=_SAMPLING, metavar="N", low=1, help="longest answer"),
    ] = None
    seed: Annotated[
        int | None,
        engine("--seed", group=_SAMPLING, metavar="N", low=0, high=MAX_SEED,
               help="the same request gets the same answer; none: drawn for each"),
    ] = None  # fmt: skip

    timeout: Annotated[
        float,
        launcher("--timeout", group=_RUNNING, metavar="S", low=1, high=LONGEST,
                 help="seconds until a silent rank or server process is given up"),
    ] = 60.0  # fmt: skip
    idle_exit: Annotated[
        float,
        server("--idle-exit", group=_RUNNING, metavar="MIN", low=0,
               help="end the job after so many minutes without a request; 0: never"),
    ] = 0.0  # fmt: skip
    restarts: Annotated[
        int,
        server_or_batch(
            "--restarts",
            group=_RUNNING,
            metavar="N",
            low=0,
            slurm_decides=True,
            help="start failed ranks again, this many times",
        ),
    ] = 0
    resubmit: Annotated[
        bool,
        server("--resubmit", group=_RUNNING, off=("--no-resubmit",),
               help="before the time is over submit a successor, and hand over to it"),
    ] = False  # fmt: skip
    resubmit_command: Annotated[
        str,
        server("--resubmit-command", group=_RUNNING, metavar="CMD", runs_code=True,
               help="submits it, and prints the job's number; none: in Slurm, the same job"),
    ] = ""  # fmt: skip
    time_left: Annotated[
        str,
        server("--time-left", group=_RUNNING, metavar="TIME",
               help="until the job is ended: 90, 30m, 4h, a time; none: ask the scheduler"),
    ] = ""  # fmt: skip
    handover: Annotated[
        float,
        server("--handover", group=_RUNNING, metavar="S", low=0,
               help="seconds before the end to submit it; 0: a third of all, at most 1800"),
    ] = 0.0  # fmt: skip
    log: Annotated[
        bool,
        launcher("--log", group=_RUNNING, off=("--no-log",), help="also write phalanx-rank-N.log, one for each rank"),
    ] = False
    log_level: Annotated[
        str,
        launcher("--log-level", group=_RUNNING, choices=("debug", "info", "warning", "error"), help="what is logged"),
    ] = "info"
    log_format: Annotated[
        str,
        launcher(
            "--log-format", group=_RUNNING, choices=("text", "json"), help="lines of the log; json: an object each"
        ),
    ] = "text"


def degrees(size: int, tp: int, pp: int, dp: int, ep: int = 1) -> tuple[int, int, int]:
    """The tensor, pipeline and data degrees of `size` ranks; 0 means not given. Raises ValueError with a message for
    users.

    One replica, unless more are asked for; tp takes the ranks that are left, or pp does where tp is given.
    ep: the expert degree, which must divide tp; 0: any.
    """
    given = [(name, n) for name, n in (("--tp", tp), ("--pp", pp), ("--dp", dp)) if n]
    for name, degree in given:
        if size % degree:
            raise ValueError(f"{name} {degree} does not divide the {size} ranks")
    product = math.prod(n for _, n in given)
    if size % product or (tp and pp and product != size):
        words = " times ".join(f"{name} {n}" for name, n in given)
        more = f"; --dp {size // product} serves as many replicas" if not dp and size % product == 0 else ""
        raise ValueError(f"{words} is {product}, but there are {size} ranks{more}")
    left = size // product
    tensor = tp or left
    if ep and tensor % ep:
        raise ValueError(
            f"--ep {ep} does not divide --tp {tensor}: the ranks of a tensor group share out its experts; those of "
            "several replicas (--dp) cannot yet"
        )
    return tensor, pp or (left if tp else 1), dp or 1


def specs(options: type[msgspec.Struct] = Options) -> dict[str, Spec]:
    """All options in the order of the struct, by field name. Verbs that do not serve have structs of their own."""
    return read(options)


SERVER_ONLY = [name for name, spec in specs().items() if spec.flag.scope == (SERVER,)]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The per-rank launcher's message to `python -m phalanx.rank`, as JSON in the environment variable PHALANX_JOB."""

    options: Options  # rank 0's win; `ranks`, `tp`, `pp` and `dp` are resolved
    rank: int = 0  # as announced by whatever started us; MPI's own word counts
    announced_size: int = 1  # to be compared with Get_size()
    local_rank: int = 0
    server_socket: str = ""  # unix socket of the server process; "" on all ranks but 0
    server_watched: bool = False  # rank 0 and it exchange heartbeats; who is silent for --timeout is killed
    device_index: int = -1  # of the GPU on this node; -1: the CPU, or the local rank's
    bound: str = ""  # the same in words, for the log
    columns: int = 0  # of the terminal that rank 0's stderr ends on; 0: none
    abort: bool = False  # the launcher takes a failed rank's code from MPI_Abort only
    over: bool = False  # rank 0 has found nothing to do: all ranks end when they have met


JOB_ENV = "PHALANX_JOB"


def encode_job(job: Job) -> str:
    return msgspec.json.encode(job).decode()


def decode_job(text: str) -> Job:
    return msgspec.json.decode(text, type=Job)
