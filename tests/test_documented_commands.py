"""The commands of README and docs/ run as they are written: clients against one server of the built-in model, and
servers until they are ready. Addresses, keys and models are those of here.

Commands of other programs, among them mpirun and srun, do not run, nor do those that need the hub or a model with a
tower; tests/test_docs.py reads their options.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from phalanx.launcher import builtin_model, document
from phalanx.launcher.job import sbatch
from phalanx.launcher.options import option_sources

from .documents import ROOT, USERS, blocks, commands, page_id
from .processes import wait
from .ranks import AS_ROOT, clean
from .server import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # the first test waits for the server, too
JOB = "991"  # the job's number in docs/cluster.md
GGUF = "model.gguf"
IMAGES = ROOT / "docs/vision.md"
MODEL = str(builtin_model.DIRECTORY)
OPTIONS = {"PHALANX_DEVICE": "cpu", "PHALANX_MEM": "64", "PHALANX_INPUT_LEN": "32", "PHALANX_OUTPUT_LEN": "8"}
READY = "is ready|gateway is at"
ELSEWHERE = "…|phalanx pull|--mmproj"  # elided, or what the built-in model is not for


def runs(command: str) -> bool:
    return not re.search(ELSEWHERE, command) and bool(re.match(r"(curl|phalanx|python -c) ", command))


def serves(command: str) -> bool:
    return bool(re.search(r"phalanx (serve|gateway)\b", command)) and sbatch.FLAG not in command


def renamed(command: str) -> str:
    """The command with DIR for models and a file that there will be for GGUF files."""
    found = re.search(r"\bphalanx ([a-z]+)([^>]*)", command)
    if not found or found[1] not in document.STRUCTS:
        return command
    words, _ = sbatch.wanted(shlex.split(found[2]))
    options = option_sources.read(document.STRUCTS[found[1]], words, {}).options
    for name in ("model", "draft_model"):
        if (model := getattr(options, name, "")) and not model.startswith("/"):
            here = GGUF if model.endswith(".gguf") else "DIR"
            command = re.sub(rf"(?<=[ =]){re.escape(model)}(?= |$)", here, command)
    return command


# Their options are read in the tests, so a wrong one fails a test and does not stop the collection.
COMMANDS = {page: [one for one in commands(page) if runs(one)] for page in USERS}
CLIENTS = {page: [one for one in found if not serves(one)] for page, found in COMMANDS.items()}
SERVERS = list(dict.fromkeys(command for found in COMMANDS.values() for command in found if serves(command)))
IMPORTS = re.compile(r"^(import|from) \w", re.M)
PROGRAMS = {page: [one for one in blocks(page, "python") if IMPORTS.search(one)] for page in USERS}


class Here:
    """A user's home, with a server of a model that runs as a job of a batch system."""

    def __init__(self, home: Path, model: str = MODEL):
        self.home, self.model = home, model
        (home / "nodes").write_text("a\nb\n")
        (requests,) = (one for one in blocks(ROOT / "docs/batch.md", "") if one.startswith("{"))
        (home / "requests.jsonl").write_text(requests)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = {"HOME": str(home), "XDG_STATE_HOME": "", "PATH": path, **OPTIONS, **AS_ROOT}
        self.server = Server(model, "--file-store", str(home / "files"), "--admin", PBS_JOBID=JOB, **self.environ)
        (registered,) = (home / ".local/state/phalanx/jobs").iterdir()
        self.key = json.loads(registered.read_text())["key"]

    def text(self, text: str) -> str:
        """The command or program with what is here for its addresses, keys, models and folders."""
        key = "" if "Authorization" in text else '-H "Authorization: Bearer KEY" '
        text = re.sub("^curl ", f"curl -sS --fail-with-body {key}", text).replace("/tmp/", f"{self.home}/")
        text = re.sub(r"http://[\w.]+:\d+|\bURL\b", self.server.url, text)
        text = re.sub(r"(?<=Bearer )KEY\b|(?<=api_key=\")-", self.key, text)
        return re.sub(r"\bDIR\b", self.model, text)

    def command(self, command: str) -> str:
        return self.text(renamed(command))

    def run(self, script: str, *program: str) -> None:
        done = subprocess.run(
            [*(program or ("bash", "-ec")), script],
            env=clean() | self.environ | {"PBS_NODEFILE": str(self.home / "nodes")},
            input="Hello!\n", capture_output=True, text=True, timeout=100, cwd=self.home,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    if missing := [one for one in ("curl", "jq") if not shutil.which(one)]:
        pytest.skip(f"{missing} is not installed")
    here = Here(tmp_path_factory.mktemp("home"))
    with here.server:
        here.run(f"phalanx convert {MODEL} {GGUF} --to q4km")
        yield here


@pytest.fixture
def seeing(here, tmp_path):
    """A tiny model that takes images, and one."""
    from .rank.model.vision.seeing import add_text, picture, write_seeing

    seeing = Here(tmp_path, str(add_text(write_seeing(tmp_path / "model", "qwen3_vl"))))
    picture(100, 75).save(tmp_path / "cat.png")
    with seeing.server:
        yield seeing


def test_images(seeing):
    for command in CLIENTS[IMAGES]:
        seeing.run(seeing.command(command))
    seeing.run(seeing.text("\n".join(PROGRAMS[IMAGES])), sys.executable, "-c")


@pytest.mark.parametrize("page", [page for page in USERS if CLIENTS[page] and page != IMAGES], ids=page_id)
def test_clients(here, page):
    for command in CLIENTS[page]:
        here.run(here.command(command))


@pytest.mark.parametrize("page", [page for page in USERS if PROGRAMS[page] and page != IMAGES], ids=page_id)
def test_programs(here, page):
    here.run(here.text("\n".join(PROGRAMS[page])), sys.executable, "-c")


@pytest.mark.parametrize("command", SERVERS)
def test_servers(here, command):
    job = ["bash", "-c", f"cd {here.home}; exec {here.command(command)} --port 0"]
    with Server(job=job, wait=False, **here.environ) as server:
        wait(lambda: not re.search(READY, server.output) and server.process.poll() is None, 100)
        assert re.search(READY, server.output), server.output
        server.process.terminate()
        assert server.exit_code() == 0, server.output
