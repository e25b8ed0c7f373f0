"""The masks of constrained rows. Rank 0 sends them late in a step, once it knows the tokens before."""

from __future__ import annotations

import queue
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.sampling.token_mask import mask_tokens
from .. import protocol
from .upload import Upload


class RowMasks(NamedTuple):
    """The masks of R rows of a batch, on the device."""

    at: Tensor  # [R] int32, the rows' places in the batch
    bits: Tensor  # [R, words] int32

    def apply(self, logits: Tensor, offset: int = 0) -> None:
        """Forbid tokens in place. logits: [S, width], of the tokens from `offset` on."""
        mask_tokens(logits, self.at, self.bits, offset)

    def of_rows(self, rows: Tensor, count: int) -> RowMasks:
        """The masks of some of the batch's `count` rows, int64, whose places are counted among these."""
        places = self.at.new_full((count,), -1)
        places[rows] = torch.arange(len(rows), dtype=places.dtype, device=places.device)
        at = places[self.at.long()]
        return RowMasks(at[at >= 0], self.bits[at >= 0])


class TokenMasks:
    """One rank's. Every rank knows which rows are constrained, so all know which steps have masks."""

    def __init__(self, max_num_seqs: int, upload: Upload):
        self._constrained = np.zeros(max_num_seqs, bool)
        self._sent: queue.SimpleQueue[protocol.Masks] = queue.SimpleQueue()
        self._upload = upload

    def put(self, masks: protocol.Masks) -> None:
        """Masks have come from rank 0. Called by the main thread; all else by the step thread."""
        self._sent.put(masks)

    def enter(self, new: protocol.NewSequence) -> None:
        self._constrained[new.row] = new.constrained

    def of(self, sampled_rows: np.ndarray, step: int) -> RowMasks | None:
        """The masks of the step that samples tokens of these rows, a mask for each token; None where no row is
        constrained. Waits until they are here."""
        at = np.flatnonzero(self._constrained[sampled_rows])
        if not len(at):
            return None
        masks = self._sent.get()
        if masks.step != step:
            raise RuntimeError(f"the masks of step {masks.step} came where those of step {step} were awaited")
        bits = np.frombuffer(bytearray(masks.bits), np.int32).reshape(len(at), -1)
        return RowMasks(*self._upload.send([at.astype(np.int32), bits]))
