"""Sampling on a GPU whose memory is short: smaller groups, the same tokens, and no end of the job."""

import numpy as np
import pytest
import torch
from phalanx.rank.worker import profile_run
from phalanx.rank.worker.sampler import Sampler

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(120)]
ROWS, VOCAB = 64, 128_256


@pytest.fixture
def limit():
    """Limits this process to so many bytes beyond what is allocated."""

    def set_limit(more: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + more) / total)

    yield set_limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def filled(device):
    sampler = Sampler(ROWS, VOCAB, device)
    for row in range(ROWS):
        new = profile_run.protocol.NewSequence(
            row, profile_run.protocol.pack_u32([1, 2, 3]), 3, 0, b"", profile_run.SAMPLED[row % 2]
        )
        sampler.enter(new)
    return sampler


@torch.no_grad()
def test_rows_are_sampled_in_groups(limit, monkeypatch):
    device = torch.device("cuda")
    rows, outputs = np.arange(ROWS), np.zeros(ROWS, np.int64)
    logits = torch.randn(ROWS, VOCAB, device=device) * 3
    kept = logits.clone()
    want = filled(device).sample(logits, rows, outputs)
    assert torch.equal(logits, kept)  # the logits stay as they are
    want = want.ids.tolist(), want.logprobs.values.cpu()
    sampler = filled(device)
    together, groups = Sampler._sample_together, []
    monkeypatch.setattr(
        Sampler, "_sample_together", lambda self, *given: groups.append(len(given[1])) or together(self, *given)
    )
    limit(128 << 20)  # four copies of the logits; sampling all rows takes more
    got = sampler.sample(logits, rows, outputs)
    assert groups[0] == ROWS and len(groups) > 2
    assert got.failed == [] and got.ids.tolist() == want[0]
    torch.testing.assert_close(got.logprobs.values.cpu(), want[1])


@torch.no_grad()
def test_a_row_fails_alone_where_none_can_be_sampled(limit):
    device = torch.device("cuda")
    logits = torch.randn(2, VOCAB, device=device)
    sampler = filled(device)
    limit(1 << 20)
    got = sampler.sample(logits, np.arange(2), np.zeros(2, np.int64))
    assert got.failed == [0, 1] and got.logprobs is None and len(got.ids) == 2
