"""Batches over HTTP end in time, also where the clock is set meanwhile."""

import time
from types import SimpleNamespace

import pytest
from phalanx.rank.server.batch.stored import StoredBatches


@pytest.mark.parametrize("in_hand", [False, True])
def test_a_batch_ends_by_the_time_of_day(monkeypatch, in_hand):
    ended = []
    batches = StoredBatches.__new__(StoredBatches)
    batches._in_hand = {"b"} if in_hand else set()
    batches._runs = {"b": SimpleNamespace(stop=lambda: ended.append("stopped"))} if in_hand else {}
    monkeypatch.setattr(batches, "_take", lambda batch: ended.append("taken"))
    now = time.time()
    batch = SimpleNamespace(id="b", over=False, expires_at=now + 3600)
    for clock in (now, now - 7200, now + 3590):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        batches._end_in_time(batch)  # as a timer does that was set before the clock was
    assert not ended
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    batches._end_in_time(batch)
    assert ended == ["stopped" if in_hand else "taken"]
