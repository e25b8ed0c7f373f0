"""How decode.cu's blocks share out what they read: by a model in Python, and by its own lines where a compiler is."""

import ctypes
import itertools
import random
import shutil
import subprocess
from typing import NamedTuple

import pytest
from phalanx.kernels import jit
from phalanx.kernels.attention import decode


class Sizes(NamedTuple):
    box: int = 16
    window: int = 0
    rotate: int = 1
    tile: int = 64

    def span(self, length: int) -> tuple[int, int, int]:
        """The tokens that are read: where the first one's box begins, and where they end; how many boxes."""
        last = max(length - self.rotate, 0)
        start = (max(length - self.window, 0) if self.window else 0) // self.box * self.box
        return start, last, max(-(-(last - start) // self.box), 1)

    @property
    def per_tile(self) -> int:
        return self.tile // self.box


SIZES = [
    Sizes(),
    Sizes(8, rotate=0),
    Sizes(32, 70),
    Sizes(64),
    Sizes(16, 1),
    Sizes(8, 300, 0),
    Sizes(16, tile=32),
    Sizes(8, 90, tile=32),
]


class Part(NamedTuple):
    """Tokens at:stop of sequence b, and which runs are said to have parts of it, if they are not all."""

    b: int
    at: int
    stop: int
    first: int
    count: int


def model(sizes: Sizes, lengths: list[int], wanted: int) -> list[list[Part]]:
    """The parts of each run, as decode.cu reckons."""
    counts = [sizes.span(length)[2] for length in lengths]
    ends = list(itertools.accumulate(counts))
    tiles = sum(-(-count // sizes.per_tile) for count in counts)
    runs = max(min(wanted, tiles // decode.LEAST), 1)
    each, longer = divmod(ends[-1], runs)
    near = min(sizes.per_tile // 2, (each - 1) // 2)

    def begins_from(box: int) -> int:
        if box <= (each + 1) * longer:
            return -(-box // (each + 1))
        return -(-(box - longer) // each)

    def bound(run: int) -> tuple[int, int, int, int]:
        begin = each * run + min(run, longer)
        b = next((b for b, end in enumerate(ends) if end > begin), len(ends))
        if b == len(ends):
            return b, 0, 0, 0
        at = ends[b] - counts[b]
        box = begin - at
        if box <= near:
            return b, 0, 0, 0
        if box >= counts[b] - near:
            return b + 1, 0, 0, 0
        first, last = begins_from(at + near + 1), begins_from(at + counts[b] - near)
        return b, box, first - 1, last - first + 1

    bounds = [bound(run) for run in range(runs + 1)]
    return [parts_between(sizes, lengths, *pair) for pair in itertools.pairwise(bounds)]


def parts_between(sizes: Sizes, lengths: list[int], begin: tuple, end: tuple) -> list[Part]:
    parts = []
    for b in range(begin[0], end[0] + (end[1] > 0)):
        start, last, _ = sizes.span(lengths[b])
        at = start + begin[1] * sizes.box * (b == begin[0])
        stop = start + end[1] * sizes.box if b == end[0] else last
        parts.append(Part(b, at, stop, *(end if at == start else begin)[2:]))
    return parts


# Each thread of find_run looks for the borders in its sequences; here one after the other does.
HARNESS = """
#include <algorithm>
using std::max, std::min;
#define __device__
constexpr int LEAST = %d, BOX = %d, WINDOW = %d, ROTATE = %d, TILE = %d;
%s
extern "C" int walk(const int* lengths, int n, int wanted, int (*parts)[6]) {
    int all = 0, tiles = 0, found = 0;
    for (int b = 0; b < n; b++) all += Span(lengths[b]).boxes(), tiles += Span(lengths[b]).tiles();
    const StreamKRuns runs(all, tiles, wanted);
    for (int run = 0; run < runs.count; run++) {
        SplitBound bounds[2] = {{-1, -1, -1, -1}, {-1, -1, -1, -1}};
        for (int b = 0, at = 0; b < n; at += Span(lengths[b++]).boxes())
            for (int end = 0; end < 2; end++) {
                const int box = runs.begin(run + end) - at, boxes = Span(lengths[b]).boxes();
                if (box >= 0 && box < boxes) bounds[end] = runs.bound(run + end, b, at, boxes);
            }
        if (run + 1 == runs.count) bounds[1] = {n, 0, 0, 0};
        RunIterator run_at(lengths, bounds);
        do {
            const SplitBound& divided = bounds[run_at.at == Span(lengths[run_at.b]).start];
            int* part = parts[found++];
            part[0] = run, part[1] = run_at.b, part[2] = run_at.at, part[3] = run_at.stop;
            part[4] = divided.first, part[5] = divided.count;
        } while (run_at.next());
    }
    return found;
}
"""


@pytest.fixture(scope="module", params=SIZES, ids=str)
def runs(request, tmp_path_factory):
    """sizes and what finds the runs: the model, held against decode.cu if it can be compiled."""
    sizes = request.param
    compiler = shutil.which("c++")
    if compiler is None:
        return sizes, lambda lengths, wanted: model(sizes, lengths, wanted)
    folder = tmp_path_factory.mktemp("runs")
    _, _, shares = jit.SOURCES["decode.cu"].read_text().partition("// Stream-K: ")
    shares, _, _ = shares.partition("// A sequence's query heads of one key head")
    text = HARNESS % (decode.LEAST, *sizes, f"// {shares}")
    source, library = folder / "runs.cpp", folder / "runs.so"
    source.write_text(text)
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    walk = ctypes.CDLL(str(library)).walk

    def found(lengths: list[int], wanted: int) -> list[list[Part]]:
        room = (ctypes.c_int * 6 * (len(lengths) + wanted))()
        count = walk((ctypes.c_int * len(lengths))(*lengths), len(lengths), wanted, room)
        listed = [tuple(row) for row in room[:count]]
        want = model(sizes, lengths, wanted)
        parts = [[Part(*row[1:]) for row in listed if row[0] == run] for run in range(len(want))]
        assert parts == want and sum(map(len, parts)) == count
        return parts

    return sizes, found


def check(sizes: Sizes, lengths: list[int], parts: list[list[Part]]) -> None:
    listed = [part for run in parts for part in run]
    spans = [sizes.span(length) for length in lengths]
    for b, of_b in itertools.groupby(listed, lambda part: part.b):
        of_b = list(of_b)
        start, last, _ = spans[b]
        assert [part.at for part in of_b] == [start, *(part.stop for part in of_b[:-1])] and of_b[-1].stop == last
        assert len(of_b) == 1 or all(part.at < part.stop for part in of_b)
    assert [b for b, _ in itertools.groupby(listed, lambda part: part.b)] == list(range(len(lengths)))

    owners: dict[int, list[int]] = {}
    for run, of_run in enumerate(parts):
        assert of_run
        for i, part in enumerate(of_run):
            owners.setdefault(part.b, []).append(run)
            # A block has one place for a part that begins a sequence, and one for a part that does not.
            assert part.at == spans[part.b][0] or i == 0
            assert part.stop == spans[part.b][1] or i == len(of_run) - 1
    for part in listed:
        if len(owners[part.b]) > 1:
            assert list(range(part.first, part.first + part.count)) == owners[part.b]

    shares = [sum(max(-(-(part.stop - part.at) // sizes.box), 1) for part in run) for run in parts]
    mean = sum(shares) / len(shares)
    assert all(abs(share - mean) <= sizes.per_tile + 1 for share in shares)


@pytest.mark.sample(6)
def test_few_sequences(runs):
    sizes, found = runs
    for n in (1, 2, 3):
        for lengths in itertools.product((0, 1, 2, 64, 65, 97, 256, 290, 641, 1000), repeat=n):
            for wanted in (1, 2, 3, 7):
                check(sizes, lengths, found(lengths, wanted))


def test_random_batches(runs):
    sizes, found = runs
    draw = random.Random(3)
    for _ in range(300):
        longest = draw.choice([2, 70, 300, 1400, 30000])
        lengths = [draw.choice([0, 1, longest, draw.randint(0, longest)]) for _ in range(draw.randint(1, 60))]
        check(sizes, lengths, found(lengths, draw.choice([1, 2, 8, 33, 66, 264])))


@pytest.mark.parametrize("stride", [7, pytest.param(3, marks=pytest.mark.long)])
def test_borders_that_move_do_not_meet(runs, stride):
    """Runs of many short sequences have few boxes, and between two longer ones borders move from both sides."""
    sizes, found = runs
    for short in range(0, 60, stride):
        for length in range(160, 400, 16):
            lengths = [2] * short + [length, length] + [2] * (100 - short)
            check(sizes, lengths, found(lengths, 264))


def test_as_many_sequences_as_a_block_counts(runs):
    sizes, found = runs
    draw = random.Random(4)
    for wanted in (8, 32, 33, 264):
        lengths = [draw.randint(64, 1400) for _ in range(decode.SEQUENCES)]
        check(sizes, lengths, found(lengths, wanted))


def test_sequences_of_one_length_stay_whole(runs):
    sizes, found = runs
    for n, wanted in ((512, 32), (256, 32), (64, 32), (33, 33), (16, 33)):
        for length in (1, 60, 100, 230, 256, 257, 300, 799, 800):
            parts = found([length] * n, wanted)
            if n % len(parts) == 0:
                assert {len(run) for run in parts} == {n // len(parts)}
