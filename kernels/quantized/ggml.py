"""The codecs of ggml's types, by their names in files."""

from __future__ import annotations

from . import int8_codes, super_blocks

Ggml = super_blocks.SuperBlocks | int8_codes.Int8Codes
_ALL: tuple[Ggml, ...] = (
    super_blocks.q4_0, super_blocks.q4_1, super_blocks.q5_1, super_blocks.iq4_xs, super_blocks.q2_k, super_blocks.q3_k,
    super_blocks.q4_k, super_blocks.q5_k, super_blocks.q6_k, int8_codes.q8_0, int8_codes.q5_0, int8_codes.iq4_nl,
)  # fmt: skip
CODECS = {one.name.upper(): one for one in _ALL}
