"""The examples of docs/library.md, run one after the other as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import phalanx
import pytest

from ..ranks import clean

ROOT = Path(phalanx.__file__).resolve().parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_examples_run(tmp_path):
    blocks = BLOCK.findall((ROOT / "docs" / "library.md").read_text(encoding="utf-8"))
    assert len(blocks) == 3
    program = tmp_path / "examples.py"
    program.write_text("\nprint('----')\n".join(blocks), encoding="utf-8")
    environ = clean() | {"PHALANX_DEVICE": "cpu", "PHALANX_MEM": "64", "PHALANX_MAX_NUM_SEQS": "8"}
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=os.fspath(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    texts, weather, stream = done.stdout.split("----\n")
    assert len(texts.splitlines()) >= 3 and stream.strip()
    assert "name='get_weather'" in weather and "Paris" in weather and "18 degrees" in weather
