"""Surroundings of all tests: nothing that they start may outlive them, or write into the user's home."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from phalanx.rank import heap
from pytest_timeout import _get_item_settings as timeout_of

from . import leftovers
from .processes import kill, wait

RUN, WORKER = (os.environ.get(f"PYTEST_XDIST_{name}", "") for name in ("TESTRUNUID", "WORKER"))
SESSION = f"{RUN}-{WORKER}" if RUN else secrets.token_hex(8)
PATIENCE = 20.0  # for what was told to end, on a machine that others use too
GRACE = 60.0  # beyond its timeout, for a test to clear away what it has started
STDERR = pytest.StashKey[int]()
# Files that take longest, with what they wait for, begun first, so that none is left alone at the end: the long run's,
# then the short one's.
FIRST = (
    "rank/test_served.py", "launcher/job/test_other_mpi.py", "test_endings.py", "test_batch.py", "test_python_312.py",
    "cluster/test_loading.py", "test_make_serve.py", "cluster/test_slurm.py", "rank/test_offloading.py",
    "rank/test_generation.py", "rank/test_loading.py", "kernels/attention/test_attention.py", "rank/test_faults.py",
    "launcher/job/test_supervisor.py", "launcher/commands/fit/test_measured.py",
    "kernels/quantized/test_packed_gemm.py", "launcher/test_llm.py", "rank/model/test_architectures.py",
    "launcher/job/test_rank_bootstrap.py", "test_documented_commands.py", "rank/test_reloading.py",
    "launcher/commands/test_convert.py", "rank/server/test_main.py", "kernels/collective/test_barrier_model.py",
    "launcher/commands/fit/test_command.py", "kernels/test_compile.py", "rank/model/stored_formats/test_stored.py",
    "kernels/moe/test_moe.py", "launcher/commands/test_pull.py", "rank/model/experts/test_quantised.py",
    "launcher/commands/test_chat.py", "test_wheel.py",
)  # fmt: skip

# C++ operations: their tests have the threads that there are, or choose.
THREADED = re.compile(r"/tests/kernels/(cpp/|moe/test_host_|.*_cpu\.py$)")

# Until all is imported: that makes millions of objects and no garbage, which the collector would look for in vain.
gc.disable()


@pytest.fixture
def without_linux_calls(monkeypatch):
    """A Python that was built against old headers, as many of conda and uv were."""
    for name in ("pidfd_open", "memfd_create"):
        monkeypatch.delattr(os, name, raising=False)


def pytest_configure(config):
    config.stash[STDERR] = os.dup(2)  # while tests run, pytest has the other


def pytest_unconfigure(config):
    os.close(config.stash[STDERR])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """pytest-timeout raises its error once, in Python: what waits in C, or catches the error and waits again, would
    wait for ever. This ends the process and shows where each of its threads was; where there is xdist, it names the
    test and goes on with a new process."""
    if limit := timeout_of(item).timeout:
        faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=item.config.stash[STDERR])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """In xdist's controller: what a process that was ended had started ends, too."""
    if error:
        kill(leftovers.marked(f"{node.workerinput['testrunuid']}-{node.gateway.id}", parts=True))


def pytest_sessionstart(session):
    config = session.config
    if not hasattr(config, "workerinput") and config.getoption("dist", "no") != "no":
        gc.enable()  # xdist's controller collects nothing


def pytest_collection_finish():
    gc.freeze()  # none of it is looked at again, either
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m looks at what is long
def pytest_collection_modifyitems(items):
    seen: dict[str, int] = {}
    for item in items:
        if (sample := item.get_closest_marker("sample")) and not item.get_closest_marker("long"):
            name = item.nodeid.partition("[")[0]
            if seen.setdefault(name, 0) % sample.args[0]:
                item.add_marker(pytest.mark.long)
            seen[name] += 1
    places = {f"tests/{file}": at for at, file in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(FIRST)))
    for item in items:
        if item.get_closest_marker("flaky"):
            raise pytest.UsageError(f"{item.nodeid}: say retry(reason=...) in place of flaky")
        if marker := item.get_closest_marker("retry"):
            reason = marker.kwargs.get("reason")
            if not reason:
                raise pytest.UsageError(f"{item.nodeid}: retry needs reason='what it is that the test cannot help'")
            item.user_properties.append(("retry", reason))
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter):
    again = terminalreporter.stats.get("rerun", [])
    if again:
        terminalreporter.section("tried twice")
    for report in again:
        reason = dict(report.user_properties).get("retry", "passed or failed at random; mend it")
        terminalreporter.line(f"{report.nodeid}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """Processes of a session's fixture do not belong to the module that used it first."""
    if fixturedef.scope != "session":
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(leftovers.MARK, SESSION)
        return (yield)


@pytest.fixture
def short_directory():
    """For a Unix socket, whose whole path has at most 107 bytes: pytest's own directories are long."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory):
    """For the job files of servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def pytests_objects_stay_frozen():
    """A model that is loaded or unloaded would look through all that pytest has collected, for half a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heap, "gc", mock.Mock())
        yield


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """A shell's background processes ignore them, and so would all that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_tmpdir(tmp_path_factory):
    tmp_path_factory.getbasetemp()  # pytest's stays where it is
    with leftovers.own_tmpdir():
        yield
        assert not wait(lambda: leftovers.marked(SESSION), PATIENCE)  # left behind by fixtures of the whole session


@pytest.fixture(scope="module", autouse=True)
def one_thread(request):
    """Tests' computations are so small that torch's threads get in each other's way: where other workers use the cores,
    each waits for the other and spins meanwhile."""
    torch = sys.modules.get("torch")
    if torch is None or THREADED.search(str(request.path)):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(request, own_tmpdir):
    """Its last test has an error at its teardown where a module has left anything behind."""
    name = request.node.nodeid
    word = f"{SESSION}:{name}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(leftovers.MARK, word)
        found = leftovers.Leftovers(word)
        yield
    if left := wait(found.seen, PATIENCE):
        found.clear()
        pytest.fail(f"{name} has left behind:\n" + "\n".join(left), pytrace=False)
