"""Q3_K (ggml): codes of 3 bits in super-blocks of 256 inputs, 3.44 bits a weight."""

from ....kernels.quantized import q3_k
from ._in_situ import InSitu


class Part(InSitu):
    codec = q3_k
    smaller_groups = "q4_0"
