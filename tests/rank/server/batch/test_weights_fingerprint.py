"""Weights are known again: a resumed job must not go on with others of the same name and config.json."""

import os
import shutil
import subprocess
import sys

import msgspec
import pytest
import torch
from phalanx.errors import MODEL, USAGE, FatalError
from phalanx.rank.server.batch import weights_fingerprint
from phalanx.rank.server.batch.config import VARIABLE, BatchConfig
from phalanx.rank.server.batch.journal import Journal
from phalanx.rank.server.batch.setup import setup
from phalanx.rank.server.batch.weights_fingerprint import fingerprint
from phalanx.rank.server.config import ServerConfig
from safetensors.torch import load_file, save_file

from ....checkpoints import make_checkpoint
from ....config_pipe import config_pipe


@pytest.fixture
def model(tmp_path):
    return make_checkpoint(tmp_path / "here" / "model", num_hidden_layers=2, shards=2, tokenizer=False)


def sizes(path):
    return {file.name: file.stat().st_size for file in path.iterdir()}


def test_a_copy_is_known_again(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "there" / "model")
    os.utime(copy / "model-00001-of-00002.safetensors", (0, 0))
    assert fingerprint(str(copy)) == fingerprint(str(model))


def test_other_weights_of_the_same_shape(model, tmp_path):
    other = make_checkpoint(tmp_path / "other" / "model", num_hidden_layers=2, shards=2, tokenizer=False, seed=1)
    assert (other / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert sizes(other) == sizes(model)
    assert fingerprint(str(other)) != fingerprint(str(model))


def test_every_tensor_counts(model):
    """Each one of so few is looked into."""
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        save_file(tensors, file)
        before = fingerprint(str(model))
        for name in tensors:
            save_file({**tensors, name: tensors[name] + 1}, file)
            assert fingerprint(str(model)) != before, name
        save_file(tensors, file)
        assert fingerprint(str(model)) == before


def test_names_and_shapes_count(tmp_path):
    def one(**tensors):
        save_file(tensors, tmp_path / "model.safetensors")
        return fingerprint(str(tmp_path))

    prints = [one(a=torch.zeros(4, 2)), one(b=torch.zeros(4, 2)), one(a=torch.zeros(2, 4)),
              one(a=torch.zeros(4, 2, dtype=torch.int32)), one(a=torch.zeros(4, 2), b=torch.zeros(0))]  # fmt: skip
    assert len(set(prints)) == len(prints)


def test_little_is_read_of_many_tensors(model, monkeypatch):
    monkeypatch.setattr(weights_fingerprint, "SAMPLES", 5)
    read = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read.append(size) or real(fd, size, at))
    fingerprint(str(model))
    assert len(read) == 5 and max(read) <= 1024


def test_no_weights(tmp_path, model):
    assert fingerprint(str(tmp_path)) == weights_fingerprint.NONE
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FatalError, match="model-00002-of-00002.safetensors.*missing") as stop:
        fingerprint(str(model))
    assert stop.value.code == MODEL


@pytest.fixture
def config(model, tmp_path):
    (tmp_path / "in.jsonl").write_text("{}\n")
    server = ServerConfig(model_dir=str(model), link=str(tmp_path / "link"), listen_fd=-1, served_model_name="model")
    place = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl", "errors.jsonl")]
    return BatchConfig(server, *place)


def start(config):
    """The batch process, which ends before it listens for rank 0; its code and words."""
    command = [sys.executable, "-m", "phalanx.rank.server.batch"]
    with config_pipe(msgspec.to_builtins(config)) as fd:
        environ = os.environ | {VARIABLE: str(fd)}
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, pass_fds=[fd], capture_output=True, text=True, timeout=30
        )
    return done.returncode, done.stderr


def test_a_journal_of_other_weights_is_refused(config, model):
    Journal(config.journal, config.input, setup(config.server)).close()
    shutil.rmtree(model)
    make_checkpoint(model, num_hidden_layers=2, shards=2, tokenizer=False, seed=1)
    code, words = start(config)
    assert code == USAGE
    assert "fingerprint" in words and "--overwrite" in words


def test_weights_that_cannot_be_read_are_told_of_as_such(config, model):
    Journal(config.journal, config.input, setup(config.server)).close()
    (model / "model-00002-of-00002.safetensors").write_bytes(b"cut off")
    code, words = start(config)
    assert code == MODEL
    assert "model-00002-of-00002.safetensors" in words and "truncated" in words
