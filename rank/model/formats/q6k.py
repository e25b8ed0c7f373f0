"""Q6_K (ggml): codes of 6 bits in super-blocks of 256 inputs, 6.56 bits a weight."""

from ....kernels.quantized import q6_k
from ._in_situ import InSitu


class Part(InSitu):
    codec = q6_k
    smaller_groups = "q8_0"
