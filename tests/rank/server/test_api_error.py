"""Codes of errors: programs read them, so each is documented."""

import ast
from pathlib import Path

import phalanx
from phalanx.rank.server.api_error import CODES


def _codes(call):
    """Constants that a call of ApiError or PromptTooLong gives as its code."""
    given = [one.value for one in call.keywords if one.arg == "code"] + call.args[3:4]
    return {one.value for one in given if isinstance(one, ast.Constant) and one.value is not None}


def test_each_code_has_its_meaning():
    found = set()
    root = Path(phalanx.__file__).parent
    for file in (*root.glob("rank/server/**/*.py"), *root.glob("launcher/gateway/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ApiError":
                found |= _codes(node)
    assert found == CODES.keys()
