"""Apertus 1.5, text (Project Apertus 2026): Apertus whose head may lack the tokens of images and sounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....comm.mesh import Mesh
from .. import base
from ..base import Count
from ..layers.embedding import ParallelLMHead
from . import apertus

CONFIG = {"like": "apertus"}


@dataclass(frozen=True, kw_only=True)
class Args(apertus.Args):
    output_vocab_size: Count | None = None  # tokens of the head, the first ones; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outputs != self.vocab_size:
            base.expect("tie_word_embeddings", self.tie_word_embeddings, False)

    @property
    def outputs(self) -> int:
        return min(self.output_vocab_size or self.vocab_size, self.vocab_size)


class Model(apertus.Model):
    def __init__(self, args: Args, mesh: Mesh, *given: Any):
        super().__init__(args, mesh, *given)
        self.vocab_size = args.outputs

    @staticmethod
    def _head(args: Args, mesh: Mesh) -> ParallelLMHead:  # type: ignore[override]
        return ParallelLMHead(args.outputs, args.hidden_size, mesh)
