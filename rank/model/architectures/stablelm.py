"""StableLM 3B, Zephyr and StableLM 2 (Bellagente et al. 2024, arXiv 2402.17834): Llama with layer norms and a quarter
of each head rotated; the 12B has parallel blocks and a norm for each head's queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.norm.norm import layer_norm
from .. import base
from ..layers.norm import LayerNorm
from ..shard import Shard, even, key_heads, whole
from ..weights.slicing import Source
from . import cohere, llama

CONFIG = {
    "names": {"use_qkv_bias": "qkv_bias", "use_parallel_residual": "parallel"},
    "defaults": {"partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    o_bias: ClassVar[bool] = False
    layer_norms: ClassVar[bool] = True

    layer_norm_eps: float = 1e-5
    qkv_bias: bool = False
    parallel: bool = False
    qk_layernorm: bool = False
    rope_pct: float | None = None  # an older key; transformers reads partial_rotary_factor alone

    def __post_init__(self) -> None:
        share = self.rope_parameters["partial_rotary_factor"]
        if self.rope_pct not in (None, share):
            raise FatalError(
                f"config.json: rope_pct is {self.rope_pct}, but partial_rotary_factor, which counts, is {share}", MODEL
            )


class HeadLayerNorms(LayerNorm):
    """A layer norm for each head, with a weight and no bias."""

    def __init__(self, path: str, heads: Shard, dim: int, eps: float):
        """path: of the norms in the checkpoint, which has them one by one."""
        super().__init__(heads.width * dim, eps, bias=False)
        self.outputs = (whole(dim),) * heads.width
        self.sources = tuple(Source(f"{path}.norms.{i}") for i in range(heads.start, heads.stop))
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, heads, dim]."""
        assert self.weight is not None
        return layer_norm(x, self.weight.view(-1, self.dim), None, self.eps)


class Attention(llama.Attention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.q_norm = self.k_norm = None
        if args.qk_layernorm:
            path, tensor, eps = f"model.layers.{index}.self_attn", mesh.tensor, args.layer_norm_eps
            queries = even(args.num_attention_heads, tensor.rank, tensor.size)
            keys = key_heads(args.num_key_value_heads, tensor.rank, tensor.size)
            self.q_norm = HeadLayerNorms(f"{path}.q_layernorm", queries, args.head_dim, eps)
            self.k_norm = HeadLayerNorms(f"{path}.k_layernorm", keys, args.head_dim, eps)

    forward = cohere.Attention.forward


class Layer(llama.Layer):
    ATTENTION = Attention


class Model(base.Model):
    LAYER = Layer
