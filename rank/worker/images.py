"""Images on one rank: their pixels, the features that the model's tower makes of them, and the prompts they are in."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import protocol
from ..model.base import Model
from ..model.batch import EmbeddingOverride
from .state import BatchState, ScheduledBatch


class Images:
    """Used by the step thread, in the order of the plans. Features are made when a step first needs them, and stay in
    host memory until rank 0 drops them."""

    def __init__(self, model: Model, state: BatchState, device: torch.device):
        self._model, self._state, self._device = model, state, device
        state.image_positions = model.image_positions
        self._pixels: dict[bytes, protocol.Pixels] = {}
        self._features: dict[bytes, Tensor] = {}  # as towers make them, on the host
        self._rows: dict[int, list[protocol.Picture]] = {}  # of prompts that are not computed yet

    def take(self, image: protocol.Pixels) -> None:
        """Keep an image that a later plan needs."""
        for digest in image.dropped:
            self._pixels.pop(digest, None)
            self._features.pop(digest, None)
        if self._model.vision is not None:
            self._pixels[image.digest] = image

    def enter(self, new: protocol.NewSequence) -> None:
        if new.pictures and self._model.vision is not None:
            self._rows[new.row] = new.pictures

    def leave(self, row: int) -> None:
        self._rows.pop(row, None)

    def embeddings(self, scheduled: ScheduledBatch) -> EmbeddingOverride | None:
        """The embeddings of a step's image tokens; None: it has none, or another pipeline stage embeds."""
        if not self._rows:
            return None
        at, values = list[np.ndarray](), list[Tensor]()
        for row, start, count, first, _ in scheduled.spans():
            pictures = self._rows.get(row, ())
            for picture in pictures:
                begin, end = picture.start, picture.start + picture.length
                shown = np.flatnonzero(self._state.tokens[row][begin:end] == self._model.image_token)
                chosen = np.flatnonzero((start <= begin + shown) & (begin + shown < start + count))
                if len(chosen):
                    at.append(begin + shown[chosen] - start + first)
                    values.append(self._features_of(picture.digest)[chosen[0] : chosen[-1] + 1])
            if pictures and start + count >= pictures[-1].start + pictures[-1].length:
                del self._rows[row]
        if not at:
            return None
        places, hidden = torch.from_numpy(np.concatenate(at)).to(self._device), self._model.hidden_size
        own, *deeper = torch.cat(values).to(self._device).split(hidden, 1)
        return EmbeddingOverride(places, own.contiguous(), torch.stack(deeper, 1) if deeper else None)

    def _features_of(self, digest: bytes) -> Tensor:
        if digest not in self._features:
            assert self._model.vision is not None
            image = self._pixels.pop(digest)
            pixels = np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, 3)
            made = self._model.vision(torch.from_numpy(pixels.copy()).to(self._device))
            self._features[digest] = made.to(self._model.dtype).cpu()
        return self._features[digest]
