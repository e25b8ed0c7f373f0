"""Rules of single sequences: the only tokens allowed, words that are never generated, and how long thoughts may be.

What was sampled is known on the device only while the next step is prepared, so the rules are kept and looked at there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import protocol

NOTHING = -1  # a token before the output's first


def limits_tokens(s: protocol.SamplingParams) -> bool:
    return bool(s.allowed_token_ids or s.bad_words) or s.thinking_budget >= 0


@dataclass(slots=True)
class _Row:
    allowed: Tensor | None  # [A] int64
    bad_tokens: Tensor  # [B] int64: words of one token
    bad_words: list[tuple[Tensor, int]]  # of others all tokens but the last, and that
    recent: Tensor  # [longest word - 1] int64, the newest tokens of the output
    budget: int  # -1: none
    open: int
    close: int
    inside: Tensor  # [] bool: within thoughts
    spent: Tensor  # [] int64: tokens of thoughts so far


class TokenLimits:
    """One rank's. Costs nothing for rows without such rules."""

    def __init__(self, max_num_seqs: int, device: torch.device):
        self._device = device
        self._limited = np.zeros(max_num_seqs, bool)
        self._rows: dict[int, _Row] = {}

    def enter(self, new: protocol.NewSequence) -> None:
        s = new.sampling
        self._limited[new.row] = limits_tokens(s)
        self._rows.pop(new.row, None)
        if not self._limited[new.row]:
            return
        output = np.frombuffer(new.tokens, np.uint32)[new.prompt_len :].tolist()
        words = [word for word in s.bad_words if len(word) > 1]
        size = max((len(word) - 1 for word in words), default=0)
        inside, spent = _thoughts(s, output)
        self._rows[new.row] = _Row(
            self._ids(s.allowed_token_ids) if s.allowed_token_ids else None,
            self._ids(word[0] for word in s.bad_words if len(word) == 1),
            [(self._ids(word[:-1]), word[-1]) for word in words],
            self._ids(([NOTHING] * size + output)[-size:] if size else ()),
            s.thinking_budget,
            *s.thinking_tokens,
            torch.tensor(inside, device=self._device),
            torch.tensor(spent, device=self._device),
        )

    def _ids(self, tokens) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=self._device)

    def limited(self, rows: np.ndarray) -> np.ndarray:
        """Whether each of these rows has rules, bool."""
        return self._limited[rows]

    def progress(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """How far a row with rules has come: what its rules remember of sampled tokens. For `resume`."""
        one = self._rows[row]
        return one.recent, one.inside, one.spent

    def resume(self, row: int, progress: tuple[Tensor, Tensor, Tensor]) -> None:
        one = self._rows[row]
        one.recent, one.inside, one.spent = progress

    def mask(self, logits: Tensor, rows: np.ndarray) -> list[int]:
        """Forbid tokens in place, in logits [S, vocab] of these rows [S]. Returns the places of rows with rules."""
        limited = np.flatnonzero(self._limited[rows]).tolist()
        for i in limited:
            row, x = self._rows[rows[i]], logits[i]
            if row.allowed is not None:
                kept = x[row.allowed]
                x.fill_(-math.inf)[row.allowed] = kept
            x[row.bad_tokens] = -math.inf
            for begun, last in row.bad_words:
                said = (row.recent[len(row.recent) - len(begun) :] == begun).all()
                x[last : last + 1].masked_fill_(said, -math.inf)
        return limited

    def close_thoughts(self, ids: Tensor, rows: np.ndarray, limited: list[int]) -> None:
        """Close thoughts that have spent their budget, in place in what was sampled, ids [S]; and remember that."""
        for i in limited:
            row = self._rows[rows[i]]
            if row.budget >= 0:
                over = row.inside & (row.spent >= row.budget)
                ids[i] = torch.where(over, row.close, ids[i])
                opened = ids[i] == row.open
                row.inside = (row.inside | opened) & (ids[i] != row.close)
                row.spent = row.spent + (row.inside & ~opened)
            if len(row.recent):
                row.recent = torch.cat((row.recent[1:], ids[i : i + 1]))


def _thoughts(s: protocol.SamplingParams, output: list[int]) -> tuple[bool, int]:
    """Whether the output ends within thoughts, and how many tokens they have."""
    opens, closes = s.thinking_tokens
    inside, spent = s.thinking, 0
    for token in output:
        inside = (inside or token == opens) and token != closes
        spent += inside and token != opens
    return inside, spent
