"""Q5_0 (ggml): codes of 5 bits, an f16 scale for each 32 inputs, 5.5 bits a weight."""

from ....kernels.quantized import q5_0
from ._in_situ import InSitu


class Part(InSitu):
    codec = q5_0
