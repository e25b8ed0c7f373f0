"""conftest.py's work for all tests, seen on a few that are made for it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import leftovers
from .conftest import FIRST, pytest_collection_modifyitems
from .processes import table

HERE = Path(__file__).resolve().parent

LEAVES = """
import os, subprocess, sys, tempfile
from pathlib import Path
def test_a_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
def test_files():
    (Path(tempfile.mkdtemp(prefix="ompi.")) / "file").touch()
    (Path(os.environ["OMPI_MCA_btl_sm_backing_directory"]) / "sm_segment").touch()
def test_nothing():
    pass
"""
SHARES = """
import subprocess, sys, pytest
@pytest.fixture(scope="session")
def shared():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
"""
USES = "def test_it(shared):\n    assert shared.poll() is None\n"
TWICE = """
import pytest
tries = []
@pytest.mark.retry(reason="a disk that sleeps")
def test_once_more():
    tries.append(1)
    assert len(tries) == 2
@pytest.mark.retry(reason="the moon")
def test_never():
    assert not tries
def test_plain():
    tries.append(1)
    assert len(tries) > 3
"""

HANGS = """
import ctypes, subprocess, sys, time, pytest
@pytest.mark.timeout(1)
def test_in_c():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(98.75)"])
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex), lock(mutex)  # waits for itself, and has Python's lock meanwhile
@pytest.mark.timeout(1)
def test_that_catches():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
def test_after():
    pass
"""


@pytest.fixture
def run(tmp_path):
    """pytest, with these files beside the conftest."""

    def of(*flags: str, **files: str) -> subprocess.CompletedProcess:
        place = tmp_path / "tests"
        place.mkdir()
        (tmp_path / "tmp").mkdir()
        smaller = {"PATIENCE": "0.5", "GRACE": "0.5", "SHARED": f'Path("{tmp_path}/tmp")'}
        for name in ("conftest.py", "leftovers.py", "processes.py", "ranks.py", "__init__.py"):
            text = (HERE / name).read_text()
            for word, value in smaller.items():
                text = re.sub(rf"^{word} = .*", f"{word} = {value}", text, flags=re.MULTILINE)
            (place / name).write_text(text)
        shutil.copy(HERE.parent / "setup.cfg", tmp_path)
        for name, text in files.items():
            (place / f"{name}.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base")]
        outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        env = outer | {"TMPDIR": str(tmp_path / "tmp")}
        return subprocess.run([*command, *flags], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    return of


@pytest.mark.long
def test_what_is_left_behind_fails_the_module_that_did_it(run):
    done = run(test_a=LEAVES, test_b=SHARES + USES, test_c="def test_it(): pass\n")
    assert done.returncode == 1, done.stdout
    failed = re.findall(r"^ERROR (\S+)", done.stdout, re.MULTILINE)
    assert failed == ["tests/test_a.py::test_nothing"]
    assert "tests/test_a.py has left behind:\n" in done.stdout
    for what in ("time.sleep(100)", "/ompi.", "/sm_segment"):
        assert re.search(rf"^\S.*{re.escape(what)}", done.stdout, re.MULTILINE), what


@pytest.mark.long
def test_a_test_that_no_timeout_ends_is_named_and_others_go_on(run):
    done = run("-n", "1", test_a=HANGS)
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    for name in ("test_in_c", "test_that_catches"):
        assert re.search(rf"crashed while running .*test_a.py::{name}\b", done.stdout), done.stdout
        assert re.search(rf'File ".*/test_a.py", line \d+ in {name}', done.stderr), done.stderr
    assert not [line for line in (one.line for one in table().values()) if "sleep(98.75)" in line]


@pytest.mark.long
def test_what_is_tried_twice_is_listed_with_its_reason(run):
    done = run(test_a=TWICE)
    assert re.search("2 failed.*1 passed.*2 rerun", done.stdout)
    assert sorted(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)) == ["test_never", "test_plain"]
    listed = done.stdout.partition("tried twice")[2]
    assert "::test_once_more: a disk" in listed
    assert "tests/test_a.py::test_never: the moon\n" in listed


@pytest.mark.parametrize(
    ("mark", "word"),
    [
        (pytest.mark.retry, "needs reason="),
        (pytest.mark.retry(reason=""), "needs reason="),
        (pytest.mark.flaky(reruns=2), "retry"),
    ],
)
def test_nothing_is_tried_twice_without_a_reason(request, mark, word):
    item = pytest.Function.from_parent(request.node.parent, name="test_it", callobj=lambda: None)
    item.add_marker(mark)
    with pytest.raises(pytest.UsageError, match=f"test_conftest.py::test_it: .*{word}"):
        pytest_collection_modifyitems([item])


def test_of_some_cases_each_third_stays_in_the_fast_suite(request):
    items = [
        pytest.Function.from_parent(request.node.parent, name=f"test_it[{i}]", callobj=lambda: None) for i in range(7)
    ]
    for item in items:
        item.add_marker(pytest.mark.sample(3))
    items[1].add_marker(pytest.mark.long)
    pytest_collection_modifyitems(items)
    assert [i for i, item in enumerate(items) if not item.get_closest_marker("long")] == [0, 4]


@pytest.mark.long
def test_garbage_is_collected_where_tests_run_and_in_their_controller(run):
    says = "import gc\ndef pytest_terminal_summary(terminalreporter): terminalreporter.line(f'gc {gc.isenabled()}')\n"
    done = run("-n", "1", "-p", "tests.says", says=says, test_a="import gc\ndef test_it(): assert gc.isenabled()\n")
    assert "1 passed" in done.stdout and "\ngc True\n" in done.stdout, done.stdout + done.stderr


def test_the_files_that_are_begun_first_are_there():
    assert [name for name in FIRST if not (HERE / name).is_file()] == []


def test_kernels_are_handed_on_while_others_compile(tmp_path, monkeypatch):
    """A compiler's temporary folder stays where it is, and a part of a file is gone when it is to be linked."""
    source, target = tmp_path / "source", tmp_path / "target"
    folder = source / leftovers.KERNELS
    (folder / "tmp123").mkdir(parents=True)
    for name in ("a.cubin", "b.cubin", "b.456"):
        (folder / name).write_text(name)
    link = os.link

    def link_late(one, other):
        (folder / "b.456").unlink(missing_ok=True)
        link(one, other)

    monkeypatch.setattr(os, "link", link_late)
    leftovers.hand_on_kernels(source, target)
    assert sorted(path.name for path in (target / leftovers.KERNELS).iterdir()) == ["a.cubin", "b.cubin"]
