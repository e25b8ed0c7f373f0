import ast
import gc
import logging
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
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
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 23, 1 << 23))
    with caplog.at_level(logging.WARNING, "phalanx"):
        made = [host_memory.zeros((3, 4), torch.int16, pin=True) for _ in range(2)]
    assert all(x.shape == (3, 4) and not x.any() and x.data_ptr() % host_memory.ALIGN == 0 for x in made)
    (warning,) = [one.message for one in caplog.records]
    assert "host memory cannot" in warning
    assert "ulimit -l" in warning
    del made
    gc.collect()
    assert calls == ["register", "launch"] * 2


@pytest.mark.parametrize(
    "limit, words",
    [(1 << 30, "the system refuses 1125899906.8 MB of host memory under a limit of 1074 MB (ulimit -v)"),
     (resource.RLIM_INFINITY, "the system refuses 1125899906.8 MB of host memory")],
)  # fmt: skip
def test_memory_that_is_refused(monkeypatch, limit, words):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    with pytest.raises(MemoryError) as caught:
        host_memory.zeros((1 << 50,), torch.uint8, pin=False)
    assert str(caught.value).startswith(words) and ("ulimit" in words) == ("ulimit" in str(caught.value))


NUMA = """
import os, sys
from phalanx.launcher.job import binding
if binding.prefer_memory(0):
    sys.exit(3)
code = '''
import torch
from phalanx.kernels import host_memory
x = host_memory.zeros((1 << 24,), torch.uint8, pin=False).fill_(1)
middle = x.data_ptr() + len(x) // 2
maps = (line.split() for line in open("/proc/self/numa_maps"))
print([one for one in maps if int(one[0], 16) <= middle][-1][1:])
'''
os.execv(sys.executable, [sys.executable, "-c", code])
"""


def test_it_lies_on_the_node_that_the_launcher_prefers():
    """Whose policy a rank has from its beginning: node 0, as this machine may have one alone."""
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("the kernel has no NUMA")
    done = subprocess.run([sys.executable, "-c", NUMA], capture_output=True, text=True, timeout=60)
    if done.returncode == 3:
        pytest.skip("this container may not set where its memory lies")
    assert done.returncode == 0, done.stderr
    policy, *found = ast.literal_eval(done.stdout)
    nodes = [one for one in found if one.startswith("N")]
    assert policy == "prefer:0" and len(nodes) == 1 and nodes[0].startswith("N0="), done.stdout
