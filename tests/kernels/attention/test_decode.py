"""The CUDA kernel for decoding sequences, decode.cu, thread by thread on a CPU."""

from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.attention import decode, kv_boxes
from phalanx.kernels.rope.fp8_cache import E4M3

from .. import cuda_model
from . import decoding
from .decoding import Case, takes

BOUNDS = {torch.bfloat16: 2.5e-2, torch.float16: 3e-3}


class Launcher:
    """In place of jit's: kernels run in the model, blocks in any order. New tensors hold NaN."""

    def __init__(self, monkeypatch, models):
        self.models, self.counts, self.seed, self.sms = models, torch.zeros(1 << 10, dtype=torch.int32), 0, 4
        for made in (decode._made, decode._parts, kv_boxes._maps):  # by other launchers
            made.cache_clear()
        monkeypatch.setattr(jit, "kernel", self.kernel)
        monkeypatch.setattr(jit, "counters", lambda *_: self.counts)
        monkeypatch.setattr(
            jit, "tensor_map", lambda at, rows, columns, high, _, *of: cuda_model.Box(at, rows, columns, high, *of)
        )
        monkeypatch.setattr(decode, "device_caps", lambda _: SimpleNamespace(num_sms=self.sms))
        monkeypatch.setattr(decode, "boxed", lambda *_: True)
        monkeypatch.setattr(decode, "current_stream", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        cuda_model.poison_new_tensors(monkeypatch)

    def kernel(self, source, name, dtype, shared=0, **sizes):
        library = self.models.build(source, {"T": dtype, **sizes})

        def launch(grid, threads, *args, shared=0, overlap):
            assert shared <= 227 << 10 and overlap
            self.seed += 1
            q, scales = args[4], args[14]
            made = q if q._base is None else q._base  # by the kernel before
            writes = [(made, torch.full_like(made, decoding.NAN))]
            cuda_model.launch(library, grid, threads, args, scales, seed=self.seed, writes=writes, any_order=True)

        return launch


@pytest.fixture
def launcher(monkeypatch, cuda_models):
    torch.manual_seed(0)
    return Launcher(monkeypatch, cuda_models)


def check(launcher: Launcher, case: Case, dtype: torch.dtype) -> None:
    decoding.check(case, dtype, BOUNDS[dtype], by_boxes=True)
    assert not launcher.counts.any()


# Sequences that lie in one run and in several, runs of several sequences, boxes of several sizes and one that is not
# full, windows, sinks, heads of each size.
CASES = [
    Case([0, 1, 16, 17, 31, 300], normed=True),
    Case([700, 1, 90], 8, 2, 128, unwritten=(2,)),
    Case([777, 5], 5, 1, block_size=24),
    Case([100, 1, 90, 200, 650], dim=128, window=33, block_size=128),
    Case([400, 65, 70], 4, 2, 256, block_size=8),
    Case([0, 1, 64, 65, 700], 9, 1, window=128, sinks=True, cap=1.5),
    Case([400, 1, 90], 4, 4, 80, normed=True, window=33, unwritten=(2,)),
    Case([0, 17, 500], 9, 1, 96, normed=True, cap=1.5),
    Case([300, 1, 70], 4, 2, 96, block_size=8, window=65, sinks=True),
    Case([300, 31], 7, 1, 112, block_size=64),
    Case([300, 1, 33], 5, 1, 160, normed=True, cap=1.5),
    Case([200, 65], 4, 2, 192, window=100, sinks=True),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES)
def test_decode(case, launcher):
    check(launcher, case, torch.bfloat16)


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", [one for case in CASES if takes(one := case._replace(fp8=True))])
def test_cache_in_e4m3(case, launcher):
    check(launcher, case, torch.float16)


def test_each_sequence_and_key_head_has_a_counter():
    assert decode.SEQUENCES * kv_boxes.KV_HEADS <= jit.COUNTERS


def test_codes_come_32_at_a_time(launcher):
    scales = torch.zeros(3, 2, 2, 16, dtype=torch.uint8)
    for dim in kv_boxes.DIMS:
        q, keys = torch.zeros(5, 4, dim), torch.zeros(3, 16, 2, dim)
        assert decode.supports_decode(5, q, keys)
        assert decode.supports_decode(5, q, keys.to(E4M3), None, scales) is (dim % 32 == 0)


@pytest.mark.sample(8)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case([2500], 2, 1, 128), Case([1300, 1, 900, 300], 2, 1, sinks=True), Case([1100, 700], 2, 1, 96),
        Case([5, 900], 2, 1, 160),
    ],
)  # fmt: skip
def test_a_sequence_in_many_parts(case, fp8, launcher, monkeypatch):
    """More than a warp has lanes."""
    monkeypatch.setattr(decode, "LEAST", 1)
    launcher.sms = 20
    check(launcher, case._replace(fp8=fp8), torch.float16)
