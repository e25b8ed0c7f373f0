"""Nothing in the tree is so long that it has to be read twice: files, functions, constructors."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILE, FUNCTION, ARGUMENTS = 400, 60, 10  # lines, lines, arguments beside self
SOURCES = {".py", ".cu", ".cuh", ".cpp", ".h", ".js", ".css", ".html", ".sh"}
# Triton compiles a kernel whole: as functions, its variants and their registers would be others.
LONG = {("kernels/attention/attention_triton.py", "decode_kernel")}


def files() -> Iterator[tuple[str, str]]:
    """Paths from the root, and texts."""
    for path in sorted(ROOT.rglob("*")):
        place = path.relative_to(ROOT)
        if path.suffix in SOURCES and not any(part.startswith(".") or part == "build" for part in place.parts):
            yield str(place), path.read_text()


@pytest.fixture(scope="module")
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (place, node)
        for place, text in files()
        if place.endswith(".py")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_files():
    assert not [(place, lines) for place, text in files() if (lines := text.count("\n")) > FILE]


def test_functions(functions):
    lengths = {(place, node.name): node.end_lineno - node.lineno + 1 for place, node in functions}
    assert {one for one, lines in lengths.items() if lines > FUNCTION} == LONG


def test_constructors(functions):
    counts = [
        (place, node.lineno, len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1)
        for place, node in functions
        if node.name == "__init__"
    ]
    assert not [one for one in counts if one[2] > ARGUMENTS]
