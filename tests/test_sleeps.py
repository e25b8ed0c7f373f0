"""Tests wait for what is to happen. Who sleeps in place of that says in a comment for how long, and why so long."""

import ast
import io
import re
import tokenize
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What a comment measures a sleep by: a number, or what takes longer, or what has happened by then.
MEASURE = re.compile(r"\d|\b(long|longer|enough|by then|until|while|time|ms|second|minutes)\b")
FEWEST_WORDS = 4


def is_sleep(node: ast.AST | None, names: set[str]) -> bool:
    """`time.sleep` and `asyncio.sleep` by whatever name the module goes, and the names that the function itself has."""
    return isinstance(node, ast.Attribute) and node.attr == "sleep" or isinstance(node, ast.Name) and node.id in names


def aliases(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "asyncio", "asyncio.tasks"):
            names |= {name.asname or "sleep" for name in node.names if name.name in ("sleep", "*")}
    before = None
    while names != before:  # an alias may have an alias
        before = set(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and is_sleep(node.value, names):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def sleeps(tree: ast.AST, names: set[str] | None = None, polls: bool = False):
    """(first line, last line) of the sleeps outside of loops that look again and again, and that are more than a turn
    of an event loop. Who hands the function on, to a thread or so, sleeps too; who only gives it a name does not."""
    names = aliases(tree) if names is None else names
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and is_sleep(node.func, names):
            seconds = [ast.unparse(word) for word in [*node.args, *(word.value for word in node.keywords)]]
            if not polls and seconds[:1] != ["0"]:
                yield node.lineno, node.end_lineno
        elif isinstance(node, ast.Call):
            handed = [*node.args, *(word.value for word in node.keywords)]
            if not polls and any(is_sleep(word, names) for word in handed):
                yield node.lineno, node.end_lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from sleeps(node, names)
            continue
        yield from sleeps(node, names, polls or isinstance(node, ast.While))


def comments(text: str) -> dict[int, tuple[str, bool]]:
    """By line: the comment, and whether it has the line for itself."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = (token.string.lstrip("# "), not token.line[: token.start[1]].strip())
    return found


def says_why(comment: str) -> bool:
    return len(comment.split()) >= FEWEST_WORDS and MEASURE.search(comment) is not None


def silent(text: str) -> list[int]:
    """The lines of sleeps with no comment that says why, beside them or alone on the line before."""
    said = comments(text)
    lines = []
    for first, last in sleeps(ast.parse(text)):
        beside = [said[line][0] for line in range(first, last + 1) if line in said]
        before, alone = said.get(first - 1, ("", False))
        if not any(says_why(comment) for comment in [*beside, before if alone else ""]):
            lines.append(first)
    return lines


def test_every_sleep_says_for_how_long_and_why():
    found = []
    for path in sorted(HERE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "sleep" not in text:
            continue
        lines = text.splitlines()
        found += [f"{path.relative_to(HERE.parent)}:{line}: {lines[line - 1].strip()}" for line in silent(text)]
    assert not found, "say for how long and why so long, or wait for the event:\n" + "\n".join(found)


def test_which_sleeps_have_to():
    code = "while True:\n    time.sleep(1)\n    def f(): time.sleep(2)\nasyncio.sleep(0)\ntime.sleep(3)"
    assert [line for line, _ in sleeps(ast.parse(code))] == [3, 5]


def test_a_sleep_is_found_under_every_name():
    for code in (
        "import time as clock\nclock.sleep(1)",
        "import asyncio as aio\nawait aio.sleep(1)",
        "from time import sleep\nsleep(1)",
        "from time import sleep as nap\nnap(1)",
        "from asyncio import sleep as nap\nawait nap(delay=1)",
        "from time import *\nsleep(1)",
        "rest = nap = time.sleep; nap(0)\nrest(1)",
        "from time import sleep; nap = sleep; doze = nap\ndoze(1)",
        "(nap := time.sleep)\nnap(1)",
        "\nThread(target=time.sleep, args=(1,)).start()",
        "\nawait asyncio.to_thread(time.sleep, 1)",
        "\nsoon = lambda: time.sleep(1)",
    ):
        assert silent(code) == [2], code
    assert silent("from toys import sleep\nsleep(1)\nmonkeypatch.setattr(time, 'sleep', slept.append)") == []


def test_which_comments_say_why():
    why = "# longer than the patience of rank 1"
    assert silent(f"time.sleep(1)  {why}") == []
    assert silent(f"{why}\ntime.sleep(1)") == []
    assert silent(f"time.sleep(\n    1,  {why}\n)") == []
    assert silent(f'time.sleep(1); say("{why}")') == [1]  # text, no comment
    assert silent(f'"""\n{why}\n"""\ntime.sleep(1)') == [4]
    assert silent(f'"""\n{why}"""\ntime.sleep(1)') == [3]
    assert silent(f"begin()  {why}\ntime.sleep(1)") == [2]  # of another line
    assert silent(f"{why}\n\ntime.sleep(1)") == [3]
    for empty in ("#", "# noqa: ASYNC251", "# wait", "# let the server have its say"):
        assert silent(f"time.sleep(1)  {empty}") == [1], empty
