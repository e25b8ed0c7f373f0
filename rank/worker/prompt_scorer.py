"""Log-probabilities of prompts: what the model thought of each token that it was given."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...comm.base import Comm
from .. import protocol
from ..model.base import Model
from .state import BatchState, ScheduledBatch
from .upload import to_host

CHUNK = 32  # rows of logits at a time: 16 MB of a vocabulary of 128k in f32


class PromptLogprobs(NamedTuple):
    """Log-probabilities of P tokens of a prompt. The first token has none, as nothing precedes it."""

    ids: Tensor  # [P] int64
    chosen: Tensor  # [P] f32, the log-probability of each
    values: Tensor  # [P, most] f32, the likeliest tokens', best first
    top: Tensor  # [P, most] int64

    def listed(self) -> list[protocol.TokenLogprob]:
        """Log-probabilities as the scheduler takes them. Waits for nothing: copies from a GPU have to be complete."""
        parts = (self.ids.tolist(), self.chosen.tolist(), self.values.tolist(), self.top.tolist())
        return [
            protocol.TokenLogprob(token, chosen, list(zip(top, values, strict=True)))
            for token, chosen, values, top in zip(*parts, strict=True)
        ]


class PromptScorer:
    """Keeps the rows whose prompts are scored, until their prompts are computed.

    Every rank of the last pipeline stage computes logits; the first of its tensor group keeps what comes of them.
    """

    def __init__(self, model: Model, state: BatchState, tensor: Comm, keeps: bool):
        self._model = model
        self._state = state
        self._tensor = tensor
        self._keeps = keeps
        self._parts: dict[int, list[PromptLogprobs]] = {}  # by row, in host memory: a long prompt's are large
        self._most: dict[int, int] = {}

    def enter(self, new: protocol.NewSequence) -> None:
        self.leave(new.row)
        # A sequence that has output already was preempted, and its prompt was scored before.
        if new.sampling.prompt_logprobs >= 0 and len(new.tokens) == 4 * new.prompt_len:
            self._parts[new.row] = []
            self._most[new.row] = new.sampling.prompt_logprobs

    def leave(self, row: int) -> None:
        self._parts.pop(row, None)

    @property
    def empty(self) -> bool:
        return not self._parts

    def score(self, hidden: Tensor, scheduled: ScheduledBatch) -> dict[int, list[PromptLogprobs]]:
        """Score what a step has computed, hidden [T, hidden]. Returns what belongs to the prompts that it completes, by
        their index among the sampled rows: in host memory, once the stream's work so far is done."""
        found = {}
        for row, start, count, first, sampled in scheduled.spans():
            if row not in self._parts:
                continue
            following = self._state.tokens[row][start + 1 : start + count + 1]
            states = hidden[first : first + len(following)]
            chunks = [
                self._score_chunk(row, states[at : at + CHUNK], following[at : at + CHUNK])
                for at in range(0, len(following), CHUNK)
            ]
            if self._keeps and chunks:
                columns = zip(*chunks, strict=True)
                self._parts[row].append(PromptLogprobs(*(to_host(torch.cat(column)) for column in columns)))
            if sampled >= 0:
                parts = self._parts.pop(row)
                if parts:
                    found[sampled] = parts
        return found

    def _score_chunk(self, row: int, states: Tensor, following: np.ndarray) -> tuple[Tensor, ...]:
        """The fields of PromptLogprobs for these tokens, on the device; nothing on a rank that keeps none."""
        shards = self._tensor.all_gather(self._model.logits(states).contiguous())  # [tp, S, vocab / tp]
        if not self._keeps:
            return ()
        logits = shards.permute(1, 0, 2).reshape(len(following), -1)[:, : self._model.vocab_size]
        logprobs = logits.float().log_softmax(-1)
        ids = torch.from_numpy(following).to(states.device, non_blocking=True)
        best = logprobs.topk(self._most[row], dim=-1)
        return ids, logprobs.gather(-1, ids[:, None])[:, 0], best.values, best.indices
