"""Tests wait for what is to happen. Who sleeps in place of that says on the line what for, and why so long."""

import ast
from pathlib import Path

HERE = Path(__file__).resolve().parent


def sleeps(tree: ast.AST, polls: bool = False):
    """The sleeps outside of loops that look again and again, and that are more than a turn of an event loop."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep"):
            if not polls and ast.unparse(node.args[0]) != "0":
                yield node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from sleeps(node)
            continue
        yield from sleeps(node, polls or isinstance(node, ast.While))


def test_every_sleep_says_why():
    silent = []
    for path in sorted(HERE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        found = [line for line in sleeps(ast.parse(text)) if "#" not in lines[line - 1]]
        silent += [f"{path.relative_to(HERE.parent)}:{line}: {lines[line - 1].strip()}" for line in found]
    assert not silent, "say why and why so long, or wait for the event:\n" + "\n".join(silent)


def test_which_sleeps_have_to():
    code = "while True:\n    time.sleep(1)\n    def f(): time.sleep(2)\nasyncio.sleep(0)\ntime.sleep(3)"
    assert list(sleeps(ast.parse(code))) == [3, 5]
