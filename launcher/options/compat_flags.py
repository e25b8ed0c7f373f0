"""Flags of candle-vLLM and vLLM that are no options here: what their users are told instead.

A flag that would change nothing is passed over with a note; one that would change the answer is refused with what to
do about it. Nothing is ignored in silence.
"""

from __future__ import annotations

import msgspec


class CompatFlag(msgspec.Struct, frozen=True):
    text: str
    takes_value: bool = False
    refused: bool = False


def _note(text: str, takes_value: bool = False) -> CompatFlag:
    return CompatFlag(text, takes_value)


def _refuse(text: str) -> CompatFlag:
    return CompatFlag(text, refused=True)


_NODES = _refuse("start the job with mpirun: mpirun -np N -hostfile FILE phalanx serve …")
_HUB = _refuse("set HF_TOKEN, or log in with `hf auth login`")
_TOOLS = _refuse("write the tool server into a file: --mcp-config FILE (docs/tool-servers.md has its shape)")

COMPAT_FLAGS: dict[str, CompatFlag] = {
    # candle-vLLM, both generations
    "--multi-process": _note("every rank is a process"),
    "--verbose": _note("--log-level debug logs more"),
    "--holding-time": _note("requests join the running batch at once", takes_value=True),
    "--disable-cuda-graph": _note("graphs are used where they are faster, and results differ by rounding at most"),
    "--nk": _note("weights are repacked for the device when they are loaded", takes_value=True),
    "--cpu": _refuse("use --device cpu"),
    "--num-nodes": _NODES,
    "--node-rank": _NODES,
    "--master-addr": _NODES,
    "--master-port": _NODES,
    "--hostfile": _NODES,
    "--hf-token": _HUB,
    "--hf-token-path": _HUB,
    "--yarn-scaling-factor": _refuse("write rope_parameters into the model's config.json"),
    "--repeat-last-n": _refuse("penalties see the whole text; --repetition-penalty sets how strong they are"),
    "--prefix-cache-max-tokens": _refuse("every free block may hold a prefix; --disable-prefix-cache switches it off"),
    "--mamba-fraction": _refuse("recurrent states get what --max-num-seqs sequences need"),
    "--mcp-command": _TOOLS,
    "--mcp-args": _TOOLS,
    "--enforce-parser": _refuse("the format of tool calls is chosen by the model's chat template"),
    "--request-timeout": _refuse("requests have no time limit; --timeout limits a rank's step"),
    # vLLM
    "--revision": _refuse("`phalanx pull ID --revision REV --to DIR` fetches it; then serve DIR"),
    "--trust-remote-code": _note("no code of the checkpoint is run"),
    "--enforce-eager": _note("graphs are used where they are faster, and results differ by rounding at most"),
    "--enable-chunked-prefill": _note("it is always on"),
    "--enable-auto-tool-choice": _note("the model may always call the tools that a request has"),
    "--disable-log-requests": _note("requests are logged with --access-log only"),
    "--no-enable-log-requests": _note("requests are logged with --access-log only"),
    "--swap-space": _refuse("--kvcache-mem-cpu MB gives the KV cache host memory, in MB of each rank"),
    "--distributed-executor-backend": _note("ranks are MPI processes", takes_value=True),
    "--tokenizer": _refuse("the tokenizer is read from the model's directory"),
    "--enable-expert-parallel": _refuse("say over how many ranks: --ep N, as many as --tp or a divisor of it, or 0"),
    "--nnodes": _NODES,
    "--allowed-methods": _note("pages of --allowed-origins may use every method that an endpoint has", True),
    "--allowed-headers": _note("pages of --allowed-origins may send every header", True),
    "--allow-credentials": _refuse("there are no cookies here; a page sends the key in a header"),
}

# candle-vLLM's model subcommands, once needed after the weights' path.
ARCHITECTURES = (
    "llama", "llama3", "mistral", "phi2", "phi3", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma3", "yi",
    "stable-lm", "glm4", "deep-seek",
)  # fmt: skip
