"""CPU time that a server takes from others: next to nothing without requests, and with them no process's turn."""

import threading
import time
from pathlib import Path

import pytest

from .checkpoints import make_checkpoint
from .server import Server, Stream

pytestmark = pytest.mark.alone
SECONDS = 10.0
WAKES_A_SECOND = 15  # of rank 0, which hears three others twice a second: five, more where threads wait for the GIL
CORE = 0.1  # of one: a thread that spins takes all of it
TICK = 100.0  # of /proc/PID/stat, per second


def used(pid: int) -> tuple[float, int]:
    """Seconds of processor time that a process has used, and how often its threads were woken from sleep."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    woken = sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in threads)
    return (int(stat[11]) + int(stat[12])) / TICK, woken


@pytest.mark.long
def test_every_rank_of_an_idle_server_sleeps(tmp_path):
    """The time of a wake-up is the machine's: 0.4 ms, or 7 ms where others use it. How many there are is
    the server's."""
    checkpoint = str(make_checkpoint(tmp_path / "tiny"))
    with Server(checkpoint, "--np", "4", "--pp", "2", "--device", "cpu", "--mem", "16") as server:
        assert server.request("/v1/completions", {"prompt": "hello", "max_tokens": 5})[0] == 200
        assert len(server.ranks) == 4
        time.sleep(2)  # 2 s are enough for what the request set going to end
        processes = {f"rank {rank}": pid for rank, pid in enumerate(server.ranks)} | {"server": server.server_pid}
        before = {name: used(pid) for name, pid in processes.items()}
        time.sleep(SECONDS)  # what so long a rest takes is what is measured
        for name, pid in processes.items():
            busy, woken = (after - first for after, first in zip(used(pid), before[name], strict=True))
            assert woken < WAKES_A_SECOND * SECONDS and busy < CORE * SECONDS, (name, busy, woken)


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
        assert slow < (time.monotonic() - start) / 4, f"took {slow:.1f} s"
