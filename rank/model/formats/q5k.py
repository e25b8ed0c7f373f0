"""Q5_K (ggml): codes of 5 bits in super-blocks of 256 inputs, 5.5 bits a weight."""

from ....kernels.quantized import q5_k
from ._in_situ import InSitu


class Part(InSitu):
    codec = q5_k
    smaller_groups = "q5_1"
