from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ...checkpoints import make_checkpoint
from . import harness


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_checkpoint into a directory of its own, once for the same arguments."""
    made: dict[str, Path] = {}

    def make(model_type: str = "llama", **options: Any) -> Path:
        key = repr((model_type, sorted(options.items())))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp("ckpt"), model_type, tokenizer=False, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def expected() -> Callable[..., Tensor]:
    """transformers' logits of a checkpoint for some token ids."""
    models: dict[Path, Any] = {}

    def logits(path: Path, ids: list[int]) -> Tensor:
        if path not in models:
            models[path] = harness.reference(path)
        return harness.reference_logits(models[path], ids)

    return logits
