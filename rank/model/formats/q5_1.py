"""Q5_1 (ggml): codes of 5 bits, an f16 scale and an f16 minimum for each 32 inputs, 6 bits a weight."""

from ....kernels.quantized import q5_1
from ._in_situ import InSitu


class Part(InSitu):
    codec = q5_1
