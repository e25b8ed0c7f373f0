import json
from pathlib import Path

import pytest

from ..ranks import run_ranks

pytestmark = pytest.mark.alone
WAKES_A_SECOND = 10  # of an idle rank: three for its watchdog and its main thread, more where threads wait for the GIL
CORE = 0.1  # of one: the wake-ups took 0.1 to 2.5 % on a shared host, and a thread that spins takes all of it


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.retry(reason="measures milliseconds, and what else the machine does adds to them")
def test_four_idle_ranks_are_quiet_and_wake_fast(short_directory):
    """Woken within 2 ms (median) and 3 ms (95th percentile), or ten times what a bare wake-up takes; without plans
    seldom awake. A rank that is not woken looks after 250 ms.

    The best of three: the figures are of the program, and a neighbour's load on the machine adds to them.
    """
    for attempt in range(3):
        directory = short_directory / str(attempt)
        directory.mkdir()
        done = run_ranks(4, Path(__file__).parent / "quiet.py", "4", str(directory), timeout=90)
        assert done.returncode == 0, done.stderr
        followers = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(followers) == 3
        print(followers)
        worst = {key: max(f[key] for f in followers) for key in followers[0]}
        assert worst["woken"] < WAKES_A_SECOND
        fast = worst["median"] < max(2e-3, 10 * worst["control_median"])
        fast = fast and worst["p95"] < max(3e-3, 10 * worst["control_p95"])
        if fast and worst["cpu"] < CORE:
            return
    raise AssertionError(f"after three attempts: {worst}")
