"""Q4_K (ggml): codes of 4 bits in super-blocks of 256 inputs, 4.5 bits a weight."""

from ....kernels.quantized import q4_k
from ._in_situ import InSitu


class Part(InSitu):
    codec = q4_k
    smaller_groups = "q5_0"
