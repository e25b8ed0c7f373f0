"""The command line of every Python process that Phalanx starts."""

import sys


def command(*words: str) -> list[str]:
    """`python WORDS` without the current directory on sys.path, where a downloaded torch.py would be run.

    An option and not PYTHONSAFEPATH: mpirun hands command lines to other hosts, but not the environment, and a tool
    server's own Python scripts must still find the modules next to them.
    """
    return [sys.executable, "-P", *words]
