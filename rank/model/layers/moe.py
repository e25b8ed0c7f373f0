"""Mixture of experts in place of a feed-forward layer (Shazeer et al. 2017, arXiv 1701.06538)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....errors import MODEL, USAGE, FatalError
from ....kernels.moe.router import RouterParams, route, weigh
from ..experts.fused import APART, ExpertLayout, FusedExperts
from ..shard import whole
from ..weights.slicing import Field, ShardedModule
from .mlp import GatedMLP, activation
from .residual import Normed, Partial


class Router(ShardedModule):
    """Chooses each token's experts, in f32 and on every rank alike."""

    fields = (
        Field("weight", "oi"),
        Field("e_score_correction_bias", "o", torch.float32, made_up=0),  # no expert is chosen more often
        Field("bias", "o", torch.float32),
    )

    def __init__(self, hidden: int, experts: int, params: RouterParams):
        super().__init__()
        _check_groups(experts, params)
        self.inputs, self.outputs, self.params = whole(hidden), (whole(experts),), params
        self.weight = nn.Parameter(torch.empty(experts, hidden, device="meta"), requires_grad=False)
        bias = nn.Parameter(torch.empty(experts, device="meta"), requires_grad=False)
        self.e_score_correction_bias = bias if params.corrected else None
        self.bias = bias if params.biased else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] → ids [T, k] int32 and weights [T, k] f32."""
        bias = self.bias if self.params.biased else self.e_score_correction_bias
        return route(x, self.weight, bias, self.params)


class HashTable(ShardedModule):
    """The experts of each token id."""

    fields = (Field("tid2eid", "io", torch.int64, made_up=0),)

    def __init__(self, vocab: int, top_k: int, mesh: Mesh):
        super().__init__()
        self.mesh, self.inputs, self.outputs = mesh, whole(vocab), (whole(top_k),)
        empty = torch.empty(vocab, top_k, dtype=torch.int64, device="meta")
        self.tid2eid = nn.Parameter(empty, requires_grad=False)

    def finish(self) -> None:
        """Raises FatalError on later stages of a pipeline. It is asked here, as `fit` makes stages of single layers."""
        if not self.mesh.first:
            raise FatalError(
                f"--pp {self.mesh.pipe.size}: token ids choose experts in layers of stage {self.mesh.pipe.rank}, but "
                "the first stage alone has them: use fewer stages",
                USAGE,
            )


class HashRouter(Router):
    """Chooses experts by a token's id alone (hash layers: Roller et al. 2021, arXiv 2106.04426), and weighs them by
    their scores."""

    def __init__(self, hidden: int, experts: int, params: RouterParams, vocab: int, mesh: Mesh):
        super().__init__(hidden, experts, params._replace(corrected=False))
        self.table = HashTable(vocab, params.top_k, mesh)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """tokens: [T] int64."""
        ids = self.table.tid2eid[tokens]
        return ids.int(), weigh(x, self.weight, ids, self.params)


def _check_groups(experts: int, params: RouterParams) -> None:
    if experts % params.groups:
        raise FatalError(f"config.json: {experts} experts do not fall into {params.groups} groups", MODEL)
    size = experts // params.groups
    if params.groups > 1 and size < params.group_top:
        raise FatalError(
            f"config.json: {experts} experts in {params.groups} groups are {size} in each, but groups are chosen by "
            f"their best {params.group_top}",
            MODEL,
        )
    if params.top_groups > params.groups or params.top_groups * size < params.top_k:
        raise FatalError(
            f"config.json: a token cannot visit {params.top_k} experts of its best {params.top_groups} of "
            f"{params.groups} groups of {size}",
            MODEL,
        )


class MoE(nn.Module):
    """The weighted sum of k experts of each token. A subclass may add an expert that all tokens visit."""

    def __init__(
        self, hidden: int, inner: int, experts: int, params: RouterParams, mesh: Mesh, act: str = "silu",
        layout: ExpertLayout = APART, gated: bool = True, visited: int | None = None,
    ):  # fmt: skip
        """inner: of one expert. act: the activation's name in config.json. layout: of the experts' tensors. gated:
        whether experts have a gate. visited: size of the experts' inputs, if not hidden. Raises FatalError where a
        token is to visit more experts than there are, or than its groups have."""
        super().__init__()
        if not 0 < params.top_k <= experts:
            raise FatalError(
                f"config.json: num_experts_per_tok is {params.top_k}, but there are {experts} experts", MODEL
            )
        self.gate = Router(hidden, experts, params)
        self.experts = FusedExperts(
            visited or hidden, inner, experts, params.top_k, mesh, activation(act), layout, gated
        )

    def forward(self, h: Normed | Tensor) -> Partial:
        """h [T, H] → this rank's part of [T, H]."""
        x = h.tensor() if isinstance(h, Normed) else h
        return self.experts(x, *self.gate(x))


class SharedMoE(MoE):
    """With experts that all tokens visit, held as one (DeepSeekMoE: Dai et al. 2024, arXiv 2401.06066)."""

    def __init__(
        self, hidden: int, inner: int, shared: int, experts: int, params: RouterParams, mesh: Mesh, act: str = "silu"
    ):
        """shared: inner size of these together."""
        super().__init__(hidden, inner, experts, params, mesh, act)
        self.shared_experts = GatedMLP(hidden, shared, mesh, act)

    def forward(self, h: Normed | Tensor) -> Partial:
        x = h.tensor() if isinstance(h, Normed) else h
        return self.experts(x, *self.gate(x)) + self.shared_experts(x)


class HashedMoE(SharedMoE):
    """With experts that token ids choose."""

    gate: HashRouter

    def __init__(
        self, hidden: int, inner: int, shared: int, experts: int, params: RouterParams, mesh: Mesh, act: str, vocab: int
    ):
        super().__init__(hidden, inner, shared, experts, params, mesh, act)
        self.gate = HashRouter(hidden, experts, params, vocab, mesh)

    def forward(self, h: Normed | Tensor, tokens: Tensor) -> Partial:  # type: ignore[override]
        """tokens: ids [T] int64."""
        x = h.tensor() if isinstance(h, Normed) else h
        return self.experts(x, *self.gate(x, tokens)) + self.shared_experts(x)
