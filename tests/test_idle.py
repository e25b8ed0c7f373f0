"""What a server takes from others: next to nothing without requests, and with them no process's turn."""

import threading
import time
from pathlib import Path

import pytest

from .checkpoints import make_checkpoint
from .processes import tree
from .server import Server, Stream

pytestmark = pytest.mark.alone
SECONDS = 10.0
TICK = 100.0  # of /proc/PID/stat, per second


def cpu(pids) -> dict[int, float]:
    """Seconds of processor time that each process has used."""
    stats = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in pids}
    return {pid: (int(stat[11]) + int(stat[12])) / TICK for pid, stat in stats.items()}


@pytest.mark.long
def test_every_rank_of_an_idle_server_stays_under_one_percent_of_a_core(tmp_path):
    checkpoint = str(make_checkpoint(tmp_path / "tiny"))
    with Server(checkpoint, "--np", "4", "--pp", "2", "--device", "cpu", "--mem", "16") as server:
        assert server.request("/v1/completions", {"prompt": "hello", "max_tokens": 5})[0] == 200
        assert len(server.ranks) == 4
        time.sleep(2)  # 2 s are enough for what the request set going to end
        before = cpu(server.ranks + [server.server_pid])
        time.sleep(SECONDS)  # the processor time of so long a rest is what is measured
        used = {pid: (seconds - before[pid]) / SECONDS for pid, seconds in cpu(before).items()}
        lines = tree(server.process.pid)
        assert all(share < 0.01 for share in used.values()), {lines[pid]: share for pid, share in used.items()}


@pytest.mark.long
@pytest.mark.retry(reason="a machine that stands still for seconds looks like a server that does")
def test_a_busy_server_answers_others(tmp_path):
    """Ranks that wait for each other leave their cores to the server and to this process, which are other sessions."""
    checkpoint = str(make_checkpoint(tmp_path / "tiny", max_position_embeddings=8192))
    with Server(checkpoint, "--np", "2", "--device", "cpu", "--mem", "64") as server:
        stream = Stream(server, 6000)
        reader = threading.Thread(target=stream.rest)
        start = time.monotonic()
        reader.start()
        slow = 0.0
        while reader.is_alive():
            asked = time.monotonic()
            assert server.request("/health")[0] == 200
            took = time.monotonic() - asked
            slow += took if took > 0.3 else 0
            time.sleep(0.02)
        assert slow < (time.monotonic() - start) / 4, f"answers that took {slow:.1f} s"
