"""What expert deferral costs (rank/model/experts/deferral.py): the loss over text that the model writes itself.

Without deferral, sequences decode as steps of few tokens do, and each token is drawn from the model's distribution.
With it the same tokens are given. The losses are those expected of each next token: the first is the entropy of the
model's distribution, and what the second has more is how far the distribution of steps that defer is from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...comm.broadcast import gather_bytes
from ...comm.mesh import Mesh
from ..model.base import Model
from ..model.cache_spec import Caches
from ..model.experts.few_tokens import CPU_PAIRS
from .batch_builder import build_batches
from .state import BatchState, ScheduledBatch
from .upload import Upload

STEPS = 48  # tokens of each sequence


class Losses(NamedTuple):
    """Nats a token, over so many."""

    whole: float
    deferred: float
    tokens: int

    def __str__(self) -> str:
        more = self.deferred - self.whole
        return (
            f"--expert-deferral: over {self.tokens} tokens that the model wrote, the loss is {self.deferred:.4f} nats "
            f"a token instead of {self.whole:.4f}, so the perplexity {math.exp(more):.3f} times as high, with the "
            "experts that are resident now"
        )


class Room(NamedTuple):
    """For sequences. Nobody uses it yet."""

    caches: Caches
    blocks: int
    block_size: int
    max_num_seqs: int


def told(model: Model, mesh: Mesh, room: Room, device: torch.device, reached: Callable[[int], None]) -> str:
    """What the log says. As `measure`. Calls reached(steps done)."""
    if model.offload is None:  # on all ranks or none
        return "--expert-deferral does nothing: no experts are in host memory"
    losses = measure(model, mesh, room, device, reached)
    model.offload.counters.clear()  # of these steps nobody has asked for
    deferral = model.offload.deferral
    if deferral is not None and not deferral.used:
        return (
            "--expert-deferral does nothing: the CPU serves no steps of few tokens beside this GPU, for want of a C++ "
            "compiler, as CUDA_LAUNCH_BLOCKING is set, or as the model's rows are no multiple of 16 bytes"
        )
    return str(losses)


def measure(
    model: Model, mesh: Mesh, room: Room, device: torch.device, reached: Callable[[int], None] = lambda done: None
) -> Losses:
    """Collective over the mesh's world, in which each replica measures its own: rank 0's is returned everywhere."""
    return _Measuring(model, mesh, room, device).losses(reached)


class _Measuring:
    def __init__(self, model: Model, mesh: Mesh, room: Room, device: torch.device):
        self.model, self.mesh, self.room, self.device = model, mesh, room, device
        experts = max((one.top_k for one in model.offload.layers), default=0) if model.offload else 0
        most = int(mesh.world.all_gather(torch.tensor([experts])).max())
        self.count = max(1, min(2, CPU_PAIRS // max(most, 1), room.blocks, room.max_num_seqs))
        self.steps = min(STEPS, room.blocks // self.count * room.block_size, model.max_model_len)
        self.upload = Upload(device)
        self.replica = mesh.tensor.size * mesh.pipe.size  # ranks, of which the first samples
        self.samples = mesh.world.rank % self.replica == 0
        self.random = torch.Generator().manual_seed(0)
        self.whole: list[Tensor] = []  # without deferral, of each step: log-probabilities [count, vocab]

    @torch.no_grad()
    def losses(self, reached: Callable[[int], None]) -> Losses:
        assert self.model.offload is not None and self.model.offload.deferral is not None
        deferral = self.model.offload.deferral
        tokens = np.zeros((self.count, self.steps + 1), np.int64)
        tokens[:, 0] = self.model.vocab_size // 3 * (1 + np.arange(self.count))
        found: list[float] = []
        try:
            for deferral.allowed in (False, True):
                state = BatchState(self.count, self.steps, self.room.block_size)
                state.table[:] = np.arange(state.table.size).reshape(state.table.shape)
                loss = 0.0
                for at in range(self.steps):
                    loss += self._step(state, tokens, at, not deferral.allowed)
                    reached(len(found) * self.steps + at + 1)
                found.append(loss)
        finally:
            deferral.allowed = True
        whole, deferred = self.mesh.world.all_gather(torch.tensor(found, dtype=torch.float64))[0].tolist()
        number = self.count * self.steps
        return Losses(whole / number, deferred / number, number)

    def _step(self, state: BatchState, tokens: np.ndarray, at: int, draws: bool) -> float:
        """The expected loss of the tokens behind `at`, where this rank samples. draws: the tokens are drawn, too."""
        state.tokens, state.known[:] = list(tokens[:, : at + 1]), at + 1
        rows, ones = np.arange(self.count), np.ones(self.count, np.int64)
        work = ScheduledBatch(rows, ones * at, ones, ones.astype(bool), ones * at)
        logits = self._logits(work, state)
        drawn = b""
        loss = 0.0
        if self.samples:
            assert logits is not None
            logprobs = logits.float().log_softmax(-1).cpu()
            if draws:
                self.whole.append(logprobs)
                drawn = torch.multinomial(logprobs.exp(), 1, generator=self.random)[:, 0].numpy().tobytes()
            loss = -float((self.whole[at].exp() * logprobs).sum())
        if draws:
            first = self.mesh.world.rank // self.replica * self.replica
            tokens[:, at + 1] = np.frombuffer(gather_bytes(self.mesh.world, drawn)[first], np.int64)
        return loss

    def _logits(self, work: ScheduledBatch, state: BatchState) -> Tensor | None:
        """[count, vocab] on the ranks of the last stage."""
        last = torch.zeros(self.count, dtype=torch.int64, device=self.device)
        batches, _ = build_batches(state, work, last, self.room.caches, self.upload)
        pipe, hidden = self.mesh.pipe, None
        if not self.mesh.first:
            hidden = torch.empty(self.count, self.model.hidden_size, dtype=self.model.dtype, device=self.device)
            pipe.recv(hidden, pipe.rank - 1)
        hidden = self.model.forward(batches, hidden)
        if not self.mesh.last:
            pipe.send(hidden, pipe.rank + 1)
            return None
        shards = self.mesh.tensor.all_gather(self.model.logits(hidden).contiguous())  # [tp, count, vocab / tp]
        return shards.permute(1, 0, 2).reshape(self.count, -1)[:, : self.model.vocab_size]
