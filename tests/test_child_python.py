"""No Python process of Phalanx imports from the current directory (tests/attack/test_poisoned_directory.py: live)."""

import ast
import subprocess
import sys

from phalanx import child_python

from .test_imports import modules

# Who may write the interpreter's path: execve wants it besides the command line, and a tool server's parent has -I.
ALLOWED = {
    "child_python": 1,
    "launcher.job.rank_bootstrap": 2,
    "launcher.commands.doctor.rank_probe": 1,
    "rank.server.mcp.connection": 1,
}


def test_every_python_command_line_is_made_in_one_place():
    found: dict[str, int] = {}
    for name, path in modules():
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "executable" in text else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
                found[name] = found.get(name, 0) + 1
    assert found == ALLOWED


def test_a_module_of_the_current_directory_is_not_imported(tmp_path):
    (tmp_path / "msgspec.py").write_text("print('poisoned')\n")
    plain, ours = ([sys.executable], child_python.command())
    for command, expected in ((plain, "poisoned\n"), (ours, "")):
        for words in (["-c", "import msgspec"], ["-m", "phalanx.rank.protocol"]):
            done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
            assert done.stdout == expected
