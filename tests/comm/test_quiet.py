import json
from pathlib import Path

import pytest

from ..ranks import run_ranks

pytestmark = pytest.mark.alone


@pytest.mark.long
@pytest.mark.timeout(150)
@pytest.mark.retry(reason="measures milliseconds, and what else the machine does adds to them")
def test_four_idle_ranks_are_quiet_and_wake_fast():
    """Under 1 % of a core each; woken within 2 ms (median) and 3 ms (95th percentile).

    The best of three: the figures are of the program, and a neighbour's load on the machine adds to them.
    """
    for _ in range(3):
        done = run_ranks(4, Path(__file__).parent / "quiet.py", "4", timeout=45)
        assert done.returncode == 0, done.stderr
        followers = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(followers) == 3
        print(followers)
        worst = {key: max(f[key] for f in followers) for key in ("median", "p95", "cpu")}
        if worst["median"] < 2e-3 and worst["p95"] < 3e-3 and worst["cpu"] < 0.01:
            return
    raise AssertionError(f"after three attempts: {worst}")
