"""Flags of candle-vLLM, vLLM, SGLang and llama.cpp that are no options here: what their users are told instead.

A flag that means what an option means is another name of it. One that would change nothing is passed over with a note.
One that would change the answer, or asks for what there is not, is refused with what to do about it. Nothing is ignored
in silence.
"""

from __future__ import annotations

import re

import msgspec

from .compat import answers, memory, model, ranks, server
from .compat.flag import CompatFlag

OTHER_NAMES = {
    # SGLang's, and vLLM's short ones
    "-tp": "--tp", "--tp-size": "--tp",
    "-pp": "--pp", "--pp-size": "--pp",
    "-dp": "--dp", "--dp-size": "--dp",
    "--ep-size": "--ep",
    "-q": "--quantization",
    "--model-path": "--model",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--max-queued-requests": "--queue-size",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--page-size": "--block-size",
    "--disable-radix-cache": "--disable-prefix-cache",
    "--mem-fraction-static": "--kv-fraction",
    # llama.cpp's
    "-m": "--model",
    "-a": "--served-model-name", "--alias": "--served-model-name",
    "-s": "--seed",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--predict": "--max-tokens", "--n-predict": "--max-tokens",
    "--chat-template-file": "--chat-template",
    "--cache-prompt": "--prefix-cache", "--no-cache-prompt": "--no-prefix-cache",
    "--cors-origins": "--allowed-origins",
    "--ssl-cert-file": "--tls-cert", "--ssl-key-file": "--tls-key",
    "--ui": "--ui-server", "--webui": "--ui-server", "--no-ui": "--no-ui-server", "--no-webui": "--no-ui-server",
}  # fmt: skip

_OF_FREE = "is read as --kv-fraction: a share of the memory free after loading"
# Options that the server they come from gives a slightly different meaning.
DIFFERENCES = {
    "--gpu-memory-utilization": _OF_FREE,
    "--mem-fraction-static": _OF_FREE,
    "--repeat-penalty": "is read as --repetition-penalty: it counts the whole text",
}


# A name that ends with * stands for all that begin so.
COMPAT_FLAGS = {**ranks.FLAGS, **memory.FLAGS, **model.FLAGS, **answers.FLAGS, **server.FLAGS}
_FAMILIES = {name.removesuffix("*"): entry for name, entry in COMPAT_FLAGS.items() if name.endswith("*")}


def find(name: str) -> CompatFlag | None:
    """The entry of a flag, with - or _. vLLM also writes -O3, and --flag.key for a part of a JSON value."""
    if re.fullmatch(r"-O\d", name):
        return msgspec.structs.replace(COMPAT_FLAGS["-O"], takes="")
    name = name.partition(".")[0]
    if name.startswith("--"):
        name = name.replace("_", "-")
    if (entry := COMPAT_FLAGS.get(name)) is not None:
        return entry
    positive = COMPAT_FLAGS.get("--" + name.removeprefix("--no-"))
    if name.startswith("--no-") and positive is not None and positive.takes in ("", "[X]"):
        return CompatFlag("it is off anyway" if positive.refused else positive.text)
    return next((entry for begin, entry in _FAMILIES.items() if name.startswith(begin)), None)


# candle-vLLM's model subcommands, once needed after the weights' path.
ARCHITECTURES = (
    "llama", "llama3", "mistral", "phi2", "phi3", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma3", "yi",
    "stable-lm", "glm4", "deep-seek",
)  # fmt: skip
