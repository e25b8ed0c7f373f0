"""Weight formats: which one each linear of a model has.

A linear is a list of parts, so its outputs may differ in format, as in mixed GGUF files. `Format` (_format.py) is the
protocol. A format that weights can be quantised to while they are loaded is found by its name: ggml's types in the
table of rank/gguf/mixes.py, any other as the FORMAT of the file of its name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence

from ....errors import MODEL, FatalError
from ....kernels.quantized.ggml import CODECS
from ...gguf import mixes
from ..weights.slicing import ShardedModule, Source
from ._format import Format
from ._in_situ import InSitu
from ._plain import DENSE

ChooseFormat = Callable[[str], Format]  # from a tensor's path in the checkpoint, without the field's name

# The linears of which a mix of formats has more bits, by the end of their paths → GGUF's names of them.
MIXED = {
    "lm_head": "output", "v_proj": "attn_v", "qkv_proj": "attn_qkv", "c_attn": "attn_qkv", "kv_b_proj": "attn_kv_b",
    "k_proj": "attn_k", "o_proj": "attn_output", "self_attn.dense": "attn_output", "attn.c_proj": "attn_output",
    "down_proj": "ffn_down", "fc2": "ffn_down", "mlp.c_proj": "ffn_down",
}  # fmt: skip


def dense(path: str) -> Format:
    """The default: unquantised weights of 16 or 32 bits for every linear."""
    return DENSE


def in_situ(name: str, sizes: mixes.Sizes) -> ChooseFormat:
    """Every linear is quantised to this format while it is loaded, each to what a mix of them has for it, or none is.

    Where a rank's inputs are not whole groups of a format, the one takes its place that it names for that, if it does.
    """
    if name == "none":
        return dense
    if name not in mixes.MIXES:
        return lambda path: find(name)
    return lambda path: find(NAMES[mixes.type_of(name, *_place(path), sizes)])


NAMES = {type: name for name, type in mixes.IN_SITU.items()}  # of formats, by ggml's types


def _place(path: str) -> tuple[str, int]:
    """GGUF's name of a linear, and the number of its layer."""
    parts = path.split(".")
    part = MIXED.get(".".join(parts[-2:]), MIXED.get(parts[-1], ""))
    return part, next((int(one) for one in parts if one.isdigit()), 0)


def of_experts(layer: ShardedModule, sources: Sequence[Source], format_of: ChooseFormat, ranks: int) -> Format:
    """The format of one linear of all experts that so many ranks share, by the paths of their tensors. Raises
    FatalError where experts differ."""
    experts = range(layer.experts.size)
    paths = [
        one.path.replace("{}", str(number)) for one in sources for number in (experts if "{}" in one.path else (0,))
    ]
    found = {path: format_of(path) for path in paths}
    first = found[paths[0]]
    other = next((path for path, one in found.items() if one != first), None)
    if other is None:
        return first.fitting(sources[0].path, layer.inputs.size, ranks)
    if all(one.reads_plain for one in found.values()):
        return DENSE
    raise FatalError(
        f"{other} and {paths[0]} are stored in different formats, and all experts of a layer are multiplied as one: "
        "convert the checkpoint so that they have one, or leave all of them plain",
        MODEL,
    )


@functools.cache
def find(name: str) -> Format:
    """A format that weights are quantised to while they are loaded."""
    if (type := mixes.IN_SITU.get(name)) is None:
        found: Format = importlib.import_module(f".{name}", __name__).FORMAT
        return found
    smaller = mixes.SMALLER.get(type)
    other = InSitu(NAMES[smaller], CODECS[smaller]) if smaller else None
    return InSitu(name, CODECS[type], other)
