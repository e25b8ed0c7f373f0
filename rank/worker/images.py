"""Images on one rank: their pixels, the features that the model's tower makes of them, and the prompts they are in."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...comm.base import Comm
from .. import protocol
from ..model.base import Model, Tower
from ..model.batch import EmbeddingOverride
from .state import BatchState, ScheduledBatch
from .upload import to_host


class Features(NamedTuple):
    """An image's features in host memory; of a GPU's the copy is complete once `copied` is."""

    values: Tensor
    copied: torch.cuda.Event | None = None


class Share:
    """The images that one rank of the tensor group works on, one after the other."""

    def __init__(self) -> None:
        self.images: deque[protocol.Pixels] = deque()  # it has not finished with these
        self.left = 0  # parts of the work on the first of these; 0: it has not begun


class Images:
    """Used by the step thread, in the order of the plans. Each rank of the first stage has a whole tower and works on
    its share of the images, one after the other, in parts that plans ask for, so that no step waits for a whole one.
    Finished features go to the other ranks, and stay in host memory until rank 0 drops them."""

    def __init__(self, model: Model, state: BatchState, device: torch.device, group: Comm):
        """group: the tensor group."""
        self._model, self._state, self._device, self._group = model, state, device, group
        state.image_positions = model.image_positions
        self._shares = [Share() for _ in range(group.size)]
        self._tower: Generator[None, None, Tensor] | None = None  # at work on this rank's image
        self._features: dict[bytes, Features] = {}
        # Copies to the host have a stream of their own, so that no step waits for them.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.seconds = 0.0  # that the tower has worked
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # a GPU's work that is not counted yet
        self._rows: dict[int, list[protocol.Picture]] = {}  # of prompts that are not computed yet

    def take(self, image: protocol.Pixels) -> None:
        """Keep an image that a later plan needs."""
        for digest in image.dropped:
            self._features.pop(digest, None)
        if self._model.vision is not None:
            self._shares[image.rank].images.append(image)

    def enter(self, new: protocol.NewSequence) -> None:
        if new.pictures and self._model.vision is not None:
            self._rows[new.row] = new.pictures

    def leave(self, row: int) -> None:
        self._rows.pop(row, None)

    def work(self, pieces: list[int]) -> None:
        """Have the towers, where this stage has them, compute so many parts of each rank's images."""
        tower = self._model.vision
        if tower is None:
            return
        self._count()
        done = list[tuple[int, protocol.Pixels, Tensor | None]]()
        for rank, (share, count) in enumerate(zip(self._shares, pieces, strict=True)):
            for _ in range(count):
                image, features = share.images[0], None
                share.left = (share.left or tower.depth + 1) - 1
                if rank == self._group.rank:
                    features = self._advance(tower, image)
                    assert (features is None) == (share.left > 0), f"the tower's parts are not {tower.depth + 1}"
                if not share.left:
                    share.images.popleft()
                    done.append((rank, image, features))
        # Only now, as a rank that waited for another's features could not work meanwhile.
        width = (1 + tower.levels) * self._model.hidden_size
        for rank, image, features in done:
            if features is None:
                count = len(image.text) // 4 or math.prod(tower.rules.grid(image.height, image.width))
                features = torch.empty(count, width, dtype=self._model.dtype, device=self._device)
            self._features[image.digest] = self._kept(self._group.broadcast(features, rank))

    def _advance(self, tower: Tower, image: protocol.Pixels) -> Tensor | None:
        """Compute a part of an image. Returns its features with the last one."""
        if self._tower is None:
            pixels = torch.empty(image.height, image.width, 3, dtype=torch.uint8, pin_memory=self._copies is not None)
            pixels.view(-1).numpy()[:] = np.frombuffer(image.data, np.uint8)
            shown = pixels.to(self._device, non_blocking=True)
            if image.text:
                read = torch.from_numpy(np.frombuffer(image.text, np.uint32).astype(np.int64)).to(self._device)
                self._tower = tower.reading(shown, read)
            else:
                self._tower = tower.pieces(shown)
        try:
            with self._timer():
                next(self._tower)
        except StopIteration as done:
            self._tower = None
            return done.value.to(self._model.dtype).contiguous()
        return None

    def _kept(self, features: Tensor) -> Features:
        """Features in host memory."""
        if self._copies is None:
            return Features(features.cpu())
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            values = to_host(features)
            features.record_stream(self._copies)
            copied = torch.cuda.Event()
            copied.record()
        return Features(values, copied)

    def _on_device(self, features: Features, first: int, end: int) -> Tensor:
        """Some of an image's features."""
        if features.copied is not None:
            torch.cuda.current_stream().wait_event(features.copied)
        return features.values[first:end].to(self._device, non_blocking=True)

    def _count(self) -> None:
        """Count the seconds of work that a GPU has finished."""
        while self._timed and self._timed[0][1].query():
            begin, end = self._timed.popleft()
            self.seconds += begin.elapsed_time(end) / 1000

    @contextlib.contextmanager
    def _timer(self) -> Iterator[None]:
        """Count the seconds of a part of an image; on a GPU once it is done."""
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
        self._count()
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
                    values.append(self._on_device(self._features[picture.digest], chosen[0], chosen[-1] + 1))
            if pictures and start + count >= pictures[-1].start + pictures[-1].length:
                del self._rows[row]
        if not at:
            return None
        places, hidden = torch.from_numpy(np.concatenate(at)).to(self._device), self._model.hidden_size
        own, *deeper = torch.cat(values).split(hidden, 1)
        return EmbeddingOverride(places, own.contiguous(), torch.stack(deeper, 1) if deeper else None)
