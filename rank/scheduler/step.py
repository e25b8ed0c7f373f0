"""A step from its first chunk to its plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .. import protocol
from .grammar import Grammar
from .sequence import Sequence


@dataclass(slots=True)
class ScheduledStep:
    """A plan, and what the scheduler needs to read its output."""

    plan: protocol.Plan
    sampled: list[Sequence]  # in the order of the output's lists of tokens
    constrained: list[Constrained]  # of these, in the same order
    query_len: int = 1
    drafts: list[list[int]] = field(default_factory=list)  # of the first of these, up to query_len - 1 each
    dropped: list[Sequence] = field(default_factory=list)  # of these, whose tokens count for nothing
    pixels: list[protocol.Pixels] = field(default_factory=list)  # images that the ranks need and do not have

    @property
    def speculative(self) -> bool:
        """Whether only the ranks know how many tokens it adds."""
        return self.query_len > 1 or (self.plan.wanted > 0 and bool(self.sampled))

    @property
    def timed(self) -> bool:
        """Whether its duration tells how long such steps take: all its sequences were known and have as many tokens,
        and a step of one token each has no draft model that runs next to it."""
        plan = self.plan
        decodes = not plan.counts and not plan.new and not plan.tower
        return decodes and (self.query_len > 1 or not (plan.wanted or plan.follows))

    @property
    def masks_due(self) -> bool:
        """Whether all tokens are known on which the masks of constrained sequences depend."""
        return all(self._counts_not(one.sequence) or len(one.sequence.tokens) >= one.length for one in self.constrained)

    @property
    def maskless(self) -> list[Sequence]:
        """Sequences that need a mask and have none yet."""
        return [
            one.sequence
            for one in self.constrained
            if not self._counts_not(one.sequence)
            and one.sequence.grammar is not None
            and not one.sequence.grammar.ready
        ]

    def accepted(self, tokens: list[list[int]], failed: list[int]) -> list[tuple[Grammar, list[int]]]:
        """Each constrained sequence's sampled tokens, which its grammar has to take. tokens: of all that were sampled;
        failed: which of them mean nothing."""
        found = []
        for i, (sequence, mine) in enumerate(zip(self.sampled, tokens, strict=True)):
            if sequence.grammar is None or self._counts_not(sequence) or i in failed:
                continue
            outputs = len(sequence.tokens) - sequence.prompt_len
            ends = (n for n, token in enumerate(mine) if sequence.ends_with(token, outputs + n + 1))
            if taken := mine[: next(ends, len(mine))]:
                found.append((sequence.grammar, taken))
        return found

    def _counts_not(self, sequence: Sequence) -> bool:
        return sequence.finished or sequence in self.dropped


class Constrained(NamedTuple):
    """A sequence with a grammar, in a step that samples it."""

    sequence: Sequence
    length: int  # the tokens before the first one that the step samples
    sampled: int  # tokens that the step samples of it ...
    drafts: list[int]  # ... where these are what it will probably sample


@dataclass(slots=True)
class PlannedStep:
    """A plan while it is being written."""

    stages: int = 1  # of the pipeline
    query_len: int = 1  # tokens of sequences with drafts
    wanted: int = 0  # as protocol.Plan has it ...
    follows: bool = False  # ... and this
    proposed: dict[str, list[int]] = field(default_factory=dict)  # drafts by sequences' ids, of those that have some
    verified: list[Sequence] = field(default_factory=list)  # query_len tokens each
    decodes: list[Sequence] = field(default_factory=list)  # one token each, which may be a prompt's last
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # more tokens of a prompt, and how many
    new: list[protocol.NewSequence] = field(default_factory=list)
    pixels: list[protocol.Pixels] = field(default_factory=list)  # as ScheduledStep has them
    tower: list[int] = field(default_factory=list)  # as protocol.Plan has it
    images: set[bytes] = field(default_factory=set)  # that the tower works on before this step, by digest
    block_rows: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)  # blocks that this step fills and enters into the prefix cache

    def finished(
        self,
        step: int,
        freed_rows: list[int],
        rejected: bytes = b"",
        swap_out: bytes = b"",
        swap_in: bytes = b"",
        state_loads: bytes = b"",
        state_saves: bytes = b"",
    ) -> ScheduledStep:
        """The step's plan, with its number, the rows that were freed since the last one, and copies of blocks and of
        states, as protocol.Plan has them."""
        chunks, query_len = self.chunks, self.query_len if self.verified else 1
        if query_len > 1:  # rows of exactly query_len tokens come first
            single = ((one, 1) for one in self.decodes)
            chunks = sorted([*single, *chunks], key=lambda chunk: chunk[1] != query_len)
        sequences = [*(self.verified or self.decodes), *(sequence for sequence, _ in chunks)]
        drafts = [self.proposed.get(one.id, [])[: query_len - 1] for one in self.verified]
        sampled = [sequence for sequence in sequences if sequence.sampled_at == step]
        plan = protocol.Plan(
            step=step,
            rows=protocol.pack_u16([sequence.row for sequence in sequences]),
            counts=protocol.pack_u32([tokens for _, tokens in chunks]),
            new=self.new,
            freed=protocol.pack_u16(freed_rows),
            block_rows=protocol.pack_u16(self.block_rows),
            block_ids=protocol.pack_u32(self.block_ids),
            swap_out=swap_out,
            swap_in=swap_in,
            state_loads=state_loads,
            state_saves=state_saves,
            query_len=query_len,
            drafts=b"".join(_filled(one, query_len - 1) for one in drafts),
            rejected=rejected,
            wanted=self.wanted,
            keeps=self._keeps(query_len, sampled),
            follows=self.follows,
            tower=self.tower,
        )
        # A sequence's length counts the (first) token that this step samples.
        constrained = [
            Constrained(one, one.length - 1, *((query_len, drafts[i]) if i < len(drafts) else (1, [])))
            for i, one in enumerate(sampled)
            if one.grammar is not None
        ]
        return ScheduledStep(plan, sampled, constrained, query_len, drafts, pixels=self.pixels)

    def _keeps(self, query_len: int, sampled: list[Sequence]) -> bool:
        """Whether the ranks keep the drafts that are wanted, as protocol.Plan has it: of several stages only the last
        has them, and a grammar's mask follows from the ids of drafts."""
        return bool(self.wanted) and self.stages == 1 and query_len > 1 and all(one.grammar is None for one in sampled)


def _filled(drafts: list[int], count: int) -> bytes:
    return protocol.pack_i32(drafts + [protocol.NO_DRAFT] * (count - len(drafts)))
