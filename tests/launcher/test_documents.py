"""The table of exit codes and the examples say what the code does."""

import re
import shlex
from pathlib import Path

import phalanx
from phalanx.launcher import choices, sbatch, supervise
from phalanx.rank import exits
from phalanx.rank.options import Options

ROOT = Path(phalanx.__file__).resolve().parent


def test_every_code_is_in_the_table():
    text = (ROOT / "docs/exit-codes.md").read_text()
    listed = {int(code): line for line in text.splitlines() for code in re.findall(r"^\| (\d+) \|", line)}
    codes = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert set(listed) == codes
    assert {code for code, line in listed.items() if re.search(r"\| (yes|perhaps)", line)} == set(supervise.RESTARTABLE)
    assert set(supervise.NAMES) == codes - {exits.OK}


def test_the_examples_use_options_that_exist():
    found = 0
    for path in (ROOT / "hostfiles").iterdir():
        text = re.sub(r"\\\n#?", " ", path.read_text())
        for line in re.findall(r"phalanx serve ([^\n&`]*)", text):
            words = [word for word in shlex.split(line) if "…" not in word]
            choices.read(Options, sbatch.wanted(words)[0], {})
            found += 1
    assert found >= 2
