"""The `phalanx` command: finds the verb, prints errors as one line, and ends with a code of `errors.py`.

Imports nothing heavy: no torch, mpi4py, cupy or tornado is loaded before a verb needs it.
"""

from __future__ import annotations

import ast
import difflib
import errno
import importlib
import os
import sys
from pathlib import Path

# A verb is a file here, or a folder with command.py, that has `main(argv)` and a HELP of one line.
COMMANDS = Path(__file__).parent / "commands"

INTRO = """\
Phalanx serves a large language model from an MPI job, with an OpenAI-compatible API.

  phalanx serve                             the built-in model, one rank
  phalanx serve DIR --np 2 --device cpu     a model directory, two CPU ranks on this machine
  phalanx serve DIR --d 0,1,2,3             four GPUs of this machine
  mpirun -np 16 -hostfile H … phalanx serve DIR --d 0,1,2,3,4,5,6,7
  srun --mpi=pmix phalanx serve DIR

Verbs (phalanx VERB --help lists its options; phalanx serve --help those of a server):
"""
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # what writing to a full disk fails with


def main(argv: list[str] | None = None) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036
        return _fail("Python 3.11 or newer is needed, this is " + sys.version.split()[0], 2)
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from ..logs import open_closed

        open_closed()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # also while a verb is imported, which may take a second
        from ..errors import STOPPED

        return STOPPED


def _run(words: list[str]) -> int:
    from ..errors import ERROR, FatalError

    if hasattr(sys.stdout, "reconfigure"):
        # Not all terminals have all characters, and names of files are bytes.
        sys.stdout.reconfigure(errors="surrogateescape" if sys.stdout.encoding.lower() == "utf-8" else "replace")
    try:
        code = _verb(words)
        if sys.stdout is not None:
            sys.stdout.flush()  # here its failure can be told
        return code
    except FatalError as stop:
        return _fail(str(stop), stop.code)
    except BrokenPipeError:
        # `phalanx --help | head`: whoever read us has seen enough. The interpreter must not flush into it again.
        sys.stdout = None
        return 0
    except OSError as error:
        if error.errno not in FULL:
            raise
        sys.stdout = None
        place = error.filename or "standard output or a file in TMPDIR"
        return _fail(f"{place} cannot be written: {error.strerror}", ERROR)


def _verb(words: list[str]) -> int:
    if words[:1] in (["-h"], ["--help"], ["help"]):
        print(_overview())
        return 0
    if words[:1] == ["--version"]:
        from .. import __version__

        print(f"phalanx {__version__}")
        return 0
    file = _file(words[0]) if words else None
    if words and file is None:
        _refuse_misspelled(words[0])
    module = importlib.import_module(_module(file or COMMANDS / "serve.py"), __package__)
    code: int = module.main(words[1:] if file else words)
    return code


def _file(word: str) -> Path | None:
    """The verb's file; None where the word is no verb."""
    if not word.isidentifier() or word.startswith("_"):
        return None
    return next((path for path in (COMMANDS / f"{word}.py", COMMANDS / word / "command.py") if path.is_file()), None)


def _refuse_misspelled(word: str) -> None:
    """A word that is no verb is the model, but one that is almost a verb and no model was meant to be one.

    A flag is neither: llama.cpp has --fit.
    """
    close = [] if word.startswith("-") else difflib.get_close_matches(word, verbs(), 1, 0.75)
    if close and not Path(word).exists():
        from ..errors import USAGE, FatalError
        from .job.mpi_env import rank_placement

        place = rank_placement(os.environ)
        text = f"{word!r} is no verb, and no model is there; did you mean phalanx {close[0]}?"
        raise FatalError(text if place is None or place.rank == 0 else "", USAGE)


def _module(file: Path) -> str:
    return "." + ".".join(file.relative_to(COMMANDS.parent).with_suffix("").parts)


def verbs() -> dict[str, str]:
    """Verb -> its line in --help, serve first. Nothing is imported for it."""
    files = [*COMMANDS.glob("[!_]*.py"), *COMMANDS.glob("*/command.py")]
    found = {file.parent.name if file.name == "command.py" else file.stem: _help(file) for file in files}
    return dict(sorted(found.items(), key=lambda verb: (verb[0] != "serve", verb[0])))


def _help(file: Path) -> str:
    """The text of HELP = "..." in a verb's file."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HELP":
            return ast.literal_eval(node.value)
    return ""


def _overview() -> str:
    return INTRO + "\n".join(f"  {verb:8} {text}" for verb, text in verbs().items())


def _fail(message: str, code: int) -> int:
    if message:
        from ..logs import say

        say(message, "error")
    else:
        from .job.linux import let_another_speak

        let_another_speak()
    return code


if __name__ == "__main__":
    sys.exit(main())
