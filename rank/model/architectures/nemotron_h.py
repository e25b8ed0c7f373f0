"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA 2025, arXiv 2504.03624, 2508.14444): each layer is one sublayer,
Mamba-2, attention that is not rotated, or a feed-forward layer without a gate, which may be of experts. Those of Super
and Ultra are between two linears, as they are smaller than the residual stream."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count
from ..batch import Batch
from ..cache_spec import CacheSpec, SharedCache
from ..config import FULL, LINEAR
from ..layers import mamba2
from ..layers.attention import layer_type
from ..layers.linear import ColumnParallel, RowParallel
from ..layers.mamba2 import Mamba2, Mamba2Shape
from ..layers.mlp import MLP
from ..layers.moe import MoE
from ..layers.norm import AddRMSNorm
from ..layers.residual import Normed, Partial, ResidualStream
from ..layers.rope import NONE, Parameters
from ..shard import whole
from . import deepseek_v3, llama

CONFIG = {
    "names": {
        "layers_block_type": "layer_types", "layer_norm_epsilon": "rms_norm_eps", "mlp_hidden_act": "hidden_act",
        "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    },
    "defaults": {"head_dim": 128},
}  # fmt: skip
MLP_LAYER, MOE_LAYER = "mlp", "moe"
KINDS = {"mamba": LINEAR, "attention": FULL}  # as the first checkpoints name types of layers
PATTERN = {"M": LINEAR, "*": FULL, "-": MLP_LAYER, "E": MOE_LAYER}  # in hybrid_override_pattern
FEED_FORWARD = MLP_LAYER, MOE_LAYER


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5
    hidden_act: str = "relu2"
    intermediate_size: int = 21504
    layer_types: list[str] = field(default_factory=list)
    hybrid_override_pattern: str = ""
    mamba_num_heads: Count = 128
    mamba_head_dim: Count = 64
    mamba_hidden_act: str = "silu"
    n_groups: Count = 8
    ssm_state_size: Count = 128
    conv_kernel: Count = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    time_step_limit: Any = None  # time_step_min is of how weights were drawn
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: Count | None = None
    routed_scaling_factor: float = 1.0
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        mamba2.check_time_steps(self.time_step_limit)
        base.expect("mamba_hidden_act", self.mamba_hidden_act, "silu")
        base.expect("attention_bias", self.attention_bias, False)

    def kind(self, index: int) -> str:
        """A layer's type."""
        if self.hybrid_override_pattern and not self.layer_types:
            return layer_type([*self.hybrid_override_pattern], index, "", (*PATTERN,))
        usual = (LINEAR, MOE_LAYER, FULL, MLP_LAYER)[index % 4]
        return layer_type(self.layer_types, index, usual, (FULL, LINEAR, *FEED_FORWARD, *KINDS))

    def type_of(self, index: int) -> str:
        kind = self.kind(index)
        return PATTERN.get(kind) or KINDS.get(kind, kind)

    def linear(self, index: int) -> bool:
        return self.type_of(index) == LINEAR

    @property
    def draft_layer(self) -> int:
        full = (index for index in reversed(range(self.num_hidden_layers)) if self.type_of(index) == FULL)
        return next(full, self.num_hidden_layers - 1)

    def rope(self, index: int) -> Parameters:
        return NONE

    @property
    def router(self) -> RouterParams:
        return deepseek_v3.router(self)

    @property
    def mamba(self) -> Mamba2Shape:
        return Mamba2Shape(
            self.mamba_num_heads, self.mamba_head_dim, self.n_groups, self.ssm_state_size, self.conv_kernel,
            self.use_conv_bias, self.use_bias,
        )  # fmt: skip


class Expand(RowParallel):
    """The linear after experts of a smaller size. Each rank's part of their sum has all its inputs."""

    matrix: Tensor | None = None  # what is multiplied has to be computed first, which fused kernels do not

    def __init__(self, inputs: int, outputs: int, mesh: Mesh, bias: bool):
        super().__init__(inputs, outputs, mesh, bias)
        self.inputs = whole(inputs)

    def multiply(self, x: Partial) -> Tensor:  # type: ignore[override]
        return super().multiply(x.local())


class Experts(MoE):
    """Experts without a gate, and one of another size that all tokens visit."""

    def __init__(self, args: Args, mesh: Mesh):
        hidden, act = args.hidden_size, args.hidden_act
        inner, experts = args.moe_intermediate_size, args.n_routed_experts
        super().__init__(hidden, inner, experts, args.router, mesh, act, gated=False, visited=args.moe_latent_size)
        self.shared_experts = MLP(hidden, args.moe_shared_expert_intermediate_size, mesh, act, args.mlp_bias)

    def forward(self, h: Normed | Tensor) -> Partial:
        return super().forward(h) + self.shared_experts(h)


class LatentExperts(Experts):
    """Experts between two linears, whose inputs and outputs are smaller than the residual stream."""

    def __init__(self, args: Args, mesh: Mesh):
        super().__init__(args, mesh)
        hidden, latent = args.hidden_size, args.moe_latent_size
        assert latent is not None
        self.fc1_latent_proj = ColumnParallel(whole(hidden), (whole(latent),), args.mlp_bias)
        self.fc2_latent_proj = Expand(latent, hidden, mesh, args.mlp_bias)

    def forward(self, h: Normed | Tensor) -> Partial:
        chosen = self.gate(h.tensor() if isinstance(h, Normed) else h)
        routed = self.experts(self.fc1_latent_proj(h), *chosen)
        return Partial((self.fc2_latent_proj, routed)) + self.shared_experts(h)


class Layer(base.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        hidden, self.kind, self.local = args.hidden_size, args.type_of(index), local
        self.norm = AddRMSNorm(hidden, args.rms_norm_eps)
        self.mixer: nn.Module
        if self.kind == LINEAR:
            self.mixer = Mamba2(hidden, args.mamba, args.rms_norm_eps, mesh, local)
        elif self.kind == FULL:
            self.mixer = llama.Attention(args, mesh, index, local)
        elif self.kind == MOE_LAYER:
            self.mixer = (LatentExperts if args.moe_latent_size else Experts)(args, mesh)
        else:
            self.mixer = MLP(hidden, args.intermediate_size, mesh, args.hidden_act, args.mlp_bias)

    def cache_spec(self) -> CacheSpec:
        return SharedCache() if self.kind in FEED_FORWARD else super().cache_spec()

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.norm(stream))
        if self.kind == FULL:
            stream.add(self.mixer(h, cos_sin, batch))
        elif self.kind == LINEAR:
            stream.add(self.mixer(h, batch))
        else:
            batch.reduced(h.keep, self.local)
            if len(stream):
                stream.add(self.mixer(h))


class Model(base.Model):
    LAYER = Layer
    MERGED = base.Model.MERGED | {"gate_up_proj": ("up_proj",)}  # of experts, which have no gate
    RENAMED = {
        "backbone.": "model.",
        "model.embeddings.": "model.embed_tokens.",
        "model.norm_f.": "model.norm.",
    } | {
        theirs.replace("mamba.", "mixer."): ours.replace("mamba.", "mixer.") for theirs, ours in mamba2.RENAMED.items()
    }
