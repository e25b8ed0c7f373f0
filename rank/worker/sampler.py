"""Samples token ids from logits, vectorised over the batch; each row has its own parameters.

A draw is the argmax of logits plus Gumbel noise (Gumbel-max trick; Maddison et al. 2014). The noise is a hash of
(seed, output position, vocabulary index) alone, so the rest of the batch, the number of ranks and preemptions do not
change it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...comm.base import Comm
from ...kernels.sampling.argmax import argmax, candidates, elect
from .. import protocol
from .token_limits import TokenLimits, limits_tokens
from .token_masks import RowMasks

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the increment of SplitMix64 (Steele et al. 2014)
_MIX1, _MIX2 = -4658895280553007687, -7723592293110705685  # its finaliser's multipliers
_PREFIX = 1024  # the likeliest tokens, which are searched for the nucleus before the whole row is sorted
_GREEDY = 1e-5  # lower temperatures count as 0: dividing by them would overflow


class Logprobs(NamedTuple):
    """The model's own log-probabilities, before bias, penalties and temperature, of R rows of a batch."""

    rows: list[int]  # [R] places in the batch
    counts: list[int]  # [R] how many of the likeliest tokens each requests
    chosen: Tensor  # [R] f32, of the sampled ids
    values: Tensor  # [R, most] f32, best first
    ids: Tensor  # [R, most] int64


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place: int64 in, well-mixed int64 out. The masks make the shifts logical."""
    x.bitwise_xor_((x >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(_MIX1)
    x.bitwise_xor_((x >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(_MIX2)
    return x.bitwise_xor_((x >> 31).bitwise_and_(0x1FFFFFFFF))


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise in f32 for each (row, vocabulary id).

    seeds, positions: [S] int64. ids: [S, C] or [1, C] int64. Returns [S, C].
    """
    keys = _mix_(seeds + (positions + 1) * _GOLDEN)
    bits = _mix_(keys[:, None] + (ids + 1) * _GOLDEN)
    uniform = (bits >> 11).bitwise_and_((1 << 53) - 1).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().float().log_().neg_()


def is_plain_greedy(s: protocol.SamplingParams) -> bool:
    """Whether the token is the argmax of the unchanged logits, and no log-probabilities are requested."""
    edited = s.logit_bias or (s.min_tokens and s.stop_token_ids)
    penalised = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
    if limits_tokens(s):
        return False
    return s.temperature < _GREEDY and s.logprobs < 0 and not edited and not penalised


def tp_argmax(shard: Tensor, tensor: Comm, best: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The argmax [S] int64 of logits that are split by vocabulary, shard [S, width] a rank; the same on all ranks.

    Each rank sends its best value and index of a row, not the row: 2 KB instead of 66 MB for 256 rows of 128k tokens on
    2 ranks. Of equal values the first wins, as in an unsplit row. best: argmax(shard), if it is known.
    """
    best = best or argmax(shard)
    if tensor.size == 1:
        return best[1]
    return elect(tensor.all_gather(candidates(best, tensor.rank * shard.shape[-1])))


class Sampler:
    """Keeps each row's parameters and, for rows with penalties, its token counts. Logits are [S, vocab] f32."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        self.device = device
        self._parameters: list[protocol.SamplingParams] = [protocol.SamplingParams(max_tokens=1)] * max_num_seqs
        # Columns, so that a batch needs no loop over its rows.
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.int64)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._logprobs = np.full(max_num_seqs, -1, np.int64)
        self._edits = np.zeros(max_num_seqs, bool)  # logit bias, or stop tokens that min_tokens forbids for now
        self._penalties = np.zeros((max_num_seqs, 3), np.float32)  # repetition, frequency, presence
        self._limits = TokenLimits(max_num_seqs, device)
        self._slot = np.full(max_num_seqs, -1, np.int64)  # the row's index in the tables below; -1: it has no penalties
        self._free_slots: list[int] = []
        self._windows: dict[int, Tensor] = {}  # by row: the newest tokens [n] int64, where only these are penalised
        self._counts = torch.zeros(0, vocab_size, device=device)  # [slots, vocab] f32: occurrences in the output
        self._prompts = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # [slots, vocab]: in the prompt

    def enter(self, new: protocol.NewSequence) -> None:
        row, s = new.row, new.sampling
        self.leave(row)
        self._parameters[row] = s
        self._temperature[row] = s.temperature if s.temperature >= _GREEDY else 0.0
        self._seed[row] = s.seed
        self._top_k[row] = 0 if s.top_k < 0 else s.top_k
        self._top_p[row] = s.top_p
        self._min_p[row] = s.min_p
        self._logprobs[row] = s.logprobs
        self._limits.enter(new)
        self._edits[row] = bool(s.logit_bias) or bool(s.min_tokens and s.stop_token_ids)
        if s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty:
            self._penalties[row] = s.repetition_penalty, s.frequency_penalty, s.presence_penalty
            self._count(row, new)

    def _count(self, row: int, new: protocol.NewSequence) -> None:
        """Allocate a slot for the row and count the tokens that it already has."""
        if not self._free_slots:
            held = len(self._counts)
            more = max(4, held)
            self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self.vocab_size)])
            self._prompts = torch.cat([self._prompts, self._prompts.new_zeros(more, self.vocab_size)])
            self._free_slots = list(range(held, held + more))
        slot = self._slot[row] = self._free_slots.pop()
        tokens = torch.from_numpy(np.frombuffer(new.tokens, np.uint32).astype(np.int64)).to(
            self.device, non_blocking=True
        )
        output = tokens[new.prompt_len :]
        self._counts[slot] = 0
        self._counts[slot].index_add_(0, output, torch.ones(len(output), device=self.device))
        self._prompts[slot] = False
        self._prompts[slot, tokens[: new.prompt_len]] = True
        if (n := new.sampling.repeat_last_n) > 0:
            none = tokens.new_full((n,), self.vocab_size)  # before the first token
            self._windows[row] = torch.cat((none, tokens))[-n:]

    def leave(self, row: int) -> None:
        if self._slot[row] >= 0:
            self._free_slots.append(int(self._slot[row]))
            self._slot[row] = -1
            self._windows.pop(row, None)

    def sample(
        self, logits: Tensor, rows: np.ndarray, outputs: np.ndarray, masks: RowMasks | None = None
    ) -> tuple[Tensor, Logprobs | None]:
        """Ids [S] int64, and the log-probabilities of the rows that request them. May overwrite logits.

        rows: [S]. outputs: [S], how many tokens each row has sampled before.
        """
        shown = np.flatnonzero(self._logprobs[rows] >= 0)
        raw = logits[torch.from_numpy(shown).to(self.device, non_blocking=True)] if len(shown) else None
        if masks is not None:
            masks.apply(logits)
        penalised = np.flatnonzero(self._slot[rows] >= 0)
        if len(penalised):
            self._penalise(logits, penalised, rows)
        edited = np.flatnonzero(self._edits[rows])
        if len(edited):
            self._edit(logits, edited, rows, outputs)
        limited = self._limits.mask(logits, rows)
        drawn = np.flatnonzero(self._temperature[rows] > 0)
        ids = logits.argmax(-1) if len(drawn) < len(rows) else logits.new_empty(len(rows), dtype=torch.int64)
        if len(drawn):
            at = torch.from_numpy(drawn).to(self.device, non_blocking=True)
            ids[at] = self._draw(logits[at] if len(drawn) < len(rows) else logits, rows[drawn], outputs[drawn])
        self._limits.close_thoughts(ids, rows, limited)
        if len(penalised):
            slots = self._column(self._slot, rows[penalised])
            self._counts[slots, ids[torch.from_numpy(penalised).to(self.device, non_blocking=True)]] += 1
            for i in penalised.tolist():
                if (window := self._windows.get(int(rows[i]))) is not None:
                    self._windows[int(rows[i])] = torch.cat((window[1:], ids[i : i + 1]))
        return ids, self._gather_logprobs(raw, shown, rows, ids)

    def _penalise(self, logits: Tensor, at: np.ndarray, rows: np.ndarray) -> None:
        """Penalise logits[at] in place: CTRL's repetition penalty on all tokens of the sequence, OpenAI's frequency and
        presence penalties on its output."""
        index = torch.from_numpy(at).to(self.device, non_blocking=True)
        slots = self._column(self._slot, rows[at])
        repetition, frequency, presence = self._column(self._penalties, rows[at])[:, :, None].unbind(1)  # [R, 1] each
        x, counts = logits[index], self._counts[slots]
        sampled = counts > 0
        scaled = torch.where(x > 0, x / repetition, x * repetition)
        seen = self._prompts[slots] | sampled
        for i, row in enumerate(rows[at].tolist()):
            if (window := self._windows.get(row)) is not None:
                seen[i] = seen.new_zeros(self.vocab_size + 1).index_fill_(0, window, True)[:-1]
        x = torch.where(seen, scaled, x)
        logits[index] = x - frequency * counts - presence * sampled

    def _edit(self, logits: Tensor, at: np.ndarray, rows: np.ndarray, outputs: np.ndarray) -> None:
        """Add logit biases and forbid stop tokens before min_tokens, in place."""
        bias: list[tuple[int, int, float]] = []
        for i in at.tolist():
            s = self._parameters[rows[i]]
            bias += [(i, token, value) for token, value in s.logit_bias.items()]
            if outputs[i] < s.min_tokens:
                bias += [(i, token, -math.inf) for token in s.stop_token_ids]
        if bias:
            where, token, value = (torch.tensor(column, device=self.device) for column in zip(*bias, strict=True))
            logits.index_put_((where, token), value.to(logits.dtype), accumulate=True)

    def _column(self, values: np.ndarray, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(values[rows]).to(self.device, non_blocking=True)

    def _draw(self, logits: Tensor, rows: np.ndarray, outputs: np.ndarray) -> Tensor:
        """Sampled ids [R] from logits [R, vocab], all of positive temperature."""
        seeds, positions = self._column(self._seed, rows), torch.from_numpy(outputs).to(self.device, non_blocking=True)
        x = logits / self._column(self._temperature, rows)[:, None]
        cut = (self._top_k[rows] > 0) | (self._top_p[rows] < 1)
        # min_p's floor is relative to the likeliest token, which top_k and top_p keep. log 0 is -inf: no floor.
        floor = x.amax(-1, keepdim=True) + torch.log(self._column(self._min_p, rows))[:, None]
        ids = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        every = torch.arange(self.vocab_size, device=self.device)[None]
        free = torch.from_numpy(np.flatnonzero(~cut)).to(self.device, non_blocking=True)
        # On a CPU one row at a time, so that its noise stays in the CPU's cache.
        for at in free.split(1 if self.device.type == "cpu" else max(1, len(free))):
            noise = gumbel(seeds[at], positions[at], every).add_(x[at])
            ids[at] = noise.masked_fill_(x[at] < floor[at], -math.inf).argmax(-1)
        for group, width in self._groups(x, rows, cut):
            at = torch.from_numpy(group).to(self.device, non_blocking=True)
            values, candidates = self._candidates(x[at], rows[group], width)
            noise = gumbel(seeds[at], positions[at], candidates)
            best = (values + noise).masked_fill(values < floor[at], -math.inf).argmax(-1, keepdim=True)
            ids[at] = candidates.gather(-1, best)[:, 0]
        return ids

    def _groups(self, x: Tensor, rows: np.ndarray, cut: np.ndarray) -> list[tuple[np.ndarray, int]]:
        """The rows with top_k or top_p, grouped by how many of the likeliest tokens contain all candidates; 0 is all.

        Whether _PREFIX tokens contain the nucleus is tested on CPUs only: GPUs sort fast, and the test would make the
        host wait for them.
        """
        top_k = self._top_k[rows]
        small = cut & (top_k > 0) & (top_k <= _PREFIX)
        rest = np.flatnonzero(cut & ~small)
        groups = [(np.flatnonzero(small), int(top_k[small].max(initial=0)))]
        if len(rest) and self.device.type == "cpu" and self.vocab_size > _PREFIX:
            part = x[torch.from_numpy(rest)]
            mass = (part.topk(_PREFIX).values - part.logsumexp(-1, keepdim=True)).exp().sum(-1).numpy()
            held = (mass > self._top_p[rows[rest]] + 1e-6) & (top_k[rest] == 0)
            groups.append((rest[held], _PREFIX))
            rest = rest[~held]
        return [(group, width) for group, width in [*groups, (rest, 0)] if len(group)]

    def _candidates(self, x: Tensor, rows: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
        """The logits that top_k and then top_p keep (-inf elsewhere), best first, and their ids; [R, C] each."""
        if width:
            values, ids = x.topk(min(width, self.vocab_size), dim=-1)
        else:
            values, ids = x.sort(dim=-1, descending=True, stable=True)
        top_k = self._top_k[rows]
        limit = torch.from_numpy(np.where(top_k > 0, top_k, self.vocab_size)).to(self.device, non_blocking=True)[
            :, None
        ]
        values = values.masked_fill(torch.arange(values.shape[-1], device=self.device)[None] >= limit, -math.inf)
        whole = torch.from_numpy(top_k == 0).to(self.device, non_blocking=True)[
            :, None
        ]  # top_p counts what top_k has left
        p = (values - torch.where(whole, x.logsumexp(-1, keepdim=True), values.logsumexp(-1, keepdim=True))).exp()
        top_p = self._column(self._top_p, rows)[:, None]
        before = p.cumsum(-1) - p  # the probability of all better ones; the best is always kept
        drop = (before >= top_p) & (top_p < 1)
        drop[:, 0] = False
        return values.masked_fill(drop, -math.inf), ids

    def _gather_logprobs(self, raw: Tensor | None, shown: np.ndarray, rows: np.ndarray, ids: Tensor) -> Logprobs | None:
        if raw is None:
            return None
        logprobs = raw.log_softmax(-1)
        counts = self._logprobs[rows[shown]].tolist()
        at = torch.from_numpy(shown).to(self.device, non_blocking=True)
        asked = [self._parameters[row].logprob_token_ids for row in rows[shown]]
        counts = [len(listed) or count for listed, count in zip(asked, counts, strict=True)]
        values, indices = logprobs.topk(max(1, *counts), dim=-1)
        for i, listed in enumerate(asked):
            if listed:
                own = torch.tensor(listed, device=self.device)
                indices[i, : len(own)], values[i, : len(own)] = own, logprobs[i, own]
        return Logprobs(shown.tolist(), counts, logprobs.gather(-1, ids[at][:, None])[:, 0], values, indices)
