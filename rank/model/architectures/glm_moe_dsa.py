"""GLM-5 to 5.2 (Zhipu AI 2026): DeepSeek-V3.2, where neighbouring layers may share an indexer (arXiv 2603.12201)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....errors import MODEL, USAGE, FatalError
from .. import base
from ..base import Count
from . import deepseek_v32

CONFIG = {"names": {"qk_rope_head_dim": "head_dim"}}
FULL, SHARED = "full", "shared"


@dataclass(frozen=True, kw_only=True)
class Args(deepseek_v32.Args):
    rms_norm_eps: float = 1e-5
    q_lora_rank: Count = 2048
    n_group: Count = 1
    topk_group: Count = 1
    index_n_heads: Count = 32
    indexer_types: list[str] = field(default_factory=list)
    index_topk_pattern: str | list[str] | None = None  # a letter for each layer, F or S, or a list as indexer_types
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2

    INTERLEAVED: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.has_indexer(0):
            raise FatalError("config.json: the first layer shares an indexer, and there is none before it", MODEL)

    def has_indexer(self, index: int) -> bool:
        kinds = self.indexer_types or self.index_topk_pattern
        return has_indexer(kinds, index, self.index_topk_freq, self.index_skip_topk_offset)

    @property
    def owners(self) -> list[int]:
        """The layers that have an indexer."""
        return [i for i in range(self.num_hidden_layers) if self.has_indexer(i)]

    @property
    def draft_layer(self) -> int:
        return self.owners[-1]

    def stage_layers(self, stage: int, stages: int) -> range:
        """A stage begins with a layer that has an indexer: the one that is nearest to an even cut."""
        owners, starts = self.owners, [0]
        if len(owners) < stages:
            raise FatalError(f"--pp {stages}: {len(owners)} layers have an indexer, with which stages begin", USAGE)
        for i in range(1, stages):
            even = super().stage_layers(i, stages).start
            free = owners[owners.index(starts[-1]) + 1 : len(owners) - (stages - 1 - i)]
            starts.append(min(free, key=lambda start, even=even: abs(start - even)))  # type: ignore[misc]
        return range(starts[stage], [*starts, self.num_hidden_layers][stage + 1])


def has_indexer(kinds: str | list[str] | None, index: int, freq: int, offset: int) -> bool:
    """Whether the layer chooses tokens itself. kinds: of each layer; where there are none freq and offset decide."""
    if not kinds:
        return max(index - offset + 1, 0) % max(freq, 1) == 0
    if index >= len(kinds):
        raise FatalError(f"config.json: the layers' indexers are {len(kinds)}, and none is layer {index}'s", MODEL)
    kind = {"F": FULL, "S": SHARED}.get(kinds[index], kinds[index])
    base.expect("indexer_types", kind, FULL, SHARED)
    return kind == FULL


Model = deepseek_v32.Model
