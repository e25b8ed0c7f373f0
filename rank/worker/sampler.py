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
import torch.nn.functional as F
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
_MOST_COUNTED = (1 << 15) - 1  # int16's largest: a token that came oftener counts as often as this


class Logprobs(NamedTuple):
    """The model's own log-probabilities, before bias, penalties and temperature, of R rows of a batch."""

    rows: list[int]  # [R] places in the batch
    counts: list[int]  # [R] how many of the likeliest tokens each requests
    chosen: Tensor  # [R] f32, of the sampled ids
    values: Tensor  # [R, most] f32, best first
    ids: Tensor  # [R, most] int64


class _Before(NamedTuple):
    """A row's state before one of the several tokens that a step has sampled of it, and that token."""

    output: int  # the token's place among the row's
    window: Tensor | None
    progress: tuple[Tensor, Tensor, Tensor] | None  # of TokenLimits
    id: Tensor  # [1] int64


class Sampled(NamedTuple):
    """One token for each of S rows."""

    ids: Tensor  # [S] int64
    logprobs: Logprobs | None  # None: no row requests any
    failed: list[int]  # places of rows for which memory ran out; their ids mean nothing

    @staticmethod
    def joined(parts: list[Sampled]) -> Sampled:
        """The rows of all parts, one part behind the other."""
        starts = np.cumsum([0, *(len(part.ids) for part in parts)]).tolist()
        with_logprobs = [(start, part.logprobs) for start, part in zip(starts, parts, strict=False) if part.logprobs]
        logprobs = None
        if with_logprobs:
            most = max(found.values.shape[1] for _, found in with_logprobs)
            pads = [(0, most - found.values.shape[1]) for _, found in with_logprobs]
            logprobs = Logprobs(
                [start + row for start, found in with_logprobs for row in found.rows],
                [count for _, found in with_logprobs for count in found.counts],
                torch.cat([found.chosen for _, found in with_logprobs]),
                torch.cat([F.pad(found.values, pad) for (_, found), pad in zip(with_logprobs, pads, strict=True)]),
                torch.cat([F.pad(found.ids, pad) for (_, found), pad in zip(with_logprobs, pads, strict=True)]),
            )
        failed = [start + i for start, part in zip(starts, parts, strict=False) for i in part.failed]
        return Sampled(torch.cat([part.ids for part in parts]), logprobs, failed)

    def moved(self, places: np.ndarray) -> Sampled:
        """Row i at place places[i], a permutation."""
        ids = torch.empty_like(self.ids)
        ids[torch.from_numpy(places).to(ids.device)] = self.ids
        logprobs = self.logprobs and self.logprobs._replace(rows=places[self.logprobs.rows].tolist())
        return Sampled(ids, logprobs, places[self.failed].tolist() if self.failed else [])


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

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, samples: bool = True):
        """device: the model's. samples: whether this rank ever samples; where it does not, there are no tables."""
        self.vocab_size = vocab_size
        self.model_device = device
        # Metal has no numbers of 64 bits with a fraction, which noise needs. The logits' memory is the host's there.
        self.device = device = torch.device("cpu") if device.type == "mps" else device
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
        self._penalised = np.zeros(max_num_seqs, bool)
        self._windows: dict[int, Tensor] = {}  # by row: the newest tokens [n] int64, where only these are penalised
        self._failed: set[int] = set()  # rows that there was no memory for; `sample` reports them
        self._newest: dict[int, list[_Before]] = {}  # by row: of a step that has sampled several tokens of it
        # Both tables exist from the start, so that no request's penalties can run a GPU out of memory later. On a CPU
        # numpy's zeros take no memory before they are written to; torch's do.
        shape = max_num_seqs if samples else 0, vocab_size
        self._counts = torch.from_numpy(np.zeros(shape, np.int16)).to(device)  # occurrences in the row's output
        self._prompts = torch.from_numpy(np.zeros(shape, np.bool_)).to(device)  # whether its prompt has the token

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
        self._penalised[row] = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        if self._penalised[row]:
            self._penalties[row] = s.repetition_penalty, s.frequency_penalty, s.presence_penalty
            try:
                self._count(row, new)
            except torch.OutOfMemoryError:
                self._failed.add(row)

    def _count(self, row: int, new: protocol.NewSequence) -> None:
        """Count the tokens that the row already has."""
        tokens = self._upload(np.frombuffer(new.tokens, np.uint32).astype(np.int64))
        output = tokens[new.prompt_len :]
        found = torch.zeros(self.vocab_size, dtype=torch.int32, device=self.device)
        found.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self._counts[row] = found.clamp_(max=_MOST_COUNTED)
        self._prompts[row] = False
        self._prompts[row, tokens[: new.prompt_len]] = True
        if (n := new.sampling.repeat_last_n) > 0:
            none = tokens.new_full((n,), self.vocab_size)  # before the first token
            self._windows[row] = torch.cat((none, tokens))[-n:]

    def leave(self, row: int) -> None:
        self._windows.pop(row, None)
        self._failed.discard(row)
        self._newest.pop(row, None)

    def sample(self, logits: Tensor, rows: np.ndarray, outputs: np.ndarray, masks: RowMasks | None = None) -> Sampled:
        """Sample S tokens, one or several of each row.

        logits: [S, vocab]; on a GPU they stay as they are, on a CPU they may be overwritten. rows: [S], a row's tokens
        one after the other. outputs: [S], how many tokens the row has sampled before each. Where that is less than
        another step has sampled, the rest were rejected, and what the row remembers of them is taken back; of a step's
        several tokens the first is never rejected. Where a GPU's memory does not suffice for all rows together, they
        are sampled in smaller groups, and a row that has not enough memory alone is reported as failed.
        """
        if self._newest:
            self._take_back(rows, outputs)
        again = rows[1:] == rows[:-1]
        remembers = self._penalised[rows] | self._limits.limited(rows) if again.any() else again
        if not remembers.any():
            return self._sample_or_halve(logits, rows, outputs, masks)
        # The state that one token adds to a row counts for the next: these rows' second tokens come after all first
        # ones.
        starts = np.flatnonzero(np.concatenate(([True], ~again)))
        turn = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
        turn[~remembers] = 0
        turns = [np.flatnonzero(turn == i) for i in range(turn.max() + 1)]
        parts = []
        for some in turns:
            at = self._upload(some)
            mine = np.flatnonzero(remembers[some])
            before = [self._state(int(rows[some[i]])) for i in mine]
            part = self._sample_or_halve(
                logits[at], rows[some], outputs[some], masks.of_rows(at, len(rows)) if masks else None
            )
            for i, state in zip(mine.tolist(), before, strict=True):
                entry = _Before(int(outputs[some[i]]), *state, part.ids[i : i + 1].clone())
                self._newest.setdefault(int(rows[some[i]]), []).append(entry)
            parts.append(part)
        return Sampled.joined(parts).moved(np.concatenate(turns))

    def propose(self, logits: Tensor, rows: np.ndarray, outputs: Tensor) -> Tensor:
        """Tokens [S] that rows would sample of these logits [S, vocab] as their `outputs`-th ones [S]: a guess, for
        which masks and rules of tokens do not count, nor what was sampled since the last step; and nothing is kept."""
        logits = logits.to(torch.float32, copy=True)
        penalised = np.flatnonzero(self._penalised[rows])
        if len(penalised):
            self._penalise(logits, penalised, rows)
        edited = np.flatnonzero(self._edits[rows])
        if len(edited):
            self._edit(logits, edited, rows, np.full(len(rows), np.iinfo(np.int64).max))
        ids, drawn = logits.argmax(-1), np.flatnonzero(self._temperature[rows] > 0)
        if len(drawn):
            at = self._upload(drawn)
            ids[at] = self._draw(logits[at], rows[drawn], outputs[at])
        return ids

    def _state(self, row: int) -> tuple[Tensor | None, tuple[Tensor, Tensor, Tensor] | None]:
        limited = self._limits.limited(np.array([row])).any()
        return self._windows.get(row), self._limits.progress(row) if limited else None

    def _take_back(self, rows: np.ndarray, outputs: np.ndarray) -> None:
        """Forget of these rows the tokens from `outputs` on that the last step has sampled."""
        firsts = dict(zip(rows[::-1].tolist(), outputs[::-1].tolist(), strict=True))
        for row in firsts.keys() & self._newest.keys():
            rejected = [one for one in self._newest.pop(row) if one.output >= firsts[row]]
            if not rejected:
                continue
            if self._penalised[row]:
                ids = torch.cat([one.id for one in rejected])
                self._counts[row].index_add_(0, ids, torch.full_like(ids, -1, dtype=self._counts.dtype))
            if (window := rejected[0].window) is not None:
                self._windows[row] = window
            if (progress := rejected[0].progress) is not None:
                self._limits.resume(row, progress)

    def _sample_or_halve(
        self, logits: Tensor, rows: np.ndarray, outputs: np.ndarray, masks: RowMasks | None
    ) -> Sampled:
        """`sample` of rows that have one token each, or remember nothing."""
        try:
            return self._sample_together(logits, rows, outputs, masks)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if len(rows) == 1:
                return Sampled(torch.zeros(1, dtype=torch.int64, device=self.device), None, [0])
        parts = []
        for start, stop in ((0, len(rows) // 2), (len(rows) // 2, len(rows))):
            at = torch.arange(start, stop, device=self.device)
            some = masks.of_rows(at, len(rows)) if masks else None
            parts.append(self._sample_or_halve(logits[start:stop], rows[start:stop], outputs[start:stop], some))
        return Sampled.joined(parts)

    def _sample_together(
        self, logits: Tensor, rows: np.ndarray, outputs: np.ndarray, masks: RowMasks | None
    ) -> Sampled:
        logits = logits.to(torch.float32, copy=self.device.type == "cuda")  # a group that failed is sampled again
        shown = np.flatnonzero(self._logprobs[rows] >= 0)
        raw = logits[self._upload(shown)] if len(shown) else None
        if masks is not None:
            masks.apply(logits)
        penalised = np.flatnonzero(self._penalised[rows])
        if len(penalised):
            self._penalise(logits, penalised, rows)
        edited = np.flatnonzero(self._edits[rows])
        if len(edited):
            self._edit(logits, edited, rows, outputs)
        limited = self._limits.mask(logits, rows)
        drawn = np.flatnonzero(self._temperature[rows] > 0)
        ids = logits.argmax(-1) if len(drawn) < len(rows) else logits.new_empty(len(rows), dtype=torch.int64)
        if len(drawn):
            at = self._upload(drawn)
            ids[at] = self._draw(
                logits[at] if len(drawn) < len(rows) else logits, rows[drawn], self._upload(outputs[drawn])
            )
        likeliest = self._likeliest(raw, rows[shown]) if raw is not None else None
        # From here on the rows' state changes. A group is sampled again when memory runs out, so whatever takes much
        # of it stands above.
        self._limits.close_thoughts(ids, rows, limited)
        if len(penalised):
            self._count_sampled(ids, rows, penalised)
        logprobs = None
        if likeliest is not None:
            every, values, top, counts = likeliest
            chosen = every.gather(-1, ids[self._upload(shown)][:, None])[:, 0]
            logprobs = Logprobs(shown.tolist(), counts, chosen, values, top)
        return Sampled(ids, logprobs, [i for i, row in enumerate(rows.tolist()) if row in self._failed])

    def _count_sampled(self, ids: Tensor, rows: np.ndarray, penalised: np.ndarray) -> None:
        """Count what was sampled, ids [S], for the rows with penalties."""
        at = self._upload(rows[penalised]), ids[self._upload(penalised)]
        self._counts[at] = self._counts[at].clamp_(max=_MOST_COUNTED - 1) + 1
        for i in penalised.tolist():
            if (window := self._windows.get(int(rows[i]))) is not None:
                self._windows[int(rows[i])] = torch.cat((window[1:], ids[i : i + 1]))

    def _penalise(self, logits: Tensor, at: np.ndarray, rows: np.ndarray) -> None:
        """Penalise logits[at] in place: CTRL's repetition penalty on all tokens of the sequence, OpenAI's frequency and
        presence penalties on its output."""
        index, slots = self._upload(at), self._upload(rows[at])
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

    def _draw(self, logits: Tensor, rows: np.ndarray, positions: Tensor) -> Tensor:
        """Sampled ids [R] from logits [R, vocab], all of positive temperature. positions: [R] int64, of the tokens
        among those that the row samples."""
        seeds = self._column(self._seed, rows)
        x = logits / self._column(self._temperature, rows)[:, None]
        cut = (self._top_k[rows] > 0) | (self._top_p[rows] < 1)
        # min_p's floor is relative to the likeliest token, which top_k and top_p keep. log 0 is -inf: no floor.
        floor = x.amax(-1, keepdim=True) + torch.log(self._column(self._min_p, rows))[:, None]
        ids = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        every = torch.arange(self.vocab_size, device=self.device)[None]
        free = self._upload(np.flatnonzero(~cut))
        # On a CPU one row at a time, so that its noise stays in the CPU's cache.
        for at in free.split(1 if self.device.type == "cpu" else max(1, len(free))):
            noise = gumbel(seeds[at], positions[at], every).add_(x[at])
            ids[at] = noise.masked_fill_(x[at] < floor[at], -math.inf).argmax(-1)
        for group, width in self._groups(x, rows, cut):
            at = self._upload(group)
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
        limit = self._upload(np.where(top_k > 0, top_k, self.vocab_size))[:, None]
        values = values.masked_fill(torch.arange(values.shape[-1], device=self.device)[None] >= limit, -math.inf)
        whole = self._upload(top_k == 0)[:, None]  # top_p counts what top_k has left
        p = (values - torch.where(whole, x.logsumexp(-1, keepdim=True), values.logsumexp(-1, keepdim=True))).exp()
        top_p = self._column(self._top_p, rows)[:, None]
        before = p.cumsum(-1) - p  # the probability of all better ones; the best is always kept
        drop = (before >= top_p) & (top_p < 1)
        drop[:, 0] = False
        return values.masked_fill(drop, -math.inf), ids

    def _likeliest(self, raw: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Log-probabilities of raw logits [R, vocab]: all [R, vocab], those of the tokens that each row requests
        [R, most] with the tokens' ids [R, most], and how many these are."""
        logprobs = raw.log_softmax(-1)
        asked = [self._parameters[row].logprob_token_ids for row in rows]
        counts = [len(listed) or count for listed, count in zip(asked, self._logprobs[rows].tolist(), strict=True)]
        values, indices = logprobs.topk(max(1, *counts), dim=-1)
        for i, listed in enumerate(asked):
            if listed:
                own = torch.tensor(listed, device=self.device)
                indices[i, : len(own)], values[i, : len(own)] = own, logprobs[i, own]
        return logprobs, values, indices, counts

    def _upload(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def _column(self, values: np.ndarray, rows: np.ndarray) -> Tensor:
        """The values of these rows, on the device."""
        return self._upload(values[rows])
