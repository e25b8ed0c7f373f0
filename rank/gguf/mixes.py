"""Which type each tensor has in a quantised file: llama.cpp's mixes, in which those that cost most have more bits.

What its quantiser chooses, as src/llama-quant.cpp of https://github.com/ggml-org/llama.cpp does (2026-11). A mix is
named after what most tensors have: Q4_K_M is q4km here.
"""

from __future__ import annotations

from typing import NamedTuple

from .types import BY_NAME

# Names of --isq for the types that weights can be quantised to while they are loaded.
IN_SITU = {
    "q2k": "Q2_K", "q3k": "Q3_K", "q4_0": "Q4_0", "q4_1": "Q4_1", "q4k": "Q4_K", "q5_0": "Q5_0", "q5_1": "Q5_1",
    "q5k": "Q5_K", "q6k": "Q6_K", "q8_0": "Q8_0",
}  # fmt: skip
MIXES = {"q3km": "Q3_K", "q4km": "Q4_K", "q5km": "Q5_K"}  # what most tensors have
# The type for rows that are no whole super-blocks.
SMALLER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
WIDE = "F32", "F16", "BF16", "Q8_0"  # which the output has, too
VALUES = ("attn_v", "attn_qkv", "attn_kv_b")


class Sizes(NamedTuple):
    """The facts that the choice depends on."""

    layers: int
    experts: int = 0
    queries: int = 1  # heads that share a key head


def type_of(mix: str, part: str, layer: int, sizes: Sizes) -> str:
    """The type of a matrix whose rows are whole super-blocks.

    part: GGUF's name of it, without layer and ending; layer: its number. mix: one of MIXES, or a type that all have.
    """
    usual = MIXES.get(mix, mix)
    if part == "output" and usual not in WIDE:
        return "Q6_K"
    if mix not in MIXES:
        return usual
    if part in VALUES:
        return _values(mix, usual, layer, sizes)
    if part == "attn_k" and sizes.experts == 8:
        return "Q8_0"
    if part == "attn_output":
        if sizes.experts == 8:
            return "Q5_K"
        return "Q4_K" if mix == "q3km" else usual
    if part.startswith("ffn_down"):
        if mix == "q3km":
            return "Q5_K" if layer < sizes.layers // 16 else "Q4_K"
        return "Q6_K" if _has_more(layer, sizes.layers) else usual
    return usual


def _values(mix: str, usual: str, layer: int, sizes: Sizes) -> str:
    if sizes.experts == 8:  # there it is small beside the experts
        return "Q8_0"
    more = layer < 2 if mix == "q3km" else _has_more(layer, sizes.layers)
    found = {"q3km": ("Q4_K", "Q5_K")}.get(mix, (usual, "Q6_K"))[more]
    # Models of 70B, whose values are an eighth of their queries.
    return "Q5_K" if sizes.layers == 80 and sizes.queries > 1 and found == "Q4_K" else found


def _has_more(layer: int, layers: int) -> bool:
    """All layers of the first and the last eighth, and one in three of those between."""
    first = layers // 8
    return layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2


def fitting(type: str, inputs: int) -> str:
    """This type, or what takes its place in rows of so many inputs."""
    for one in (type, SMALLER.get(type, type)):
        if inputs % BY_NAME[one].group == 0:
            return one
    return "F16"
