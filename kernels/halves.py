"""The halves of a layer, from its norm to this rank's part of what it adds to the stream.

Each is made of other operations. Steps of few rows on one core are one compiled function, as the calls between the
operations, whose code has to come from memory each time, would take as long as the sums over ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from . import skinny
from .attention import Rows, Scores, paged_attention, write_and_attend
from .board import Board
from .cpu import array, one_core
from .linear import adds, gated_linear, linear
from .rope import HeadNorms, Rotation, rope_write

NONE = np.zeros(0, np.float32)
NOBODY = np.zeros((2, 0, 0), np.float32), np.zeros(0, np.int64), 0, 0  # a board on which there is no call


@dataclass
class Product:
    """What `linear` multiplies by."""

    weight: Tensor
    bias: Tensor | None = None
    # What may take the product's place, where a sum over ranks follows it and may begin with it; None: it does not.
    begin: Callable[[Tensor, Tensor], Tensor | None] | None = None
    alone: bool = False  # no other rank has a part of what it makes

    @functools.cached_property
    def array(self) -> np.ndarray | None:
        """The weight as compiled functions take it; None: they do not."""
        plain = self.weight.device.type == "cpu" and not self.weight.is_mkldnn and self.weight.dtype == torch.float32
        return self.weight.numpy() if plain and self.bias is None else None

    def __call__(self, x: Tensor) -> Tensor:
        begun = self.begin(x, self.weight) if self.begin else None
        return linear(x, self.weight, self.bias) if begun is None else begun

    def onto(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the stream `residual`, and that; both are one tensor where it has been, rounded once."""
        if not self.alone or not adds(x, self.weight, residual):
            return self(x), residual
        residual.addmm_(x, self.weight.t())
        return residual, residual


class Heads(NamedTuple):
    """How the outputs of queries', keys' and values' common product are cut."""

    queries: int
    keys: int  # and as many values
    dim: int


class Norm(Protocol):
    """The norm before a half: rank/model/layers/norm.py's."""

    eps: float
    board: Board | None  # over which the sum goes
    alone: bool  # no other rank has a part of it

    @property
    def weight(self) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of residual and the ranks' sum of x, and the new residual. x is residual: it has been added."""


def attention(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm,
    qkv: Product,
    heads: Heads,
    out: Product,
    turn: Rotation,
    norms: HeadNorms | None,
    cache: tuple[Tensor, Tensor],
    rows: Rows,
    scores: Scores,
    sampled: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """x, residual [T, hidden] pass the norm; returns out of write_and_attend of qkv of it, and the new residual: one
    tensor where it has been added (Product.onto).

    sampled: the S rows at rows.sample_at, the last ones of their sequences, as a step of decoding sequences. Only they
    go on once all keys and values are written: what is returned is [S, hidden].
    """
    plain = qkv.array is not None and out.array is not None and not scores.cap
    if plain and sampled is None and (step := _step(x, turn, cache, rows)):
        compiled, shared = step
        weights = (array(norms[0]), array(norms[1]), norms[2]) if norms else (NONE, NONE, 0.0)
        caches = array(cache[0]), array(cache[1])
        inputs = (qkv.array, *heads, out.array, *caches, scores.scale, scores.window, *weights, *shared)
        return _half(compiled.attention, x, residual, norm, inputs)
    parts = [heads.queries, heads.keys, heads.keys]
    made, residual = _normed(x, residual, norm, qkv)
    q, k, v = made.view(len(x), sum(parts), heads.dim).split(parts, dim=1)
    if sampled is None:
        return out.onto(write_and_attend(q, k, v, turn, norms, cache, rows, scores), residual)
    q = rope_write(q, k, v, turn, norms, cache, rows.slots)
    if len(rows.sample_at) == 0:
        return x[:0], residual[:0]
    return out(paged_attention(q[rows.sample_at], *cache, sampled, scores)), residual[rows.sample_at]


def feed_forward(
    x: Tensor, residual: Tensor | None, norm: Norm, gate_up: Product, down: Product
) -> tuple[Tensor, Tensor]:
    """x, residual [T, hidden] pass the norm; returns down of gated_linear of it, and the new residual, as attention."""
    if gate_up.array is not None and down.array is not None and (compiled := one_core(x)):
        inputs = gate_up.array, down.array
        return _half(compiled.feed_forward, x, residual, norm, inputs)
    made, residual = _normed(x, residual, norm, gate_up, gated=True)
    return down.onto(made, residual)


def _normed(
    x: Tensor, residual: Tensor | None, norm: Norm, product: Product, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """The product of norm.add's norm, and the new residual."""
    fused = norm.alone and product.bias is None and x is not residual
    if fused and residual is not None and skinny.suits_norm(x, residual, norm.weight, product.weight):
        return skinny.normed_linear(x, residual, norm.weight, norm.eps, product.weight, gated)
    x, residual = norm.add(x, residual)
    return gated_linear(x, product.weight, product.bias) if gated else product(x), residual


def _half(
    function: Callable[..., bool], x: Tensor, residual: Tensor | None, norm: Norm, inputs: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """The half of what norm.add makes of x, in place; with a board the function does norm.add as well."""
    if residual is not None and norm.board is not None and norm.board.takes(x):
        norm.board.meet(function, array(x), array(residual), array(norm.weight), norm.eps, *inputs)
    else:
        x, residual = norm.add(x, residual)
        function(array(x), array(residual), array(norm.weight), norm.eps, *inputs, *NOBODY)
    return x, residual


def _step(
    x: Tensor, turn: Rotation, cache: tuple[Tensor, Tensor], rows: Rows
) -> tuple[ModuleType, tuple[np.ndarray, ...]] | None:
    """Of a step that is compiled what all layers share; the first one finds it."""
    if "compiled" not in rows.scratch:
        decodes = rows.num_decodes == len(x) and cache[0].dtype == torch.float32
        compiled = one_core(x) if decodes else None
        tensors = [*turn, rows.slots, rows.block_tables, rows.lengths]
        rows.scratch["compiled"] = (compiled, tuple(map(array, tensors))) if compiled else None
    return rows.scratch["compiled"]
