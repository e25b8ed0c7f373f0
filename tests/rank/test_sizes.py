"""What a rank says of the sizes that it chooses: sequences at once, and the KV cache."""

import logging
from types import SimpleNamespace

import torch
from phalanx.comm import threads
from phalanx.comm.watch import LocalWatch
from phalanx.rank.__main__ import Rank
from phalanx.rank.options import Job, Options
from phalanx.rank.work import cache

CPU = torch.device("cpu")


def rank(world, **options):
    return Rank(Job(options=Options(**options)), world, ["here"] * world.size, LocalWatch(world.rank))


def test_large_weights_on_cpus_run_few_sequences_at_once(caplog):
    model = SimpleNamespace(weight_bytes=4 * 50_000_000_000, dtype=torch.float32)
    with caplog.at_level(logging.INFO, "phalanx"):
        assert threads.run(lambda w: rank(w, max_num_seqs=32)._token_budget(model, CPU), 2) == [(10, 10)] * 2
    assert caplog.messages == [
        "at most 10 sequences run at once on each copy, so that a step of these weights is short"
    ]


def test_the_cache_gets_its_part_of_the_free_memory(caplog, monkeypatch):
    monkeypatch.setattr(cache, "free_memory", lambda device, here: 10_000_000)
    spec = SimpleNamespace(layers=2, kv_heads=4, head_dim=16)
    model = SimpleNamespace(kv_spec=spec, max_model_len=4096, dtype=torch.float32)
    with caplog.at_level(logging.INFO, "phalanx"):  # 4,000,000 bytes for blocks of 16,384
        assert threads.run(lambda w: rank(w)._size_cache(model, 8, 16, CPU, 0), 1) == [(244, 3904)]
    assert caplog.messages == [
        "KV cache: 3904 tokens in 244 blocks of 16, 4 MiB a rank (0.4 of the free memory, at most what can be used); "
        "sequences of up to 3904 tokens"
    ]
