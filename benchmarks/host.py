"""The host's cost of a step outside the model: scheduler, plan, batch, results; no rank, device or model is needed.

    python benchmarks/host.py [--sequences 256] [--arrivals 1] [--steps 200]

Medians in microseconds of the parts of a step, one part after the other: of steps in which all sequences decode, and of
steps that decode while prompts of --arrivals new ones are computed; with and without a prefix cache. Of
the thread that schedules are schedule, encode, output, update and frame; of the step thread the others.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from phalanx.rank import protocol
from phalanx.rank.scheduler.blocks import Blocks
from phalanx.rank.scheduler.scheduler import Scheduler
from phalanx.rank.scheduler.step import ScheduledStep
from phalanx.rank.worker.batch_builder import build_batches
from phalanx.rank.worker.decode_batch import DeviceDecodeBatch
from phalanx.rank.worker.state import BatchState
from phalanx.rank.worker.upload import Upload
from torch import Tensor

VOCAB, LONGEST, BLOCK = 100_000, 8192, 16
PROMPT = 1024  # tokens, at most
WARM = 30  # decode steps that are not counted


class HostUpload(Upload):
    """Gathers what a GPU would be sent, and sends nothing."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._room = np.zeros(1 << 22, np.int32)

    def fill(self, target: Tensor, parts: list[np.ndarray]) -> None:
        np.concatenate([part.reshape(-1) for part in parts], out=self._room[: sum(part.size for part in parts)])


def step_output(ids: Tensor) -> protocol.StepOutput:
    return protocol.StepOutput(protocol.pack_u32(ids.tolist()))


class HostSteps:
    def __init__(self, sequences: int, prefix_cache: bool):
        blocks = Blocks(2 * sequences * (LONGEST // BLOCK), BLOCK, prefix_cache)  # nobody is preempted
        self.scheduler = Scheduler(blocks, 2 * sequences, 8192, LONGEST)
        self.state = BatchState(2 * sequences, LONGEST, BLOCK)
        self.last = torch.zeros(2 * sequences, 1, dtype=torch.int64)
        self.upload = HostUpload()
        self.decode = DeviceDecodeBatch(self.state, self.last, [], sequences, self.upload)
        self.taken: defaultdict[str, list[float]] = defaultdict(list)
        self._random = random.Random(0)
        self._names = 0
        self._before: tuple[ScheduledStep, protocol.StepOutput] | None = None

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        self.taken[name].append((time.perf_counter() - start) * 1e6)
        return result

    def add(self, count: int) -> None:
        for _ in range(count):
            self._names += 1
            length = self._random.randint(64, PROMPT)
            tokens = protocol.pack_u32([self._random.randrange(VOCAB) for _ in range(length)])
            sampling = protocol.SamplingParams(max_tokens=LONGEST - length, temperature=0.0, stop_token_ids=(VOCAB,))
            self.scheduler.add(protocol.Request(str(self._names), tokens, sampling))

    def step(self) -> bool:
        """Whether no prompt is left to compute."""
        planned = self.timed("schedule", self.scheduler.schedule)
        self.timed("encode", protocol.encode_plan, planned.plan)
        scheduled = self.timed("apply", self.state.apply, planned.plan)
        decodes = scheduled.num_decodes == len(scheduled.rows)
        if decodes:
            self.timed("send", self.decode.send, scheduled)
        else:
            self.timed("build", build_batches, self.state, scheduled, self.last, [], self.upload, True)
        ids = torch.randint(0, VOCAB, (len(planned.sampled),))
        output = self.timed("output", step_output, ids)
        if self._before is not None:
            deltas = self.timed("update", self.scheduler.update, *self._before)
            self.timed("frame", protocol.frame, protocol.Deltas(deltas))
        self._before = planned, output
        return decodes and not self.scheduler.waiting

    def run(self, steps: int, arrivals: int) -> dict[str, float]:
        """Medians by part. Of as many sequences as come the oldest end, so that their number stays.

        Raises ValueError where sequences would end of themselves.
        """
        while not self.step():
            pass
        most = LONGEST - max(sequence.length for sequence in self.scheduler.running) - WARM
        if steps > most:
            raise ValueError(f"--steps {steps}: the longest sequence ends after {most}")
        for _ in range(WARM):
            self.step()
        self.taken.clear()
        for _ in range(steps):
            if arrivals:
                self.scheduler.abort([sequence.id for sequence in self.scheduler.running[:arrivals]])
                self.add(arrivals)
            self.step()
        return {name: round(statistics.median(taken), 1) for name, taken in self.taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--arrivals", type=int, default=1, help="prompts beside decoding sequences, in each step")
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for prefix_cache in (True, False):
        for arrivals in (0, asked.arrivals):
            made = HostSteps(asked.sequences, prefix_cache)
            made.add(asked.sequences)
            try:
                parts = made.run(asked.steps, arrivals)
            except ValueError as error:
                parser.error(str(error))
            about = dict(sequences=asked.sequences, arrivals=arrivals, prefix_cache=prefix_cache)
            print(json.dumps(dict(what="host", **about, us=parts)), flush=True)


if __name__ == "__main__":
    main()
