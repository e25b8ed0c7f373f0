"""A rank ends through MPI_Abort where a launcher takes codes from it only, and never hangs there."""

import subprocess
import sys
import time

import pytest

from .. import retries

pytestmark = retries.KILLS

END = """
import sys, time
from phalanx.comm.watchdog import LocalWatchdog
watch = LocalWatchdog()
def abort(code):
    print("abort", code, flush=True)
    {}
watch.abort = abort
watch.end(3)
"""


@pytest.mark.parametrize(("how", "seconds"), [("pass", 0), pytest.param("time.sleep(60)", 2, marks=pytest.mark.long)])
def test_the_end_goes_through_abort(how, seconds):
    process = subprocess.Popen([sys.executable, "-c", END.format(how)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "abort 3\n"
    began = time.monotonic()
    assert process.wait(20) == 3
    process.stdout.close()
    assert seconds - 0.5 <= time.monotonic() - began < seconds + 10
