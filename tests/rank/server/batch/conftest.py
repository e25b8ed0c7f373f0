import pytest
from phalanx.rank.server.batch import run

from .stage import Stage


@pytest.fixture
def stage(tmp_path, model_dir, tokenizer, monkeypatch):
    monkeypatch.setattr(run, "LEAVE_PATIENCE", 0.3)  # a scheduler that holds on to its requests does not hear a drain
    return Stage(tmp_path, model_dir, tokenizer)
