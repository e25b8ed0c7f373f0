"""The table of exit codes and the examples say what the code does."""

import ast
import re
import shlex
from pathlib import Path

import phalanx
from phalanx import errors
from phalanx.launcher.job import sbatch, supervisor
from phalanx.launcher.options import option_sources
from phalanx.rank.options import Options

ROOT = Path(phalanx.__file__).resolve().parent


def test_every_code_is_in_the_table():
    text = (ROOT / "docs/exit-codes.md").read_text()
    listed = {int(code): line for line in text.splitlines() for code in re.findall(r"^\| (\d+) \|", line)}
    codes = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    assert set(listed) == codes
    assert {code for code, line in listed.items() if re.search(r"\| (yes|perhaps)", line)} == set(
        supervisor.RESTARTABLE
    )
    assert set(supervisor.NAMES) == codes - {errors.OK}


def test_the_examples_use_options_that_exist():
    found = 0
    for path in (ROOT / "hostfiles").iterdir():
        text = re.sub(r"\\\n#?", " ", path.read_text())
        for line in re.findall(r"phalanx serve ([^\n&`]*)", text):
            words = [word for word in shlex.split(line) if "…" not in word]
            option_sources.read(Options, sbatch.wanted(words)[0], {})
            found += 1
    assert found >= 2


def texts(path: Path):
    """Every text in a module, without what is filled in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_messages_of_a_cluster_are_those_of_the_code():
    said = "\n".join(text for room in ("launcher", "rank", "comm") for path in (ROOT / room).rglob("*.py")
                     for text in texts(path)) + "\n".join(texts(ROOT / "errors.py"))  # fmt: skip
    table = (ROOT / "docs/cluster.md").read_text().partition("## What messages mean")[2]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| `")]
    messages = [one for cell in cells for one in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 20
    unknown = [
        (message, part) for message in messages for part in message.split("…") if part.strip() and part not in said
    ]
    assert not unknown


def test_what_the_documents_name_is_there():
    table = (ROOT / "docs/cluster.md").read_text()
    examples = {path.name for path in (ROOT / "hostfiles").iterdir()}
    assert examples <= set(re.findall(r"`(?:hostfiles/)?([\w.-]+)`", table))  # each example has its place
    linked = set(re.findall(r"\]\((docs/[\w.-]+)\)", (ROOT / "README.md").read_text()))
    assert linked == {f"docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.suffix == ".md"}
