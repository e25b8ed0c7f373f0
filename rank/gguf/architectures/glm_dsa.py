"""GLM-5 to 5.2: DeepSeek-V3's entries, and those of an indexer in the layers that have one."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import deepseek2
from ._common import CORRECTION, layer

INDEXER = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.k_norm": "self_attn.indexer.k_norm",
}
TENSORS = deepseek2.TENSORS | layer(**INDEXER)
ENDINGS, NAME = CORRECTION, "glm-dsa"


def config(m: Metadata) -> dict[str, Any]:
    keys = deepseek2.config(m)
    owners = [m.tensor(f"blk.{i}.indexer.attn_k.weight") is not None for i in range(keys["num_hidden_layers"])]
    return keys | {
        "model_type": "glm_moe_dsa",
        "index_n_heads": m.integer("attention.indexer.head_count"),
        "index_head_dim": m.integer("attention.indexer.key_length"),
        "index_topk": m.integer("attention.indexer.top_k"),
        "indexer_types": ["full" if one or not any(owners) else "shared" for one in owners],
    }
