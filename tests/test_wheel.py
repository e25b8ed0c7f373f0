"""The wheel and the source distribution hold what the tree holds; the wheel works from where it is unpacked."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import phalanx
import pytest

ROOT = Path(phalanx.__file__).resolve().parent
CODE = ("launcher", "rank", "comm", "kernels")
DATA = (".json", ".jinja", ".safetensors", ".cu", ".cuh", ".html", ".css", ".js", ".svg", ".cpp", ".h", ".toml")

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from what git would have committed: the tracked files and the new ones."""
    place = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout")
    source = place / "source"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(place), str(source)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (found,) = place.glob("*.whl")
    return found


def tree(source: Path) -> set[str]:
    """Files that an installed package must have."""
    names = {f"phalanx/{path.name}" for path in source.glob("*.py") if path.name != "setup.py"}
    for folder in CODE:
        for path in (source / folder).rglob("*"):
            if path.suffix in (".py", *DATA) and path.is_file():
                names.add(f"phalanx/{path.relative_to(source)}")
    return names


def test_the_wheel_has_what_the_tree_has(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")  # for every processor: kernels are compiled where they run
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = tree(wheel.parent / "source")
    missing = sorted(expected - inside)
    assert not missing, f"package_data lacks {missing}"
    extra = {name for name in inside - expected if not name.endswith(".md")}
    assert not extra, f"added: {sorted(extra)}"
    assert not [name for name in inside if name.split("/")[0] != "phalanx"], "a bare top-level package"


def test_the_source_distribution_has_what_the_tree_has(wheel, tmp_path):
    source = wheel.parent / "source"
    built = subprocess.run(
        [sys.executable, "-m", "build", "-q", "--sdist", "--no-isolation", "-o", str(tmp_path), str(source)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (found,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        inside = {"phalanx/" + name.partition("/")[2] for name in archive.getnames()}
    expected = tree(source)
    assert "phalanx/launcher/builtin_model/model.safetensors" in expected
    assert not expected - inside, f"missing: {sorted(expected - inside)}"


def test_it_runs_from_the_wheel(wheel, tmp_path):
    """Only the wheel and the environment's other packages: the editable installation is not seen."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys, phalanx; assert phalanx.__file__.startswith(sys.argv[1]), phalanx.__file__;"
        "from phalanx.launcher.cli import main; sys.exit(main(['--help']))"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "phalanx serve --help" in done.stdout


def test_the_command_is_an_entry_point(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    (points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "phalanx = phalanx.launcher.cli:main" in zipfile.ZipFile(wheel).read(points).decode()
