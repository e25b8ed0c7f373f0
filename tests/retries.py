"""Marks of tests whose outcome depends on who else uses the machine: each is tried twice, for the reason it has."""

import pytest

KILLS = pytest.mark.retry(reason="ends or stops live processes: a busy machine delays when the others notice it")
CLOCKS = pytest.mark.retry(reason="compares with a real clock: on a busy machine all takes longer")
CLUSTER = pytest.mark.retry(reason="starts hosts and a batch system of its own, whose timeouts a busy machine exceeds")
BROWSER = pytest.mark.retry(reason="waits for a browser, which a busy machine starts and draws slowly")
