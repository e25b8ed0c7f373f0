"""Random weights for benchmarks and tests without a checkpoint. They do not depend on how the model is sharded."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from .safetensors import FLOATS, Ranges
from .slicing import Codes, Pattern, Scales, Slice, Turns

# Every tensor is a window into one endless repetition of this many numbers. It is prime, so no row length divides it
# and the rows of a matrix differ. The numbers are uniform, as in other engines: the values decide how much power a GEMM
# takes, and with it how long it runs. Normal numbers take 0.7 % more (docs/measurements).
PERIOD = 1_048_573


class Dummy:
    """Fills slices. Element i of a tensor depends on the tensor's name and on i alone."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._pool = torch.rand(PERIOD, generator=generator).sub_(0.5).mul_(12**0.5)  # standard deviation 1
        self._ready: dict[tuple[torch.device, torch.dtype, int, Codes | None], Tensor] = {}

    def fill(self, part: Slice, target: Tensor) -> None:
        """Fill a slice. Weights have standard deviation 1 / sqrt(inputs), to keep activations near 1; norms are 1."""
        if target.numel() == 0:
            return
        given = part.spec.made_up
        if isinstance(given, Turns):
            target.copy_(torch.arange(*part.ranges[-1]) % given.period)
            return
        codes = given if isinstance(given, Codes) else None
        constant = given if isinstance(given, int | float) else None
        if isinstance(given, Scales):  # f16's, as checkpoints have them
            exact = max(part.module.inputs.size, 1) ** -0.5 / given.deviation
            constant = float(torch.tensor(exact, dtype=torch.float16))
        if constant is not None or (len(part.shape) == 1 and part.tensor.endswith(".weight")):
            target.fill_(1 if constant is None else constant)
            return
        shape, ranges = part.shape, part.ranges
        if part.spec.axes.endswith("b"):  # whole, so that it belongs to the axis before
            (first, last), (_, block) = ranges[-2:]
            shape, ranges = (*shape[:-2], shape[-2] * block), (*ranges[:-2], (first * block, last * block))
            target = target.view(*target.shape[:-2], -1)
        whole = target
        if len(shape) == 1:
            shape, ranges, target = (1, *shape), ((0, 1), *ranges), target.view(1, -1)
        self._fill(target, zlib.crc32(part.tensor.encode()), shape, ranges, codes)
        if isinstance(given, Pattern):
            blocks = whole.unflatten(-1, (-1, given.size))
            for place, byte in given.bytes.items():
                blocks[..., place] = byte

    def _fill(self, rows: Tensor, start: int, shape: tuple[int, ...], ranges: Ranges, codes: Codes | None) -> None:
        """`ranges` of a tensor of this shape, two axes or more, whose first element is number `start`."""
        if len(shape) > 2:
            size = math.prod(shape[1:])
            for index, one in enumerate(rows, ranges[0][0]):
                self._fill(one, start + index * size, shape[1:], ranges[1:], codes)
            return
        columns = shape[-1]
        first, last = ranges[-1]
        start += ranges[0][0] * columns + first
        pool = self._extended(rows, last - first, codes)
        # Row r is the window at start + r * columns. Rows that do not wrap around are copied together.
        done = 0
        while done < len(rows):
            offset = (start + done * columns) % PERIOD
            count = min(len(rows) - done, (PERIOD - 1 - offset) // columns + 1)
            window = pool.as_strided((count, last - first), (columns, 1), offset)
            if rows.dtype in FLOATS.values():
                torch.mul(window, columns**-0.5, out=rows[done : done + count])
            else:
                rows[done : done + count] = window
            done += count

    def _extended(self, like: Tensor, width: int, codes: Codes | None) -> Tensor:
        """The pool in `like`'s dtype on its device, followed by at least its first `width` numbers again.

        In dtypes of codes it is random codes.
        """
        width = 1 << (width - 1).bit_length()
        key = like.device, like.dtype, width, codes
        if key not in self._ready:
            times, rest = divmod(width, PERIOD)
            pool = self._pool if like.dtype in FLOATS.values() else _packs(like.dtype, codes)
            self._ready[key] = torch.cat([pool] * (1 + times) + [pool[:rest]]).to(like)
        return self._ready[key]


def _packs(dtype: torch.dtype, codes: Codes | None) -> Tensor:
    """PERIOD packs of random codes, or numbers of 8 bits, such as none of e4m3 is NaN."""
    bits, first, last = codes or (8, 0, 255)
    generator = torch.Generator().manual_seed(0)
    shape = 8 // bits, PERIOD * dtype.itemsize
    made = torch.randint(first, last + 1, shape, dtype=torch.uint8, generator=generator)
    if bits == 4:
        made[0] |= made[1] << 4
    if dtype.is_floating_point:
        made &= 0xB7  # numbers below 2
    return made[0].view(dtype)
