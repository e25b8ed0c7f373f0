"""Images on one rank: their pixels, the features that the model's tower makes of them, and the prompts they are in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor

from .. import protocol
from ..model.base import Model, Tower
from ..model.batch import EmbeddingOverride
from .state import BatchState, ScheduledBatch


class Images:
    """Used by the step thread, in the order of the plans. The tower works on one image after the other, in parts that
    plans ask for, so that no step waits for a whole one. Features stay in host memory until rank 0 drops them."""

    def __init__(self, model: Model, state: BatchState, device: torch.device):
        self._model, self._state, self._device = model, state, device
        state.image_positions = model.image_positions
        self._pixels: dict[bytes, protocol.Pixels] = {}  # the tower has not begun with these
        self._started: tuple[bytes, Generator[None, None, Tensor]] | None = None  # an image it is working on
        self._features: dict[bytes, Tensor] = {}  # as towers make them, on the host
        self.seconds = 0.0  # that the tower has worked
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # on a GPU, for the image it is working on
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

    def work(self, pieces: int) -> None:
        """Have the tower, where this stage has it, compute so many parts of the images that were taken."""
        for _ in range(pieces if self._model.vision is not None else 0):
            if self._started is None:
                image = self._pixels.pop(next(iter(self._pixels)))
                pixels = np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, 3)
                shown = torch.from_numpy(pixels.copy()).to(self._device)
                tower = cast(Tower, self._model.vision)
                if image.text:
                    read = torch.from_numpy(np.frombuffer(image.text, np.uint32).astype(np.int64)).to(self._device)
                    self._started = image.digest, tower.reading(shown, read)
                else:
                    self._started = image.digest, tower.pieces(shown)
            digest, features = self._started
            try:
                with self._timer():
                    next(features)
            except StopIteration as done:
                self._features[digest] = done.value.to(self._model.dtype).cpu()
                self._started = None
                self.seconds += sum(begin.elapsed_time(end) for begin, end in self._timed) / 1000
                self._timed.clear()

    @contextlib.contextmanager
    def _timer(self) -> Iterator[None]:
        """Count the seconds of a part of an image; on a GPU once all of it is done."""
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._timed.append((begin, end))
            return
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - started

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
                    values.append(self._features[picture.digest][chosen[0] : chosen[-1] + 1])
            if pictures and start + count >= pictures[-1].start + pictures[-1].length:
                del self._rows[row]
        if not at:
            return None
        places, hidden = torch.from_numpy(np.concatenate(at)).to(self._device), self._model.hidden_size
        own, *deeper = torch.cat(values).to(self._device).split(hidden, 1)
        return EmbeddingOverride(places, own.contiguous(), torch.stack(deeper, 1) if deeper else None)
