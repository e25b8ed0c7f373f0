"""Draft models that propose a sequence's next tokens on the device, one file for each kind of them.

A draft model is a `base.Model` of one pipeline stage, the last: it has caches of its own under the target's block
tables, so that whatever keeps the target's blocks keeps its, too. It runs over each step's tokens once the target has
sampled (rank/worker/drafting.py). What it proposes never decides about a text, only about how fast it comes.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from ....comm.base import Comm
from ..batch import Batch
from ..cache_spec import CacheSpec

MOST = 8  # drafts in a row
DRAFTS = 7  # tokens that are guessed of a sequence, where no option says
MODEL_DRAFTS = 3  # where a model guesses them


def most_verified(kind: str, wanted: int) -> int:
    """Tokens of a sequence in a step with all its drafts. kind: of the draft model, as --speculate names it; empty:
    there is none. wanted: --num-speculative-tokens."""
    return 1 + (wanted or (MODEL_DRAFTS if kind else DRAFTS))


class DraftSource(Protocol):
    """A draft model that is joined to its target."""

    FOLLOWS: ClassVar[bool]  # it reads the target's hidden states and, beside each, the token that follows
    most: int  # drafts that it can propose in a row
    max_model_len: int  # positions that it can compute
    tensor: Comm  # the ranks that have parts of its logits: the target's tensor group, or one
    vocabulary: Tensor | None  # the target's id of each of its tokens, int64; None: both have the same

    def cache_specs(self) -> list[CacheSpec]:
        """The cache specs of its own layers."""

    def read(self, hidden: Tensor) -> Tensor:
        """The part that it reads of the target's hidden states [T, hidden], as `Model.forward` returns them."""

    def forward(self, batch: Batch, before: Tensor | None) -> Tensor:
        """Hidden states [T, hidden] of a batch, whose caches are its own alone. before: of the token before each, as
        `read` or this function has made them; None: it reads none."""

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's shard of the logits, [S, width], of rows of `forward`'s: cut as the target's are."""
