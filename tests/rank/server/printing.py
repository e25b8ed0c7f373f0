"""Work that prints, for a text worker of tests: it imports this module, so it is small."""

import sys


def printing(_: object, lines: int) -> None:
    for _ in range(lines):
        print("a line", file=sys.stderr)
