"""Drafts of which a wanted part is right."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from phalanx.benchmarks import acceptance, offline
from phalanx.rank.scheduler.sequence import Sequence
from phalanx.rank.worker.upload import Upload

from ..rank.scheduler.toy import request

TINY = dict(
    model_type="qwen3_5_text", vocab_size=4000, head_dim=16, num_hidden_layers=4, hidden_size=64, intermediate_size=96,
    num_attention_heads=4, num_key_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_num_key_heads=4, linear_num_value_heads=8, mtp_num_hidden_layers=1, partial_rotary_factor=0.5,
)  # fmt: skip


@pytest.mark.parametrize("wanted, drafts", [(3.39, 3), (1.0, 1), (6.5, 7), (4.0, 3)])
def test_as_many_are_right_as_are_wanted(wanted, drafts):
    """Ranks sample as the drafts say, and a row without drafts keeps its tokens."""
    assert acceptance.parsed(f"{wanted}/{drafts}") == (wanted, drafts)
    made = acceptance.Wanted(wanted, drafts, 4001, [1, 1 + drafts], 99)
    query_len, found = made.choose([Sequence(request(str(i), [1, 2], 5), i, []) for i in range(2000)])
    assert query_len == 1 + drafts
    given = np.array([*found.values(), [-1] * drafts])
    assert given.max() < 4001
    ids, kept = torch.full((len(given) * query_len + 1,), 4001), []
    runner = SimpleNamespace(_keep=lambda *of: kept.append(of), _upload=Upload(torch.device("cpu")))
    acceptance.force(runner)
    runner._keep(None, ids, SimpleNamespace(drafts=given, query_len=query_len))
    assert kept[0][1] is ids and ids[-1] == 4001
    sampled = ids[:-1].view(-1, query_len)
    assert (sampled[-1] == 4001).all() and (sampled[:, -1] == 4001).all()
    accepted = (sampled[:-1, :-1].numpy() == given[:-1]).cumprod(1).sum(1)
    assert abs(1 + accepted.mean() - wanted) < 0.1


@pytest.mark.parametrize("text", ["5/3", "0.5/3", "2/9", "2", "x/3"])
def test_what_cannot_be(text):
    with pytest.raises(ValueError):
        acceptance.parsed(text)


@pytest.mark.long
def test_a_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    command = [sys.executable, offline.__file__, "--config", tmp_path / "config.json", "--device", "cpu"]
    command += ["--parts", "a", "--batches", "2", "--reps", "1", "--max-model-len", "512", "--max-num-seqs", "2"]
    done = subprocess.run([*command, "--speculate", "mtp", "--accept", "2.5/3"], capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (found,) = (line for line in map(json.loads, done.stdout.splitlines()) if line["what"] == "decode")
    assert found["accept"] == "2.5/3" and abs(found["accepted"] - 2.5) < 0.3
