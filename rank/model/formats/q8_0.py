"""Q8_0 (ggml): groups of 32 inputs with an f16 scale and int8 codes, 8.5 bits a weight."""

from ....kernels.quantized import q8_0
from ._in_situ import InSitu


class Part(InSitu):
    codec = q8_0
