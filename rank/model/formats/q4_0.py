"""Q4_0 (ggml): codes of 4 bits, an f16 scale for each 32 inputs, 4.5 bits a weight."""

from ....kernels.quantized import q4_0
from ._in_situ import InSitu


class Part(InSitu):
    codec = q4_0
