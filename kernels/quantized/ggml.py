"""The codecs of ggml's types, by their names in files."""

from __future__ import annotations

from . import int8_codes, super_blocks

Ggml = super_blocks.SuperBlocks | int8_codes.Int8Codes
_ALL: dict[str, Ggml] = {**super_blocks.CODECS, **int8_codes.CODECS}
CODECS = {name.upper(): one for name, one in _ALL.items()}
