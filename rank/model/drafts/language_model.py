"""A smaller model of the target's tokenizer that drafts by itself: it reads a sequence's tokens alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ....errors import USAGE, FatalError
from ... import untrusted_files
from .. import architectures, base
from ..batch import Batch
from ..cache_spec import CacheSpec
from ..config import Config
from ..load import Classes
from . import MOST

TOKENIZER = "tokenizer.json"


def choose(config: Config, tensors: Collection[str]) -> Classes:
    """The classes of a model that drafts: its own."""
    module = architectures.find(config.model_type)
    return Classes(module.Args, module.Model)


class LanguageModel:
    FOLLOWS: ClassVar[bool] = False
    most = MOST
    vocabulary: Tensor | None = None

    def __init__(self, model: base.Model):
        self.model, self.max_model_len, self.tensor = model, model.max_model_len, model.tensor

    def cache_specs(self) -> list[CacheSpec]:
        return self.model.cache_specs()

    def read(self, hidden: Tensor) -> Tensor:
        raise AssertionError("it reads no hidden states")

    def forward(self, batch: Batch, before: Tensor | None) -> Tensor:
        ids = batch.ids.clamp(max=self.model.vocab_size - 1)  # the target's vocabulary may have more padding
        return self.model.forward([replace(batch, ids=ids)])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


def check_tokenizers(target: Path, draft: Path) -> None:
    """Raises FatalError where the models' tokenizers have different tokens, as far as their tokenizer.json tell."""
    if not all((path / TOKENIZER).is_file() for path in (target, draft)):
        return
    ours, theirs = _tokens(target), _tokens(draft)
    if ours != theirs:
        lacking = sorted(ours.items() ^ theirs.items(), key=lambda one: one[1])
        token, number = lacking[0]
        raise FatalError(
            f"--draft-model {draft}: its tokenizer is not that of {target}: they differ in {len(lacking)} tokens, "
            f"such as {token!r} with the id {number}: choose a smaller model of the same family",
            USAGE,
        )


def _tokens(path: Path) -> dict[str, int]:
    raw: dict[str, Any] = untrusted_files.read_json(path, TOKENIZER)
    vocab = (raw.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, list):  # of unigrams: pairs of a token and its weight
        vocab = {str(one[0]): i for i, one in enumerate(vocab)}
    return vocab | {one["content"]: one["id"] for one in raw.get("added_tokens") or []}
