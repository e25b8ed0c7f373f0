"""Nothing in the tree is so long that it has to be read twice: files, functions, constructors."""

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from . import braces

ROOT = Path(__file__).resolve().parents[1]
FILE, FUNCTION, ARGUMENTS = 400, 60, 10  # lines, lines, arguments beside self
SOURCES = {".py", ".cu", ".cuh", ".cpp", ".h", ".js", ".css", ".html", ".sh"}
BRACED = {".cu", ".cuh", ".cpp", ".h", ".js"}


@functools.cache
def files() -> list[tuple[str, str]]:
    """Paths from the root, and texts."""
    found = []
    for place, folders, names in os.walk(ROOT):
        folders[:] = sorted(one for one in folders if not one.startswith(".") and one != "build")
        paths = [Path(place, name) for name in sorted(names) if not name.startswith(".")]
        found += [(str(path.relative_to(ROOT)), path.read_text()) for path in paths if path.suffix in SOURCES]
    return found


class Function(NamedTuple):
    place: str
    name: str
    line: int
    lines: int
    arguments: int


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All below it. Of expressions, which are most of a tree, none has any."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for one in getattr(node, name, ()):
            if isinstance(one, ast.stmt):
                yield one
            yield from statements(one)


@functools.cache
def functions() -> list[Function]:
    """Python's. Their trees are not kept: the garbage collector would go through millions of nodes again and again."""
    found = []
    for place, text in files():
        for node in statements(ast.parse(text)) if place.endswith(".py") else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
                found.append(Function(place, node.name, node.lineno, node.end_lineno - node.lineno + 1, count))
    return found


def test_files():
    assert not [(place, lines) for place, text in files() if (lines := text.count("\n")) > FILE]


def test_architectures():
    """Each is read as one page; one with another's Model is that architecture but for its arguments."""
    lengths = {}
    for place, text in files():
        if place.startswith("rank/model/architectures/"):
            lengths[place] = (text.count("\n"), 200 if "\nclass Model(" in text else 60)
    assert len(lengths) > 30 and not [place for place, (lines, most) in lengths.items() if lines > most]


def test_functions():
    lengths = [(one.place, one.name, one.lines) for one in functions()]
    for place, text in files():
        if (suffix := Path(place).suffix) in BRACED:
            found = braces.functions(text, script=suffix == ".js")
            lengths += [(place, braces.name(head), lines) for head, lines in found]
    assert not [one for one in lengths if one[2] > FUNCTION]


def test_functions_are_found_by_their_braces():
    """Not by those of comments, strings, regular expressions, loops, structs and initializers."""
    cuda = """
        #define OPEN {
        struct Pair { int x[2] = {1, 2}; Pair() {} };  // }
        extern "C" __global__ void __launch_bounds__(THREADS, 1)
        kernel(const int* from, int n) {
            for (int i = 0; i < n; i++) { "}"; '{'; }
            auto take = [&](int i) {
                return i;
            };
        }
    """
    found = [(braces.name(head), lines) for head, lines in braces.functions(cuda)]
    assert found == [("Pair", 1), ("take", 3), ("kernel", 7)]
    script = """
        export function blocks(text) {
          if (/[/{]{3}/.test(text)) { return `{ ${text}`; }
          const until = (over) => {
            each(() => { over(); });
          };
        }
    """
    found = [(braces.name(head), lines) for head, lines in braces.functions(script, script=True)]
    assert found == [("each", 1), ("until", 3), ("blocks", 6)]
    with pytest.raises(AssertionError, match="not closed"):
        list(braces.functions("void f() { if (x) {"))


def test_constructors():
    assert not [one for one in functions() if one.name == "__init__" and one.arguments - 1 > ARGUMENTS]
