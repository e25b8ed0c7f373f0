"""The first of README's two commands, as a newcomer types it: from a clean copy to an answer, and Ctrl-C."""

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import phalanx
import pytest

from . import retries
from .processes import Started

ROOT = Path(phalanx.__file__).resolve().parent

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), retries.CLOCKS]


def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not shutil.which("make"):
        pytest.skip("git and make are needed, and a checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_make_serve(tmp_path):
    for name in tracked():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    make = subprocess.Popen(
        ["make", "serve", "ARGS=--p 0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    started = Started(make.pid)
    try:
        said = ""
        for line in make.stdout:
            said += line
            if line.startswith("  curl "):
                break
        assert re.search(r"\[1/4\] making .venv.*\[4/4\] Phalanx", said, re.DOTALL), said
        url, body = re.search(r"curl (\S+) .* -d '(.*)'", line).groups()
        asked = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
        job = started.look()
        (supervisor,) = (pid for pid, words in job.items() if "bin/phalanx serve --np 2" in words)
        os.kill(supervisor, signal.SIGINT)
        assert make.wait(30) == 0
        assert not started.left()
    finally:
        started.kill()
        make.wait()
