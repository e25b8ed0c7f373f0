"""What kernels for super-blocks know of a type."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """What is the same for all weights of a type."""

    super: int  # inputs of a super-block, 32 or 256
    group: int  # inputs of a group, 16 or 32
    bits: int  # of a code as it is kept, 4, 6 or 8
    zero: int  # what all codes have too much
    bytes: int  # of a super-block in ggml's files
    minima: bool = True  # whether groups have them
    encoder: str = ""  # the type's name in scale_search.cpp, or group_encoder.cpp; none: torch encodes it
