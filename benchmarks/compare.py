"""Phalanx and a peer one after the other on one machine, same shapes and flags: raw lines, and a table of ratios.

    python benchmarks/compare.py --peer benchmarks/bench_vllm.py --peer-path SITE --config llama3-8b --out FILE.jsonl
    python benchmarks/compare.py --table FILE.jsonl                 the table of lines that are there already

Runs benchmarks/offline.py and the peer's program alternately, --repeats times, with the same --config, --tp, --parts,
--batches and --reps, and appends each JSON line that they print to --out with the machine, its driver, the day and the
run. Every run starts with empty caches of compiled kernels, in a folder of its own. The table has the median over all
runs of a cell, and the ratio peer / Phalanx: above 1, Phalanx is faster. `must` is the least ratio that will do.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OURS = Path(__file__).resolve().parent / "offline.py"
# The subject of a line, the key of its time, and the least ratio that will do.
TIMES = {
    "decode": ("ms_per_token", 1.1),
    "prefill": ("median_s", 0.97),
    "mixed": ("seconds", 1.1),
    "start": ("seconds", 1.1),
}  # noqa: E501
CACHES = (
    "TMPDIR",
    "TRITON_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "XDG_CACHE_HOME",
)
Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="", help="run nothing: the table of this file's lines")
    parser.add_argument("--peer", default="", help="the peer's program: bench_vllm.py, bench_llama_cpp.py or your own")
    parser.add_argument("--peer-path", default="", help="PYTHONPATH for the peer alone")
    parser.add_argument("--peer-args", default="", help="more flags for the peer")
    parser.add_argument("--our-args", default="", help="more flags for offline.py")
    parser.add_argument("--engines", default="phalanx,peer", help="in which order, or which one of them")
    parser.add_argument("--config", default="llama3-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--parts", default="abc")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=580.0, help="seconds for one engine's run")
    parser.add_argument("--out", default="", help="append the raw lines to this file")
    parser.add_argument("--ours", default=str(OURS), help=argparse.SUPPRESS)  # the tests' own
    asked = parser.parse_args()
    if asked.table:
        lines = [json.loads(line) for line in Path(asked.table).read_text().splitlines()]
        print(table(lines))
        return
    engines = asked.engines.split(",")
    if not asked.out or (not asked.peer and "peer" in engines):
        parser.error("--out and --peer are needed; --engines phalanx runs without a peer")
    wrong = [name for name in engines if name not in ("phalanx", "peer")]
    if wrong:
        parser.error(f"--engines {asked.engines}: {wrong[0]!r} is neither phalanx nor peer")
    lines, failed = [], 0
    for repeat in range(asked.repeats):
        for name in engines:
            found, code = run(name, asked, machine() | {"repeat": repeat})
            lines += found
            if code:
                failed = 1
                print(f"compare.py: {name} ended with code {code} in repeat {repeat}", file=sys.stderr, flush=True)
    print(table(lines))
    raise SystemExit(failed)


def run(name: str, asked: argparse.Namespace, about: Line) -> tuple[list[Line], int]:
    """One engine's lines, which are appended to --out as they come, and its exit code; the rest of its words go on."""
    program, more = (asked.ours, asked.our_args) if name == "phalanx" else (asked.peer, asked.peer_args)
    flags = [f"--{key}={getattr(asked, key)}" for key in ("config", "tp", "parts", "batches", "reps")]
    lines: list[Line] = []
    with (
        tempfile.TemporaryDirectory(prefix="compare-", ignore_cleanup_errors=True) as fresh,
        open(asked.out, "a") as out,
    ):
        environ = dict(os.environ)
        for cache in CACHES:
            environ[cache] = os.path.join(fresh, cache.lower())
            os.mkdir(environ[cache])
        if name == "peer" and asked.peer_path:
            environ["PYTHONPATH"] = asked.peer_path
        command = [sys.executable, program, *flags, *shlex.split(more)]
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
        late = threading.Timer(asked.timeout, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        assert process.stdout is not None
        for text in process.stdout:
            line = parse(text)
            if line is None:
                print(text, end="", file=sys.stderr, flush=True)
                continue
            lines.append(about | line)
            out.write(json.dumps(lines[-1]) + "\n")
            out.flush()
            print(json.dumps(line), flush=True)
        code = process.wait()
        late.cancel()
    return lines, code


def parse(text: str) -> Line | None:
    if not text.startswith("{"):
        return None
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if "what" in line and "engine" in line else None


def machine() -> Line:
    """The GPU, its driver and the day."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except OSError:
        said = []
    device, _, driver = said[0].partition(", ") if said else ("no GPU", "", "")
    return {"device": device, "driver": driver, "date": str(datetime.date.today())}


Key = tuple[str, int, str, int, int]  # config, GPUs, what, batch, tokens of a prompt


def times(lines: Iterable[Line]) -> dict[Key, dict[str, list[float]]]:
    """Times of all runs of `phalanx` and of the `peer`, by what was measured."""
    cells: dict[Key, dict[str, list[float]]] = {}
    for line in lines:
        if line["what"] in TIMES:
            key = line["config"], line["tp"], line["what"], line.get("batch", 0), line.get("prompt", 0)
            side = "phalanx" if line["engine"] == "phalanx" else "peer"
            cells.setdefault(key, {}).setdefault(side, []).append(float(line[TIMES[line["what"]][0]]))
    return cells


def table(lines: Iterable[Line]) -> str:
    """Markdown: a row for each thing that both engines were measured at, with medians and their ratio."""
    rows = ["| config, GPUs | what | phalanx | peer | peer / phalanx | must | runs |", "|---|---|---|---|---|---|---|"]
    for (config, tp, what, batch, prompt), sides in times(lines).items():
        name, (unit, must) = what, TIMES[what]
        if what in ("decode", "prefill"):
            name += f" {batch}" if what == "decode" else f" {batch}x{prompt}"
        ours, theirs = (statistics.median(sides[s]) if s in sides else None for s in ("phalanx", "peer"))
        ratio = f"{theirs / ours:.3f}" if ours and theirs else "-"
        verdict = "-" if not ours or not theirs else f"{must:g} {'met' if theirs / ours >= must else 'MISSED'}"
        shown = [f"{v:.4g} {'ms' if unit == 'ms_per_token' else 's'}" if v is not None else "-" for v in (ours, theirs)]
        runs = "/".join(str(len(sides.get(s, []))) for s in ("phalanx", "peer"))
        rows.append(f"| {config}, {tp} | {name} | {shown[0]} | {shown[1]} | {ratio} | {verdict} | {runs} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
