"""Which algorithms GEMMs of many rows take: the choice, and what is kept of it on a node."""

import errno
import json
import math
import os
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels import kernel_cache
from phalanx.kernels.collective.allreduce import SymmetricMemory
from phalanx.kernels.gemm import autotune, cublaslt, gemm_reduce_scatter
from phalanx.kernels.gemm.cublaslt import GemmShape

from .cublaslt import BF16, SIZES, Lib, algo, check, in_memory, plain, put

MEASURE = autotune._measure


class Clock:
    """Stands for measuring: each algorithm takes its time, the n-th time what `later` says."""

    def __init__(self, taken, later=()):
        self.taken, self.later, self.asked = dict(enumerate(taken)), list(later), []

    def __call__(self, algos):
        self.asked.append(list(algos))
        if len(self.asked) > 1 and self.later:
            self.taken.update(self.later.pop(0))
        return [self.taken[algo] for algo in algos]


@pytest.mark.parametrize(
    "taken, want",
    [([100], 0), ([100, 98.5, 99], 0), ([100, 97, 98], 1), ([100, 130, 60, 61], 2), ([100, 100.1, 92], 2)],
)
def test_torch_stays_unless_another_is_clearly_faster(taken, want):
    assert autotune.fastest(Clock(taken), list(range(len(taken)))) == want


def test_slow_ones_are_measured_once():
    """The others by turns."""
    clock = Clock([200, 100, 90, 140, 104, 91, 92])
    assert autotune.fastest(clock, list(range(7))) == 2
    there, back = [0, 2, 5, 6], [6, 5, 2, 0]
    assert clock.asked == [[0, 1, 2, 3, 4, 5, 6], *[back, there] * (autotune.ROUNDS // 2)]


def test_the_nearest():
    assert autotune.near([0, 1, 2, 3, 4], [200, 100, 90, math.inf, 91]) == [2, 4, 1]
    assert autotune.near([0, 1], [math.inf] * 2) == autotune.near([], []) == []


def test_nothing_is_measured_again_where_torch_is_far_ahead():
    clock = Clock([50, 100])
    assert autotune.fastest(clock, [0, 1]) == 0 and clock.asked == [[0, 1]]


def test_a_slow_first_time_of_torchs_decides_nothing():
    clock = Clock([100, 90], [{0: 89}])
    assert autotune.fastest(clock, [0, 1]) == 0


def test_ways_that_are_refused_are_left_out():
    assert autotune.fastest(Clock([100, math.inf, 50]), [0, 1, 2]) == 2
    assert autotune.fastest(Clock([math.inf, 100]), [0, 1]) == 1
    assert autotune.fastest(Clock([math.inf] * 2), [0, 1]) is None and autotune.fastest(Clock([]), []) is None


ABOUT = [2, "a GPU", 132, 130100, [["torch.bfloat16", 48, 32, [80, 96]], ["torch.bfloat16", 32, 48, [80]]]]
FOUND = [[algo(1), None], [algo(3)]]
OTHER = [[algo(2), algo(2)], [algo(2)]]
HEX = algo(1).hex()


class Measured:
    def __init__(self, found):
        self.found, self.times = found, 0

    def __call__(self):
        self.times += 1
        return self.found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_choices_are_kept_on_the_node(folder):
    measured = Measured(FOUND)
    assert autotune.remembered(ABOUT, measured) == (FOUND, False)
    assert autotune.remembered(ABOUT, measured) == (FOUND, True)
    other = [2, "another GPU", *ABOUT[2:]]
    assert autotune.remembered(other, measured)[1] is False and measured.times == 2
    assert not list(folder.glob(f"*.{os.getpid()}"))


DAMAGE = {
    "empty": lambda kept: "",
    "half": lambda kept: json.dumps(kept)[:-9],
    "no choices": lambda kept: json.dumps({"about": kept["about"]}),
    "a list": lambda kept: "[1, 2]",
    "numbers for rows": lambda kept: json.dumps(kept | {"choices": [1, 2]}),
    "too few": lambda kept: json.dumps(kept | {"choices": [[HEX, None]]}),
    "rows too few": lambda kept: json.dumps(kept | {"choices": [[HEX], [HEX]]}),
    "too short": lambda kept: json.dumps(kept | {"choices": [[HEX, None], [HEX[:-2]]]}),
    "no bytes": lambda kept: json.dumps(kept | {"choices": [[HEX, None], ["x" * len(HEX)]]}),
    "numbers": lambda kept: json.dumps(kept | {"choices": [[1, 0], [3]]}),
    "another machine's": lambda kept: json.dumps(kept | {"about": [2, "another GPU", *ABOUT[2:]]}),
    "another library's": lambda kept: json.dumps(kept | {"about": [*ABOUT[:3], 120000, ABOUT[4]]}),
    "chosen in another way": lambda kept: json.dumps(kept | {"about": [1, *ABOUT[1:]]}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_foreign_files_are_measured_anew(damage, folder):
    autotune.remembered(ABOUT, Measured(FOUND))
    (file,) = folder.glob("gemms-*.json")
    kept = json.loads(file.read_text())
    file.write_text(DAMAGE[damage](kept))
    measured = Measured(OTHER)
    assert autotune.remembered(ABOUT, measured) == (OTHER, False)
    assert autotune.remembered(ABOUT, measured) == (OTHER, True) and measured.times == 1


def test_bytes_that_are_no_text_are_measured_anew(folder):
    autotune.remembered(ABOUT, Measured(FOUND))
    (file,) = folder.glob("gemms-*.json")
    file.write_bytes(b"\xff\xfe\x00")
    assert autotune.remembered(ABOUT, Measured(OTHER)) == (OTHER, False)


def test_a_full_disk_keeps_nothing(folder, monkeypatch):
    def full(file, content):
        with open(file, "wb") as part:
            part.write(content[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(autotune.Path, "write_bytes", full)
    assert autotune.remembered(ABOUT, Measured(FOUND)) == (FOUND, False)
    assert [file.suffix for file in folder.iterdir()] == [".lock"]


def test_of_ranks_that_start_together_one_measures(folder):
    begun, go = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go.wait(20)
        return FOUND

    second, found = Measured(OTHER), []

    def start(measure):
        found.append(autotune.remembered(ABOUT, measure))

    ranks = [threading.Thread(target=start, args=(measure,)) for measure in (slow, second)]
    ranks[0].start()
    assert begun.wait(20)
    ranks[1].start()
    go.set()
    for rank in ranks:
        rank.join(20)
    assert second.times == 0 and sorted(found, key=lambda one: one[1]) == [(FOUND, False), (FOUND, True)]


@pytest.fixture
def gpu(folder, monkeypatch):
    """A GPU on which algorithm rows % 3 is the fastest, torch's for 0, with weights in this machine's memory."""
    about = SimpleNamespace(name="a GPU", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    measured = []

    def measure(made, sizes, weights, counts, peers):
        addresses = [weight.data_ptr() for weight in weights]
        measured.append((*sizes[1:3], counts, addresses, *([peers] if peers else [])))
        return [algo(rows % 3) if rows % 3 else None for rows in counts]

    monkeypatch.setattr(autotune, "_measure", measure)
    return measured


def test_choosing(gpu, monkeypatch):
    """Weights of a size are measured together; what others have to multiply is left alone."""
    lib = put(Lib(), {}, monkeypatch)
    first, second, head = plain(48, 32), plain(48, 32), plain(64, 32)
    given = [(first, [80, 97]), (second, [97, 96]), (head, [80]), (plain(48, 32, torch.float32), [80])]
    odd = plain(32, 64)[:, :48]
    given += [(odd, [80]), (plain(32, 48), [])]
    given = [autotune.TuneRequest(*one) for one in given]
    line = autotune.tune(given)
    addresses = [weight.data_ptr() for weight in (first, second, head)]
    assert gpu == [(48, 32, [80, 96, 97], addresses[:2]), (64, 32, [80], addresses[2:])]
    said = "3 of 4 GEMMs of many rows take another algorithm than torch's, measured in "
    assert line.startswith(said) and line.endswith(" s")
    chosen = cublaslt.in_use[torch.device("cpu")]
    assert chosen.choices == {SIZES: {80: algo(2), 96: None, 97: algo(1)}, GemmShape(BF16, 64, 32): {80: algo(2)}}
    check(plain(80, 32), second)
    assert lib.gemms == 1
    said = "3 of 4 GEMMs of many rows take another algorithm than torch's, read from this node in "
    assert autotune.tune(given).startswith(said) and len(gpu) == 2
    assert autotune.tune([autotune.TuneRequest(first, [80])]).startswith("1 of 1 ") and len(gpu) == 3


def test_gemms_with_a_bias_are_chosen_apart(gpu, monkeypatch):
    """With algorithms of their own, in the file too."""
    put(Lib(), {}, monkeypatch)
    weight = plain(48, 512)
    plain_one, biased = (autotune.TuneRequest(weight, [80], bias=bias) for bias in (False, True))
    autotune.tune([plain_one, biased])
    assert gpu == [(48, 512, [80], [weight.data_ptr()])] * 2
    shape = GemmShape(BF16, 48, 512)
    wanted = [shape._replace(bias=bias) for bias in (False, True)]
    assert cublaslt.in_use[torch.device("cpu")].choices == {one: {80: algo(2)} for one in wanted}
    for given in ([plain_one, biased], [biased], [plain_one]):
        autotune.tune(given)
    assert len(gpu) == 4 and "read from this node" in autotune.tune([biased])


def test_weights_in_f32_are_left_to_torch(gpu):
    assert autotune.tune([autotune.TuneRequest(plain(48, 32, torch.float32), [80])]) == "" and not gpu


def test_without_the_library_torch_multiplies(folder, monkeypatch):
    """A machine where torch was built with the library inside, or for another version of CUDA."""
    monkeypatch.setattr(cublaslt, "load", cublaslt.load.__wrapped__)
    monkeypatch.setattr(cublaslt.Path, "read_text", lambda path: "7f r--p 0 08:01 9   /lib/libcublasLt.so.11\n")
    assert "libcublasLt.so.12" in autotune.tune([autotune.TuneRequest(plain(48, 32), [80])])
    monkeypatch.setattr(cublaslt, "load", lambda: Broken())
    said = autotune.tune([autotune.TuneRequest(plain(48, 32), [80])])
    assert "torch's algorithms: cublasLtCreate fails" in said
    assert not cublaslt.in_use and not list(folder.iterdir())


class Event:
    """Events of a GPU on which torch takes 100 us for a GEMM, and the n-th algorithm what `COSTS` says."""

    lib, torchs, COSTS = None, 0, (120, 97, 60, 90, 50)

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = self.torchs * 100 + sum(self.COSTS[algorithm] for algorithm, _ in self.lib.seen)

    def elapsed_time(self, end):
        return end.at - self.at


def test_what_was_multiplied_is_given_back(gpu, monkeypatch):
    """Before graphs are captured, which have a pool of their own."""
    made, emptied = [], []

    class Trial(autotune.Benchmark):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(weakref.ref(self))

        def times(self, rows, algos):
            return [1.0] * len(algos)

    monkeypatch.setattr(autotune, "_measure", MEASURE)
    monkeypatch.setattr(autotune, "Benchmark", Trial)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([trial() for trial in made]))
    put(Lib(), {}, monkeypatch)
    autotune.tune([autotune.TuneRequest(plain(48, 32), [80]), autotune.TuneRequest(plain(64, 32), [80])])
    assert emptied == [[None, None]]


@pytest.fixture
def measuring(monkeypatch):
    """The library whose GEMMs Event counts, and the GPU's pauses."""
    slept, whole, biased = [], torch.mm, torch.addmm

    def mm(x, weight, out):
        Event.torchs += 1
        return whole(x, weight, out=out)

    def addmm(bias, x, weight, out):
        Event.torchs += 1
        return biased(bias, x, weight, out=out)

    def measuring(lib):
        Event.lib, Event.torchs = put(lib, {}, monkeypatch), 0
        return cublaslt.in_use[torch.device("cpu")], slept

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    return measuring


@pytest.mark.parametrize("bias", [False, True])
def test_measuring(bias, measuring, monkeypatch):
    """Refused algorithms do not count, however fast; weights take turns."""
    made, slept = measuring(Lib(proposals=4, works=(0, 1, 3)))
    monkeypatch.setattr(torch, "mm" if bias else "addmm", None)
    weights = [plain(48, 32) for _ in range(3)]
    found = autotune._measure(made, SIZES._replace(bias=bias), weights, [80, 96], None)
    assert found == [algo(3)] * 2
    assert len(slept) == 2 * (2 + autotune.ROUNDS)
    used = {address for _, address in Event.lib.seen}
    assert used == {weight.data_ptr() for weight in weights}


def test_leaders_are_measured_for_all_rows(measuring):
    made, _ = measuring(Lib(works=(0, 1, 4), proposed={80: [0, 1], 96: [1, 4], 112: []}))
    assert autotune._measure(made, SIZES, [plain(48, 32)], [80, 96, 112], None) == [algo(4)] * 3


def test_where_nothing_is_faster_torch_stays(measuring):
    made, _ = measuring(Lib(works=(0, 1), proposals=2))
    assert autotune._measure(made, SIZES, [plain(48, 32)], [80], None) == [algo(1)]
    made, _ = measuring(Lib(works=(0,), proposals=1))
    assert autotune._measure(made, SIZES, [plain(48, 32)], [80], None) == [None]


def test_gemms_with_reduce_scatter_are_measured_among_proposals(gpu, monkeypatch):
    """Proposals write to the peer; torch cannot. What is summed faster otherwise, or does not fit, is left out."""
    peers = SymmetricMemory(1, 3, 1 << 30, 1 << 20)
    monkeypatch.setattr(gemm_reduce_scatter, "ALIGNED", 32)
    monkeypatch.setattr(gemm_reduce_scatter, "SENT", 80 * 48 * 2)
    put(Lib(), {}, monkeypatch)
    weight = plain(48, 32)
    line = autotune.tune([autotune.TuneRequest(weight, [80]), autotune.TuneRequest(weight, [80, 97, 1 << 20], peers)])
    assert line.startswith("1 of 1 GEMMs")
    assert gpu == [(48, 32, [80], [weight.data_ptr()]), (48, 32, [97], [weight.data_ptr()], peers)]
    chosen = cublaslt.in_use[torch.device("cpu")].choices
    assert chosen == {SIZES: {80: algo(2)}, GemmShape(BF16, 48, 32, 3, 1 << 19): {97: algo(1)}}


@pytest.mark.parametrize("bias", [False, True])
def test_measuring_gemms_with_reduce_scatter(bias, measuring, monkeypatch):
    made, _ = measuring(Lib(proposals=4, works=(1, 2, 3)))
    monkeypatch.setattr(torch, "mm", None)
    monkeypatch.setattr(torch, "addmm", None)
    peers, _regions = in_memory(size=2, rank=1)
    monkeypatch.setattr(gemm_reduce_scatter, "recv_buffer_at", lambda size: 0)
    weight = plain(48, 32)
    sizes = gemm_reduce_scatter.sizes(weight, peers, bias)
    assert autotune._measure(made, sizes, [weight], [80], peers) == [algo(2)]
    Event.lib.works = ()
    assert autotune._measure(made, sizes, [weight], [96], peers) == [None]


class Broken(Lib):
    def cublasLtCreate(self, handle):
        return 1
