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


class Chunk(NamedTuple):
    """The tokens of one sequence that a step computes."""

    sequence: Sequence
    tokens: int  # how many
    samples: bool  # they include the sequence's last token, so the step samples the next one


@dataclass(slots=True)
class PlannedStep:
    """A plan while it is being written."""

    chunks: list[Chunk] = field(default_factory=list)
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
        chunks = sorted(self.chunks, key=lambda chunk: chunk.tokens > 1)  # decodes first; the sort is stable
        plan = protocol.Plan(
            step=step,
            rows=protocol.pack_u16([chunk.sequence.row for chunk in chunks]),
            counts=protocol.pack_u32([chunk.tokens for chunk in chunks if chunk.tokens > 1]),
            new=self.new,
            freed=protocol.pack_u16(freed_rows),
            block_rows=protocol.pack_u16(self.block_rows),
            block_ids=protocol.pack_u32(self.block_ids),
            swap_out=swap_out,
            swap_in=swap_in,
            state_loads=state_loads,
            state_saves=state_saves,
        )
        sampled = [chunk.sequence for chunk in chunks if chunk.samples]
        # A sequence's length counts the token that this step samples.
        constrained = [Constrained(one, one.length - 1) for one in sampled if one.grammar is not None]
        return ScheduledStep(plan, sampled, constrained)
