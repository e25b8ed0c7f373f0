"""benchmarks/compare.py with engines that only print: both get the same flags, fresh caches, and a table comes out."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from phalanx.benchmarks import compare

from .. import retries

pytestmark = retries.CLOCKS

FAKE = """
import json, os, sys
flags = dict(one[2:].split("=") for one in sys.argv[1:] if "=" in one)
assert all(os.listdir(os.environ[name]) == [] for name in {caches})
open(os.path.join(os.environ["TMPDIR"], "kernel"), "w").close()
print("INFO something else"); print("{{not json")
about = dict(engine={engine!r}, config=flags["config"], tp=int(flags["tp"]))
def say(**line): print(json.dumps(about | line), flush=True)
say(what="start", seconds={start}, path=os.environ.get("PYTHONPATH", ""), flags=sys.argv[1:])
for batch in flags["batches"].split(","):
    say(what="decode", batch=int(batch), prompt=128, ms_per_token={ms} * int(batch))
say(what="prefill", batch=16, prompt=1024, median_s=0.5)
{end}
"""


def fake(path: Path, engine: str, start: float, ms: float, end: str = "") -> str:
    path.write_text(FAKE.format(engine=engine, start=start, ms=ms, end=end, caches=compare.CACHES))
    return str(path)


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, compare.__file__, *words], capture_output=True, text=True, timeout=150)


def cells(table: str, name: str) -> list[str]:
    """The cells of a row behind its name."""
    (row,) = [line.partition(f"| {name} | ")[2] for line in table.splitlines() if f"| {name} |" in line]
    return row.removesuffix(" |").split(" | ")


def test_both_engines_by_turns(tmp_path):
    out = tmp_path / "lines.jsonl"
    ours, peer = fake(tmp_path / "a.py", "phalanx", 10, 4.0), fake(tmp_path / "b.py", "vllm", 20, 4.2)
    words = ["--ours", ours, "--peer", peer, "--peer-path", "/some/site", "--config", "tiny", "--tp", "2"]
    done = run(*words, "--batches", "1,64", "--out", str(out), "--peer-args", "--gpu-mem 0.9")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["engine"], line["repeat"]) for line in lines if line["what"] == "start"] == [
        ("phalanx", 0), ("vllm", 0), ("phalanx", 1), ("vllm", 1)
    ]  # fmt: skip
    assert len(lines) == 16 and all(line["date"] and line["device"] for line in lines)
    first, second = lines[0], lines[4]
    assert second["path"] == "/some/site" != first["path"]
    assert first["flags"] == ["--config=tiny", "--tp=2", "--parts=abc", "--batches=1,64", "--reps=3"]
    assert second["flags"] == [*first["flags"], "--gpu-mem", "0.9"]
    assert "INFO something else" in done.stderr and "{not json" in done.stderr
    want = (
        "| tiny, 2 | start | 10 s | 20 s | 2.000 | 1.1 met | 2/2 |\n"
        "| tiny, 2 | decode 1 | 4 ms | 4.2 ms | 1.050 | 1.1 MISSED | 2/2 |\n"
        "| tiny, 2 | decode 64 | 256 ms | 268.8 ms | 1.050 | 1.1 MISSED | 2/2 |\n"
        "| tiny, 2 | prefill 16x1024 | 0.5 s | 0.5 s | 1.000 | 0.97 met | 2/2 |\n"
    )
    assert done.stdout.endswith(want)
    assert run("--table", str(out)).stdout.endswith(want)


def test_what_an_engine_that_fails_or_hangs_has_said_is_kept(tmp_path):
    out = tmp_path / "lines.jsonl"
    ours = fake(tmp_path / "a.py", "phalanx", 10, 4.0, end="sys.exit(7)")
    peer = fake(tmp_path / "b.py", "vllm", 20, 4.2, end="import time; sys.stdout.flush(); time.sleep(100)")
    done = run("--ours", ours, "--peer", peer, "--repeats", "1", "--timeout", "3", "--out", str(out))
    assert done.returncode == 1
    assert "compare.py: phalanx" in done.stderr
    assert "compare.py: peer" in done.stderr
    assert len(out.read_text().splitlines()) == 12
    assert cells(done.stdout, "decode 16")[:2] == ["64 ms", "67.2 ms"]


def test_one_engine_alone_and_wrong_words(tmp_path):
    ours = fake(tmp_path / "a.py", "phalanx", 10, 4.0)
    done = run("--ours", ours, "--engines", "phalanx", "--repeats", "1", "--out", str(tmp_path / "lines.jsonl"))
    assert done.returncode == 0
    assert cells(done.stdout, "start") == ["10 s", "-", "-", "-", "1/0"]
    assert "--engines phalanx runs without" in run("--out", "x").stderr
    assert "neither phalanx nor peer" in run("--out", "x", "--peer", "y", "--engines", "vllm").stderr


REAL = """
import os, runpy
os.environ["TMPDIR"] = {kernels!r}
runpy.run_path({offline!r}, run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_offline_takes_the_flags(tmp_path):
    """The real program, on the CPU. It finds the C++ kernels compiled, which takes two cores half a minute."""
    ours = tmp_path / "ours.py"
    ours.write_text(REAL.format(kernels=tempfile.gettempdir(), offline=str(compare.OURS)))
    words = "--engines phalanx --repeats 1 --config tiny --parts a --batches 1 --reps 1".split()
    more = "--device cpu --dtype f32 --max-model-len 512 --max-num-seqs 4"
    done = run("--ours", str(ours), *words, "--our-args", more, "--out", str(tmp_path / "lines.jsonl"))
    assert done.returncode == 0, done.stderr
    assert "| decode 1 |" in done.stdout
    assert "| start |" in done.stdout
