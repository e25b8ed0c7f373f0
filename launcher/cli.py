"""The `phalanx` command: finds the verb, prints errors as one line, and ends with a code of `errors.py`.

Imports nothing heavy: no torch, mpi4py, cupy or tornado is loaded before a verb needs it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

# Verb -> what --help says of it. A verb is a file, or a folder with command.py, under launcher/commands.
VERBS = {
    "serve": "start the server; the default when no verb is given",
    "batch": "answer a file of requests, in as many starts as it takes",
    "chat": "talk to a running server in the terminal",
    "bench": "measure a running server: throughput, time to first token, time per token",
    "doctor": "look at ranks, MPI, devices, links, disks and versions, and say what to do",
    "fit": "what a model needs on a cluster and how fast it would be, before the allocation",
    "pull": "fetch a model from the Hugging Face hub, before a job without network",
    "hostfile": "write the current Slurm, PBS or LSF allocation as a file for mpirun",
}

INTRO = """\
Phalanx serves a large language model from an MPI job, with an OpenAI-compatible API.

  phalanx serve                             the built-in model, one rank
  phalanx serve DIR --np 2 --device cpu     a model directory, two CPU ranks on this machine
  phalanx --w DIR --d 0,1,2,3 --p 2000      four GPUs of this machine
  mpirun -np 16 -hostfile H … phalanx serve --w DIR --d 0,1,2,3,4,5,6,7
  srun --mpi=pmix phalanx serve --w DIR

Verbs (phalanx VERB --help tells more):
"""


def main(argv: list[str] | None = None) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036
        return _fail("Python 3.11 or newer is needed, this is " + sys.version.split()[0], 2)
    words = sys.argv[1:] if argv is None else argv
    from ..errors import FatalError

    try:
        if words[:1] in (["-h"], ["--help"], ["help"]):
            print(_overview())
            return 0
        if words[:1] == ["--version"]:
            from .. import __version__

            print(f"phalanx {__version__}")
            return 0
        verb = words[0] if words and words[0] in VERBS else "serve"
        module = importlib.import_module(_module(verb), __package__)
        return module.main(words[1:] if words[:1] == [verb] else words)
    except FatalError as stop:
        return _fail(str(stop), stop.code)
    except BrokenPipeError:
        # `phalanx --help | head`: whoever read us has seen enough. The interpreter must not flush into it again.
        sys.stdout = None
        return 0


def _module(verb: str) -> str:
    folder = Path(__file__).parent / "commands" / verb
    return f".commands.{verb}.command" if folder.is_dir() else f".commands.{verb}"


def _overview() -> str:
    from ..rank.options import Options
    from .options.help import options_help

    verbs = "\n".join(f"  {verb:8} {text}" for verb, text in VERBS.items())
    return f"{INTRO}{verbs}\n\nOptions of serve:{options_help(Options)}"


def _fail(message: str, code: int) -> int:
    if message:
        print(f"phalanx: {message}", file=sys.stderr)
    else:
        from .job.linux import let_another_speak

        let_another_speak()
    return code


if __name__ == "__main__":
    sys.exit(main())
