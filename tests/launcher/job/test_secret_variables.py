"""Keys in the launcher's environment."""

import os
import subprocess
import sys

from phalanx.launcher.job import secret_variables
from phalanx.rank.options import specs

LOOK = """
import os
from phalanx.launcher.job import secret_variables
secret_variables.forget()
secret_variables.forget()
print(os.environ.get("PHALANX_API_KEY"), os.environ["PHALANX_API_KEY_FILE"], os.environ["AFTER"])
print(open("/proc/self/environ").read().replace("\\0", " "))
if os.fork() == 0:
    print(open("/proc/self/environ").read().replace("\\0", " "), flush=True)
    os._exit(0)
os.wait()
os.execvp("env", ["env"])
"""
KEYS = {name: f"hush{number}" for number, name in enumerate(secret_variables.NAMES)}


def test_every_secret_option_has_its_variable_here():
    secret = [name for spec in specs().values() if spec.flag.secret for name in (spec.env, spec.flag.variable) if name]
    assert secret and set(secret) <= set(secret_variables.NAMES)


def test_keys_leave_the_environment_and_proc():
    environ = {"BEFORE": "1"} | KEYS | {"PHALANX_API_KEY_FILE": "a file", "AFTER": "2", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", LOOK], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("None a file 2\n"), done.stderr
    assert done.stdout.count("AFTER=2") == 3
    assert done.stdout.count("BEFORE=1") == 3
    assert "hush" not in done.stdout


def test_a_childs_environment():
    assert secret_variables.without({"A": "b"} | KEYS) == {"A": "b"}
