"""InternLM2 and 2.5 (Cai et al. 2024, arXiv 2403.17297): Llama by other names, with one tensor of all that a key head
has: its queries, its key and its value."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from ....comm.mesh import Mesh
from .. import base
from ..layers.linear import Linear, QKVParallel
from ..shard import Shard, even, key_heads, whole
from ..weights.slicing import ShardedModule, Source
from . import llama

CONFIG = {"names": {"bias": "attention_bias"}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    attention_bias: bool = True


class GroupedQKV(QKVParallel):
    """Each key head is a source of its own, so that this rank's outputs lie as in other models."""

    def __init__(self, args: llama.Args, mesh: Mesh):
        heads, kv_heads, dim = args.num_attention_heads, args.num_key_value_heads, args.head_dim
        super().__init__(args.hidden_size, heads, kv_heads, dim, mesh, args.qkv_bias)
        queries = even(heads, mesh.tensor.rank, mesh.tensor.size)
        keys = key_heads(kv_heads, mesh.tensor.rank, mesh.tensor.size)
        each, mine = heads // kv_heads, range(keys.start, keys.start + keys.width)
        self.size = (heads + 2 * kv_heads) * dim
        spans = [(max(queries.start - key * each, 0), min(queries.stop - key * each, each)) for key in mine]
        shards = [Shard(each * dim, first * dim, (last - first) * dim) for first, last in spans]
        self.outputs = (*shards, *[whole(dim)] * (2 * len(mine)))
        self.starts = [(key * (each + 2) + part) * dim for part in (0, each, each + 1) for key in mine]

    def sources(self, path: str) -> list[Source]:
        return [Source(path, start, self.size) for start in self.starts]


class Attention(llama.Attention):
    def __init__(self, args: llama.Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.qkv_proj = GroupedQKV(args, mesh)


class Layer(llama.Layer):
    ATTENTION = Attention


class Model(base.Model):
    LAYER: ClassVar[type[base.Layer]] = Layer
    RENAMED = {
        "model.tok_embeddings.": "model.embed_tokens.", "output.": "lm_head.", ".attention_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.", ".attention.wqkv.": ".self_attn.qkv_proj.",
        ".attention.wo.": ".self_attn.o_proj.", ".feed_forward.w1.": ".mlp.gate_proj.",
        ".feed_forward.w3.": ".mlp.up_proj.", ".feed_forward.w2.": ".mlp.down_proj.",
    }  # fmt: skip

    def _sources(self, path: str, linear: Linear | ShardedModule, stored: Container[str]) -> list[Source]:
        return linear.sources(path) if isinstance(linear, GroupedQKV) else super()._sources(path, linear, stored)
