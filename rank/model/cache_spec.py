"""Caches that a layer keeps of its sequences from step to step. rank/worker/kv_cache.py makes room for it.

A kind of cache is a class here that lists the tensors of a block, and those of a sequence as a whole; the layer that
asks for it gets them in that order. Keys and values are two of a block, a latent is one, a recurrent state is of a
sequence: it has an entry for each row of rank/worker/state.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...errors import USAGE, FatalError
from ...kernels.attention.compressed import entries_of
from ...kernels.rope.fp8_cache import E4M3

Caches = list[tuple[Any, ...]]  # of each local layer: the tensors of its spec, [blocks, ...] or [rows, ...] each


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CacheSpec:
    """Frozen dataclasses, as layers that keep the same are found by them."""

    def block(self, tokens: int, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """The tensors of a block of so many tokens. dtype: of what is kept, the model's or e4m3, which has scales
        (kernels/rope/fp8_cache.py)."""
        return ()

    @property
    def window(self) -> int:
        """The newest tokens that the layer reads of those in blocks, which may be freed behind them; 0: all."""
        return 0

    def row(self, query_len: int = 1) -> tuple[TensorSpec, ...]:
        """The tensors of a sequence, from which it goes on behind any of the newest query_len tokens. Whoever writes
        them restarts where a sequence's first token has position 0: a row's tensors are not cleared between two
        sequences."""
        return ()


@dataclass(frozen=True)
class PagedKV(CacheSpec):
    """Keys and values of every token (Kwon et al. 2023, arXiv 2309.06180), of this rank's key heads."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0  # the layer reads the newest `window` tokens only; 0: all
    chunked: bool = False  # ... and of these the newest chunk's: a sequence is cut into chunks of `window` tokens

    def block(self, tokens: int, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """Keys [tokens, kv_heads, key_dim], values [tokens, kv_heads, value_dim]; for e4m3 [kv_heads, 2, tokens].
        Raises FatalError where a chunk is not so many whole blocks."""
        if self.chunked and self.window % tokens:
            raise FatalError(f"--block-size {tokens} must divide this model's chunks of {self.window} tokens", USAGE)
        kept = (TensorSpec((tokens, self.kv_heads, dim), dtype) for dim in (self.key_dim, self.value_dim))
        return *kept, *_scales(self.kv_heads, tokens, dtype)


@dataclass(frozen=True)
class PagedLatent(CacheSpec):
    """The cache of multi-head latent attention for every token (arXiv 2405.04434), on each rank of a tensor group
    alike: the latent of all heads' keys and values, and the key with its position that they share."""

    width: int  # of both, side by side

    def block(self, tokens: int, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """[tokens, width]; for e4m3 [1, 2, tokens]."""
        return TensorSpec((tokens, self.width), dtype), *_scales(1, tokens, dtype)


@dataclass(frozen=True)
class Indexed(CacheSpec):
    """The keys and values or the latent of every token, and behind them the key by which an indexer finds it, on each
    rank alike. Layers without an indexer behind one of latents read the same tokens."""

    kept: PagedKV | PagedLatent
    keys: PagedLatent  # in e4m3 they have two scales as well: of the rotated part, and of the rest
    topk: int  # tokens that the indexer chooses of a longer context
    pool: int = 1  # tokens that share a key, which is made of what each of them brings

    def block(self, tokens: int, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """Raises FatalError for e4m3 where tokens share keys, and where blocks have parts of pools."""
        if self.pool > 1 and dtype == E4M3:
            raise FatalError("--kv-cache-dtype fp8 is not supported for this model's pooled index keys", USAGE)
        if tokens % self.pool:
            raise FatalError(f"--block-size {tokens} must be a multiple of this model's pools of {self.pool}", USAGE)
        return *self.kept.block(tokens, dtype), *self.keys.block(tokens // self.pool, dtype)

    def row(self, query_len: int = 1) -> tuple[TensorSpec, ...]:
        """Values and gates of the newest tokens, [pool + query_len - 2, 2 * width] f32: a ring, as RecurrentState's."""
        shape = self.pool + query_len - 2, 2 * self.keys.width
        return (TensorSpec(shape, torch.float32),) if self.pool > 1 else ()


@dataclass(frozen=True)
class CompressedKV(CacheSpec):
    """Keys that are values too, of every token, and entries of windows of tokens (kernels/attention/compressed.py), on
    each rank alike; an index key of each window; and, of a sequence, the newest inputs of its windows. Keys before the
    layer's own window are kept, where it has entries: these are in the same blocks."""

    dim: int
    newest: int  # tokens whose keys the layer reads
    rate: int = 0  # tokens of a window; 0: there are no entries
    index_dim: int = 0  # 0: there are no index keys
    tokens: int = 0  # of an entry
    channels: int = 0  # of a token's inputs

    @property
    def window(self) -> int:
        return 0 if self.rate else self.newest

    def block(self, tokens: int, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """[tokens + entries, dim], and index keys [entries, index_dim]. Raises FatalError for e4m3, and where windows
        and blocks do not fit into each other."""
        if dtype == E4M3:
            raise FatalError("--kv-cache-dtype fp8 is not supported for this model's compressed attention", USAGE)
        if self.rate and tokens % self.rate and (self.index_dim or self.rate % tokens):
            raise FatalError(f"--block-size {tokens} must be a multiple of this model's windows of {self.rate}", USAGE)
        entries = entries_of(tokens, self.rate)
        keys = TensorSpec((tokens + entries, self.dim), dtype)
        return (keys, TensorSpec((entries, self.index_dim), dtype)) if self.index_dim else (keys,)

    def row(self, query_len: int = 1) -> tuple[TensorSpec, ...]:
        """The inputs [tokens of an entry + query_len - 2, channels] f32: a ring, as RecurrentState has."""
        return (TensorSpec((self.tokens + query_len - 2, self.channels), torch.float32),) if self.rate else ()


@dataclass(frozen=True)
class SharedCache(CacheSpec):
    """No cache of its own: the layer reads that of another one, or of none."""


def _scales(heads: int, tokens: int, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    return (TensorSpec((heads, 2, tokens), torch.uint8),) if dtype == E4M3 else ()


def cache_dtype(chosen: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of what caches keep. chosen: --kv-cache-dtype; dtype: the model's."""
    return E4M3 if chosen == "fp8" else dtype


@dataclass(frozen=True)
class RecurrentState(CacheSpec):
    """The state that a recurrent layer keeps of a sequence, of this rank's heads: the newest inputs of its convolution,
    and for each value head a matrix from keys to values, as a gated delta net has it (arXiv 2412.06464). A short
    convolution has no heads."""

    columns: int  # tokens that the convolution looks back
    channels: int
    heads: int = 0  # value heads
    key_dim: int = 0
    value_dim: int = 0

    def row(self, query_len: int = 1) -> tuple[TensorSpec, ...]:
        """The convolution's inputs [columns + query_len - 1, channels], and the states [query_len, heads, key_dim,
        value_dim]: rings, in which a token's entry follows from its position. Both are f32: errors of a recurrence add
        up, and the inputs are few."""
        inputs, states = self.columns + query_len - 1, (query_len, self.heads, self.key_dim, self.value_dim)
        shapes = ((inputs, self.channels), states) if self.heads else ((inputs, self.channels),)
        return tuple(TensorSpec(shape, torch.float32) for shape in shapes)


@dataclass(frozen=True)
class KVAndState(CacheSpec):
    """Both, of a layer that has attention and a recurrent sublayer side by side."""

    kv: PagedKV
    state: RecurrentState

    @property
    def window(self) -> int:
        return self.kv.window

    def block(self, tokens: int, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        return self.kv.block(tokens, dtype)

    def row(self, query_len: int = 1) -> tuple[TensorSpec, ...]:
        return self.state.row(query_len)


def block_bytes(spec: CacheSpec, tokens: int, dtype: torch.dtype) -> int:
    return sum(tensor.nbytes for tensor in spec.block(tokens, dtype))


def row_bytes(spec: CacheSpec, query_len: int = 1) -> int:
    """Bytes of what a layer keeps of a sequence as a whole. query_len: as of CacheSpec.row."""
    return sum(tensor.nbytes for tensor in spec.row(query_len))
