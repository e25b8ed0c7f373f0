"""The engine without text and HTTP: ms per decode step, prefill tokens/s, and what the host does meanwhile.

    python benchmarks/step.py DIR --np 2
    python benchmarks/step.py --shape llama-99m --np 2 --batches 1,16

Ranks, model and scheduler are the server's; only the requests are made here. Weights of a --shape are random. The
table's host columns are rank 0's main thread (schedule, encode, broadcast) and its step thread (build: of the batch;
launch: from the batch to the sampled ids, which on a CPU is the computation itself), ms per step, medians. `--json`
appends raw lines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from phalanx.benchmarks.shapes import LLAMAS
from phalanx.launcher.job import binding, mpi_env, mpirun, rank_bootstrap
from phalanx.rank import __main__ as program
from phalanx.rank import protocol
from phalanx.rank.model.base import Model
from phalanx.rank.options import JOB_ENV, Job, Options, decode_job, encode_job
from phalanx.rank.scheduler.replica import Replica
from phalanx.rank.worker import model_runner as runner_module
from phalanx.rank.worker.executor import LocalExecutor

ASK = "PHALANX_BENCH_STEP"  # what to measure, as JSON, for the ranks
PARTS = ("schedule", "encode", "broadcast", "build", "launch")
PROMPT_RUNS = 3  # of each kind of prompt, of which the fastest counts


class Ask(msgspec.Struct):
    batches: list[int]
    prompt: int  # tokens before the measured decode steps
    steps: int
    prefill: list[tuple[int, int]]  # (sequences, tokens each)
    warm: int = 0  # decode steps of each batch before those that are measured


class Clock:
    """Seconds that some calls took, by name; calls are wrapped where they are looked up."""

    def __init__(self) -> None:
        self.taken: defaultdict[str, list[float]] = defaultdict(list)

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.taken[name].append(time.perf_counter() - start)

        setattr(owner, attribute, timed)

    def medians(self, count: int) -> dict[str, float]:
        """Median ms of each part over the last `count` steps; 0 for what most of them did without, as steps that are
        replayed do without build."""
        last = {name: self.taken[name][-count:] for name in PARTS}
        found = {name: statistics.median(part) * 1e3 if len(part) == count else 0.0 for name, part in last.items()}
        found["launch"] -= found["build"]  # which is timed inside it
        return found


class BenchRank(program.Rank):
    """A rank whose scheduler makes its own requests."""

    bench: type[Bench]

    def connect(self) -> None: ...

    def run_scheduler(self, replicas: list[Replica], model: Model) -> int:
        ask = msgspec.json.decode(os.environ[ASK], type=Ask)
        (replica,) = replicas
        executor = replica.executor
        assert isinstance(executor, LocalExecutor)
        clock = Clock()
        clock.wrap(replica.scheduler, "schedule", "schedule")
        clock.wrap(protocol, "encode_plan", "encode")
        clock.wrap(executor.control, "publish", "broadcast")
        clock.wrap(runner_module, "build_batches", "build")
        clock.wrap(executor.runner, "_execute", "launch")
        bench = self.bench(replica, model.vocab_size, clock)
        bench.run(ask.prefill[0][0], min(64, ask.prefill[0][1]), 4)  # first-call costs
        cuda = executor.runner.device.type == "cuda"
        device = torch.cuda.get_device_name(executor.runner.device) if cuda else platform.processor() or "cpu"
        for sequences, tokens in ask.prefill:
            seconds = min(bench.run(sequences, tokens, 1) for _ in range(PROMPT_RUNS))
            say(
                what="prefill",
                device=device,
                batch=sequences,
                prompt=tokens,
                tokens_per_s=round(sequences * tokens / seconds, 1),
            )
        for batch in ask.batches:
            if batch <= self.options.max_num_seqs:
                if ask.warm:
                    bench.run(batch, ask.prompt, ask.warm)
                say(device=device, **bench.decode(batch, ask.prompt, ask.steps))
        executor.start(protocol.Plan(step=-1, stop=0))
        return 0


class Bench:
    def __init__(self, replica: Replica, vocab_size: int, clock: Clock):
        self.replica, self.scheduler, self.vocab_size, self.clock = replica, replica.scheduler, vocab_size, clock
        self._random = random.Random(0)
        self._names = 0
        self.rest: Callable[[], object] = lambda: None  # called while no step is in flight: masks are awaited

    def add(self, sequences: int, tokens: int, new: int) -> None:
        for _ in range(sequences):
            self._names += 1
            ids = protocol.pack_u32([self._random.randrange(self.vocab_size) for _ in range(tokens)])
            self.scheduler.add(
                protocol.Request(str(self._names), ids, protocol.SamplingParams(max_tokens=new, temperature=0.0))
            )

    def steps(self) -> list[float]:
        """Run all that was added, one step ahead as the server does; the times at which steps ended."""
        began = time.perf_counter()
        return [began, *(end for end, _ in self.each_step())]

    def each_step(self) -> Iterator[tuple[float, list[protocol.Delta]]]:
        """`steps` one by one: when each ended, and what it added to the sequences."""
        while not self.replica.idle:
            if not self.replica.plan():
                if not self.replica.busy:
                    self.rest()
                    continue
                self.replica.wait_with_progress()
                deltas = self.replica.finish()
                yield time.perf_counter(), deltas

    def run(self, sequences: int, tokens: int, new: int) -> float:
        self.add(sequences, tokens, new)
        ends = self.steps()
        return ends[-1] - ends[0]

    def decode(self, batch: int, prompt: int, steps: int) -> dict[str, Any]:
        """The steps after the prompts, when all sequences decode."""
        self.clock.taken.clear()
        self.add(batch, prompt, steps + 3)
        before = self.scheduler.counters.steps
        ends = self.steps()
        count = min(steps * min(self.scheduler.stages, batch), self.scheduler.counters.steps - before - 1)
        times = [(b - a) * 1e3 for a, b in zip(ends[-count - 1 : -1], ends[-count:], strict=True)]
        parts = {f"{name}_ms": round(ms, 4) for name, ms in self.clock.medians(count).items()}
        ms = statistics.median(times) * min(self.scheduler.stages, batch)  # stages compute a part of the batch each
        return dict(what="decode", batch=batch, prompt=prompt, ms_per_step=round(ms, 3),
                    tokens_per_s=round(batch / ms * 1e3, 1), **parts)  # fmt: skip


BenchRank.bench = Bench


def say(**line: Any) -> None:
    print("RESULT " + json.dumps(line), flush=True)


def run_ranks(
    options: Options, ask: msgspec.Struct, script: str, stdout: int | None
) -> subprocess.CompletedProcess[str]:
    """ask: for them, in ASK. script: what a rank runs, with --rank."""
    job = Job(options=options, announced_size=1 if options.multithread else options.ranks)
    environ = dict(os.environ) | {JOB_ENV: encode_job(job), ASK: msgspec.json.encode(ask).decode()}
    command = [sys.executable, str(Path(script).resolve()), "--rank"]
    if job.announced_size > 1:
        mpi = mpirun.find(os.environ)
        environ |= mpirun.environment(mpi, options.ranks, os.environ)
        command = mpirun.command(mpi, options.ranks, command)
    return subprocess.run(command, env=environ, stdout=stdout, text=True)


def start(options: Options, ask: msgspec.Struct, script: str = __file__) -> list[dict[str, Any]]:
    """Run the ranks; the lines that rank 0 printed."""
    done = run_ranks(options, ask, script, subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"step.py: the ranks ended with exit code {done.returncode}")
    return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]


def table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        if line["what"] == "prefill":
            rows.append(f"prefill {line['batch']:>3} x {line['prompt']:<6} {line['tokens_per_s']:>12,.1f} tokens/s")
    rows.append(f"\n{'batch':>6} {'ms/step':>9} {'tokens/s':>10}   " + " ".join(f"{p:>9}" for p in PARTS) + "   ms")
    for line in lines:
        if line["what"] == "decode":
            parts = " ".join(f"{line[p + '_ms']:>9.3f}" for p in PARTS)
            rows.append(f"{line['batch']:>6} {line['ms_per_step']:>9.3f} {line['tokens_per_s']:>10,.1f}   {parts}")
    return "\n".join(rows)


def pairs(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in (item.split("x") for item in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="checkpoint directory; none: --shape or the built-in one")
    parser.add_argument("--shape", choices=sorted(LLAMAS), help="random weights of this shape")
    parser.add_argument("--np", type=int, default=1, help="ranks")
    parser.add_argument("--tp", type=int, default=0)
    parser.add_argument("--pp", type=int, default=0)
    parser.add_argument("--ep", type=int, default=1, help="ranks of tp that share experts out")
    parser.add_argument("--multithread", action="store_true", help="ranks as threads")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--isq", default="none", help="quantise the weights while loading, as serve does")
    parser.add_argument("--batches", default="1,16,64,256", help="sequences that decode together")
    parser.add_argument("--prompt", type=int, default=128, help="their prompts' tokens")
    parser.add_argument("--steps", type=int, default=32, help="decode steps to take the median of")
    parser.add_argument("--prefill", type=pairs, default=[(1, 1024), (8, 128)], help="SEQUENCESxTOKENS,..")
    parser.add_argument("--json", help="append raw lines to this file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        model = asked.model or str(Path(__file__).resolve().parent.parent / "launcher" / "builtin_model")
        if asked.shape:
            Path(made, "config.json").write_text(json.dumps(LLAMAS[asked.shape]))
            model = made
        batches = [int(b) for b in asked.batches.split(",")]
        options = Options(
            model=model,
            ranks=asked.np,
            tp=asked.tp,
            pp=asked.pp,
            ep=asked.ep,
            multithread=asked.multithread,
            dtype=asked.dtype,
            isq=asked.isq,
            device=asked.device,
            load_format="dummy" if asked.shape else "auto",
            prefix_cache=False,
            speculate="none",  # a step has one token of each
            max_num_seqs=max(batches),
        )
        lines = start(options, Ask(batches, asked.prompt, asked.steps, asked.prefill))
    print(table(lines))
    if asked.json:
        about = {
            "engine": "phalanx",
            "model": asked.shape or asked.model or "built-in",
            **{key: getattr(asked, key) for key in ("np", "tp", "pp", "ep", "dtype", "isq")},
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "date": date.today().isoformat(),
        }
        with open(asked.json, "a") as file:
            file.writelines(json.dumps(about | line) + "\n" for line in lines)


def become_rank(make: type[program.Rank]) -> NoReturn:
    """A rank of a benchmark, on the device and the processors that the launcher would give it."""
    job = decode_job(os.environ[JOB_ENV])
    place = mpi_env.rank_placement(os.environ) or mpi_env.RankPlacement(0, 1, 0, 1, "benchmark")
    gpu = rank_bootstrap.device_index(job.options, place)
    threads = dict(os.environ)
    bound = binding.apply(binding.choose(place, gpu, os.environ), threads)
    if not job.options.multithread:
        torch.set_num_threads(int(threads["OMP_NUM_THREADS"]))  # torch is here already
    job = msgspec.structs.replace(job, device_index=gpu, rank=place.rank, bound=bound)
    os.environ[JOB_ENV] = encode_job(job)
    code = program.main(make)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        become_rank(BenchRank)
    main()
