import gc
import logging
from types import SimpleNamespace

import torch
from phalanx.kernels import host_memory


def test_memory_that_cannot_be_pinned_is_served_unpinned_with_one_warning(monkeypatch, caplog):
    """And CUDA's last error does not fail the next launch: the launch that would raise it is made at once."""
    host_memory._warn.cache_clear()
    calls = []

    def launch(*shape, device):
        calls.append("launch")
        raise RuntimeError("CUDA error: out of memory")

    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: calls.append("register") or 2,
        cudaHostUnregister=lambda _: calls.append("unregister"),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", launch)
    with caplog.at_level(logging.WARNING, "phalanx"):
        made = [host_memory.zeros((3, 4), torch.int16, pin=True) for _ in range(2)]
    assert all(x.shape == (3, 4) and not x.any() for x in made)
    assert [one.message.partition(",")[0] for one in caplog.records] == ["host memory cannot be pinned (CUDA error 2)"]
    del made
    gc.collect()
    assert calls == ["register", "launch"] * 2
