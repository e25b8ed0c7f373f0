"""The server with a model that only takes its time: what server, scheduler and step loop can carry at a GPU's pace.

    python benchmarks/serving/paced.py --p 2999 --step-ms 10
    python benchmarks/serve.py --port 2999 --concurrency 256 --batch 512

One rank of the built-in model's directory; every step takes --step-ms, and as much more as its prompts' tokens need at
--prefill tokens/s, asleep, as a thread that waits for a GPU is. Ids are drawn at random. At the end, by Ctrl-C, it
prints what share of a core each part took for a token from the first step on, and how much later than the pace the
steps came.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import psutil
import torch
from phalanx.launcher import builtin_model
from phalanx.launcher.job import server_process
from phalanx.rank import __main__ as program
from phalanx.rank import protocol
from phalanx.rank.options import Job, Options
from phalanx.rank.worker.batch_builder import build_batches
from phalanx.rank.worker.model_runner import DeviceOutput, ModelRunner


class Pace:
    """Stands in for the forward pass; everything that a step asks of the host is done."""

    def __init__(self, step_ms: float, prefill: float):
        self.seconds, self.prefill = step_ms / 1e3, prefill
        self.tokens = 0
        self.spent: Callable[[], dict[str, float]] = dict  # CPU seconds of each part so far
        self.before: dict[str, float] = {}  # the same before the first step
        self.between: list[float] = []  # seconds from one step's end to the next one's begin
        self._ended = 0.0
        self._random = np.random.default_rng(0)

    def execute(self, runner: ModelRunner, plan: protocol.Plan) -> tuple[DeviceOutput, None]:
        self.before = self.before or self.spent()
        began = time.perf_counter()
        self.between.append(began - self._ended)
        work = runner.state.apply(plan)
        runner._enter(plan)
        build_batches(runner.state, work, runner._last, runner.caches, runner._upload)
        count = int(work.samples.sum())
        ids = torch.from_numpy(self._random.integers(300, 4000, count))
        runner._last[torch.from_numpy(work.sampled_rows), 0] = ids
        self.tokens += count
        prompt = int(work.counts.sum()) - work.num_decodes
        time.sleep(max(0.0, began + self.seconds + prompt / self.prefill - time.perf_counter()))
        self._ended = time.perf_counter()
        return DeviceOutput(ids) if count else DeviceOutput(), None


def seconds(server: psutil.Process) -> dict[str, float]:
    """CPU seconds so far: of the server process, and of this process's threads."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent = {names[t.id]: t.user_time + t.system_time for t in psutil.Process().threads() if t.id in names}
    times = server.cpu_times()
    return {"server": times.user + times.system, "scheduler": spent["MainThread"], "step": spent.get("step", 0.0)}


def report(pace: Pace) -> None:
    spent = {name: value - pace.before.get(name, 0.0) for name, value in pace.spent().items()}
    per = (f"{name} {value / max(1, pace.tokens) * 1e6:.1f}" for name, value in spent.items())
    late = f"{statistics.median(pace.between[1:] or [0.0]) * 1e3:.2f} ms between steps (median)"
    print(f"paced: {pace.tokens} tokens; CPU µs a token: {', '.join(per)}; {late}", flush=True)


def copy_words(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p", "--port", dest="port", type=int, default=2999)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--prefill", type=float, default=45000.0, help="prompt tokens/s")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    asked = parser.parse_args()
    pace = Pace(asked.step_ms, asked.prefill)
    ModelRunner._execute = lambda runner, plan: pace.execute(runner, plan)  # type: ignore[method-assign,assignment]
    directory = server_process.job_directory()
    listener = server_process.listen("127.0.0.1", asked.port)
    options = Options(model=str(builtin_model.DIRECTORY), max_num_seqs=asked.max_num_seqs, max_num_batched_tokens=8192,
                      load_format="dummy", prefix_cache=False, device="cpu")  # fmt: skip
    link = str(Path(directory, "link.sock"))
    process = server_process.start(server_process.config(options, link, listener, []), os.environ)
    pace.spent = functools.partial(seconds, psutil.Process(process.pid))

    def end(*_: object) -> NoReturn:
        report(pace)
        process.terminate()
        process.wait(10)
        server_process.remove(directory)
        os._exit(0)  # in the middle of a step

    signal.signal(signal.SIGINT, end)
    while not Path(link).exists() and process.poll() is None:
        time.sleep(0.05)
    threading.Thread(target=copy_words, args=(process,), daemon=True).start()
    program.run_threads(Job(options=options, announced_size=1, server_socket=link))


if __name__ == "__main__":
    main()
