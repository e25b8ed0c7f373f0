"""A step from its first chunk to its plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .. import protocol
from .sequence import Sequence


@dataclass(slots=True)
class ScheduledStep:
    """A plan, and what the scheduler needs to read its output."""

    plan: protocol.Plan
    sampled: list[Sequence]  # in the order of the output's lists of tokens
    constrained: list[Constrained]  # of these, in the same order

    @property
    def masks_ready(self) -> bool:
        """Whether all tokens are known on which the masks of constrained sequences depend."""
        return all(one.sequence.finished or len(one.sequence.tokens) >= one.length for one in self.constrained)


class Constrained(NamedTuple):
    """A sequence with a grammar, in a step that samples it."""

    sequence: Sequence
    length: int  # the tokens before the one that the step samples


@dataclass(slots=True)
class PlannedStep:
    """A plan while it is being written."""

    decodes: list[Sequence] = field(default_factory=list)  # one token each, which may be a prompt's last
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # more tokens of a prompt, and how many
    new: list[protocol.NewSequence] = field(default_factory=list)
    block_rows: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)  # blocks that this step fills and enters into the prefix cache

    def finished(
        self,
        step: int,
        freed_rows: list[int],
        swap_out: bytes = b"",
        swap_in: bytes = b"",
        state_loads: bytes = b"",
        state_saves: bytes = b"",
    ) -> ScheduledStep:
        """The step's plan, with its number, the rows that were freed since the last one, and copies of blocks and of
        states, as protocol.Plan has them."""
        sequences = [*self.decodes, *(sequence for sequence, _ in self.chunks)]
        plan = protocol.Plan(
            step=step,
            rows=protocol.pack_u16([sequence.row for sequence in sequences]),
            counts=protocol.pack_u32([tokens for _, tokens in self.chunks]),
            new=self.new,
            freed=protocol.pack_u16(freed_rows),
            block_rows=protocol.pack_u16(self.block_rows),
            block_ids=protocol.pack_u32(self.block_ids),
            swap_out=swap_out,
            swap_in=swap_in,
            state_loads=state_loads,
            state_saves=state_saves,
        )
        sampled = [sequence for sequence in sequences if sequence.sampled_at == step]
        # A sequence's length counts the token that this step samples.
        constrained = [Constrained(one, one.length - 1) for one in sampled if one.grammar is not None]
        return ScheduledStep(plan, sampled, constrained)
