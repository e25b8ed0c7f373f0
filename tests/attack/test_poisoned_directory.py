"""A model directory with a module for every name that Phalanx imports: working in it must run none of them."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import phalanx
import pytest
from phalanx.launcher.job import mpirun

from ..checkpoints import make_checkpoint
from ..ranks import AS_ROOT, clean
from ..server import PHALANX, Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(110)]
MARK = "PHALANX_TEST_POISON"  # names the file in which modules that run leave their names
POISON = """
import os
with open(os.environ["PHALANX_TEST_POISON"], "a") as file:
    file.write(__name__ + "\\n")
raise SystemExit("poisoned: " + __name__)
"""
LIBRARY = """
import phalanx
with phalanx.LLM(".", device="cpu", mem=64, ranks=2) as llm:
    print(len(llm.generate(["Say something."], phalanx.SamplingParams(max_tokens=2))))
"""


def names() -> set[str]:
    """Everything importable: the standard library, what setup.cfg names and what that needs, and Phalanx."""
    installed = importlib.metadata.packages_distributions()
    wanted = {re.split(r"[>=;\[ ]", one)[0] for one in importlib.metadata.requires("phalanx") or []}
    declared = {name.lower().replace("-", "_") for name in wanted} | {"cupy", "yaml", "jinja2"}
    own = {"phalanx", "sitecustomize", "usercustomize", "__main__"}
    return {name for name in declared | own | set(installed) | set(sys.stdlib_module_names) if name.isidentifier()}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("poisoned") / "model")
    for name in names():
        (directory / f"{name}.py").write_text(POISON)
    assert {"msgspec", "torch", "mpi4py", "numpy", "tornado", "json", "cupy", "yaml"} <= names()
    return directory


@pytest.fixture
def ran(place):
    """The names of modules of the directory that have run."""
    log = place.parent / "ran"
    log.write_text("")
    yield log.read_text
    assert not log.read_text()


def run(place: Path, *words: str, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    environ = clean() | AS_ROOT | {MARK: str(place.parent / "ran")}
    return subprocess.run(words, cwd=place, env=environ, capture_output=True, text=True, timeout=seconds)


def test_the_poison_works(place):
    """`python -m` of a user's own puts the current directory first, as Python does for every module."""
    log = place.parent / "ran"
    assert run(place, sys.executable, "-m", "phalanx.launcher.cli", "--version").returncode
    assert log.read_text()


@pytest.mark.parametrize("own", [False, True], ids=["supervised", "users-mpirun"])
def test_serve(place, ran, own):
    ranks = () if own else ("--np", "2")
    command = ["env", "-C", str(place), *(mpirun.command(mpirun.find(os.environ), 2, []) if own else [])]
    environ = {MARK: str(place.parent / "ran")}
    with Server(".", *ranks, "--device", "cpu", "--mem", "64", command=command, **environ) as one:
        status, answer, _ = one.request("/v1/completions", {"prompt": "Hello", "max_tokens": 2})
        assert status == 200 and answer["choices"], one.output
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (*one.ranks, one.server_pid)]
        assert len(lines) == 3 and all(b"\0-P\0" in line for line in lines)


def test_doctor(place, ran):
    done = run(place, PHALANX, "doctor", ".", "--device", "cpu", "--json")
    checks = {one["name"]: one["state"] for one in json.loads(done.stdout)["checks"]}
    assert not ran(), done.stderr
    assert checks["cpu"] == "OK" and checks["compiler"] == "OK", done.stdout


def test_fit_convert_batch_and_the_library(place, ran, tmp_path):
    fit = run(place, PHALANX, "fit", ".", "--gpu-mem", "80")
    assert fit.returncode == 0, fit.stderr
    convert = run(place, PHALANX, "convert", ".", str(tmp_path / "made.gguf"), "--to", "q8_0", "--device", "cpu")
    assert convert.returncode == 0, convert.stderr
    body = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 2}}
    (tmp_path / "in.jsonl").write_text(json.dumps(body) + "\n")
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    batch = run(place, PHALANX, "batch", ".", *files, "--device", "cpu", "--mem", "64")
    assert batch.returncode == 0, batch.stderr
    (tmp_path / "library.py").write_text(LIBRARY)
    library = run(place, sys.executable, str(tmp_path / "library.py"))
    assert library.stdout == "1\n", library.stderr


def test_an_entry_script_has_its_own_directory_on_the_path(place):
    """The directory of the script and not the current one: so `phalanx` needs no -P."""
    show = place.parent / "show.py"
    show.write_text("import sys; print(sys.path[0])\n")
    assert run(place, sys.executable, str(show)).stdout.strip() == str(show.parent)
    assert os.path.dirname(PHALANX) != str(place) and Path(phalanx.__file__).exists()
