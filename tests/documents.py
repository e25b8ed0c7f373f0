"""Reads the documents: their pages, the blocks of code in these, and the commands in the blocks."""

import re
import shlex
from pathlib import Path

import phalanx

ROOT = Path(phalanx.__file__).resolve().parent
USERS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BENCHMARKS = [ROOT / "benchmarks", ROOT / "benchmarks/builtin_model"]
PAGES = [*USERS, ROOT / "ARCHITECTURE.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs/measurements").rglob("*.md"))]
PAGES += [folder / "README.md" for folder in BENCHMARKS]

PROGRAMS = "apptainer|curl|llama-server|make|mpirun|phalanx|pip|pytest|python|source|srun|vllm"
COMMAND = re.compile(rf"(\$ )?((?:{PROGRAMS}) .*)")
COMMENT = re.compile(r"(?<=\S) {2,}(?!-|phalanx)\S.*")  # what follows two blanks


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *kinds: str) -> list[str]:
    """The blocks of code of these kinds, not indented."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [re.sub(f"^{indent}", "", text, flags=re.M) for indent, kind, text in found if kind in kinds]


def commands(page: Path) -> list[str]:
    """The commands of a page's blocks, each with its further lines, without comments and without what they print."""
    found = []
    for text in blocks(page, "", "bash"):
        lines = [COMMENT.sub("", line) for line in text.replace(".venv/bin/", "").splitlines()]
        while lines:
            if not (start := COMMAND.fullmatch(lines.pop(0).strip())) or text.startswith("$ ") and not start[1]:
                continue
            command = start[2]
            while lines and _is_open(command):
                command += "\n" + lines.pop(0)
            found.append(command.replace("\\\n", " "))
    return found


def _is_open(command: str) -> bool:
    """Whether the command goes on in the next line."""
    try:
        heredoc = "<< END\n" in f"{command}\n" and not command.endswith("\nEND")
        return heredoc or command.endswith("\\") or not shlex.split(command)
    except ValueError:  # a quotation that is not closed
        return True
