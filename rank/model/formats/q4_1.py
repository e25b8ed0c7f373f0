"""Q4_1 (ggml): codes of 4 bits, an f16 scale and an f16 minimum for each 32 inputs, 5 bits a weight."""

from ....kernels.quantized import q4_1
from ._in_situ import InSitu


class Part(InSitu):
    codec = q4_1
