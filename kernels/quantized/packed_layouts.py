"""Packed layouts of weights, described once: packing, unpacking and repacking follow from the description.

A weight [O, I] is packed as tiles of 16 outputs by some inputs. A tile is tables, one behind the other: its codes, its
scales and the like, each of numbers of one width. What differs between layouts is the order in which a table's numbers
lie, which is a permutation of axes: an output is h g, of 2 and 8, and a table decides which axes its columns have.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

N_TILE = 16  # of a tile, which all packed forms keep together
ZERO = 8  # the zero point of int4 where none is stored
DTYPES = {8: torch.uint8, 16: torch.float16, 32: torch.float32}


class Table(NamedTuple):
    """Numbers of a tile, of which each output has the same columns."""

    name: str
    bits: int  # of a number; of less than 8 the first of a byte has its lowest
    columns: str  # their axes, slowest first, and the axes' sizes: "s4 e2 t4 b2"
    order: str  # all axes as the numbers lie, slowest first; what is less than a byte last: "g t s b e h"
    shift: int = 0  # where these bits are in a number of which tables of one name have a part each
    flipped: int = 0  # bits that are stored inverted, of outputs that fill up the last tile as well

    @property
    def sizes(self) -> dict[str, int]:
        return {"h": 2, "g": 8} | {name: int(size) for name, size in re.findall(r"(\w)(\d+)", self.columns)}

    @property
    def bytes(self) -> int:
        """Bytes of a tile."""
        return math.prod(self.sizes.values()) * self.bits // 8

    def lay(self, x: Tensor) -> Tensor:
        """x [O, N], numbers of 8 bits or what DTYPES has → uint8 [ceil(O / 16), tiles, bytes]."""
        made = self.in_order(x).contiguous().view(torch.uint8)
        return made ^ self.flipped if self.flipped else made

    def in_order(self, x: Tensor) -> Tensor:
        """The table as numbers [ceil(O / 16), tiles, count], none flipped; bytes of those of less than 8 bits."""
        if self.bits < 8:
            x = (x >> self.shift if self.shift else x) & (1 << self.bits) - 1
        if missing := -len(x) % N_TILE:
            x = pad(x, (0, 0, 0, missing))
        sizes, axes = self.sizes, self.order.split()
        h, g, *columns = sizes.values()
        parts = x.reshape(len(x) // N_TILE, h, g, -1, *columns)
        places = {name: at if at < 3 else at + 1 for at, name in enumerate(sizes, 1)}
        laid = parts.permute(0, 3, *(places[axis] for axis in axes))
        if self.bits < 8:  # joined before they are copied to their places
            within = len(axes)
            while math.prod(laid.shape[2 + within :]) < 8 // self.bits:
                within -= 1
            each: Iterator[tuple[Any, ...]] = itertools.product(*map(range, laid.shape[2 + within :]))
            joined, *others = (laid[(..., *index)] for index in each)
            for index, one in enumerate(others, 1):
                joined = joined | one << self.bits * index
            return joined.flatten(2)
        return laid.flatten(2)

    def read(self, x: Tensor) -> Tensor:
        """The reverse: uint8 [tiles of outputs, tiles, bytes] → [O, N], with the outputs that fill up the last tile."""
        sizes, axes = self.sizes, self.order.split()
        if self.bits < 8:
            some = [x >> at & (1 << self.bits) - 1 for at in range(0, 8, self.bits)]
            numbers = torch.stack(some, 3).flatten(2) << self.shift
        else:
            numbers = (x ^ self.flipped if self.flipped else x).contiguous().view(DTYPES[self.bits])
        parts = numbers.view(*x.shape[:2], *(sizes[axis] for axis in axes))
        h, g, *columns = (axes.index(name) + 2 for name in sizes)
        return parts.permute(0, h, g, 1, *columns).reshape(len(x) * N_TILE, -1)


class Tables(NamedTuple):
    """A tile: the tables of its head, then those that are repeated along the first axis of their order."""

    head: tuple[Table, ...] = ()
    repeated: tuple[Table, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of a tile."""
        return sum(table.bytes for table in (*self.head, *self.repeated))

    @property
    def times(self) -> int:
        """How often the others are repeated."""
        return self.repeated[0].sizes[self.repeated[0].order[0]] if self.repeated else 1

    def pack(self, numbers: Mapping[str, Tensor]) -> Tensor:
        """Numbers [O, N] by the names of the tables → uint8 [ceil(O / 16), tiles, bytes], on any device."""
        made = [table.lay(numbers[table.name]) for table in self.head]
        if self.repeated:
            each = [table.lay(numbers[table.name]).unflatten(2, (self.times, -1)) for table in self.repeated]
            made.append(torch.cat(each, 3).flatten(2))
        return torch.cat(made, 2) if len(made) > 1 else made[0].contiguous()

    def unpack(self, tiles: Tensor) -> dict[str, Tensor]:
        """The reverse, with the outputs that fill up the last tiles."""
        found: dict[str, Tensor] = {}
        *heads, rest = tiles.split([*(table.bytes for table in self.head), self._rest], 2)
        sizes = [table.bytes // self.times for table in self.repeated]
        parts = [one.flatten(2) for one in rest.unflatten(2, (self.times, -1)).split(sizes, 3)] if sizes else []
        for table, part in zip((*self.head, *self.repeated), (*heads, *parts), strict=True):
            numbers = table.read(part)
            found[table.name] = found[table.name] | numbers if table.name in found else numbers
        return found

    @property
    def _rest(self) -> int:
        return sum(table.bytes for table in self.repeated)
