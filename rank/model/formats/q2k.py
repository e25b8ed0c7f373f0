"""Q2_K (ggml): codes of 2 bits in super-blocks of 256 inputs, 2.63 bits a weight."""

from ....kernels.quantized import q2_k
from ._in_situ import InSitu


class Part(InSitu):
    codec = q2_k
    smaller_groups = "q4_0"
