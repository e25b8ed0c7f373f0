"""C++ operations in the best instruction set that this processor has and, in the long run, in its others."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from phalanx.kernels.cpp import compiler, ops

from .. import leftovers
from . import cuda_model


@functools.cache
def libraries(isa, *sources):
    """Libraries of these sources, or of all: compiled in the user's folder, where other workers of pytest find them,
    and handed on to what tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(leftovers.USUAL))
        found = compiler.load_all(sorted(sources or compiler.SOURCES), isa)
    leftovers.hand_on_kernels(leftovers.USUAL, Path(tempfile.gettempdir()))
    return found


def compiles(isa):
    """Whether the compiler knows these instructions: an old one does not know all that a new processor has."""
    try:
        compiler.compile_text("", isa, "trial")
    except compiler.CompileError:
        return False
    return True


def best_first(isas):
    """From the best that the compiler knows on; all of them where it does not work. The long run has the lesser ones:
    all sources are compiled for each."""
    first = next((i for i, isa in enumerate(isas) if compiles(isa)), 0)
    return [pytest.param(isa, marks=[pytest.mark.long] if i else []) for i, isa in enumerate(isas[first:])]


@pytest.fixture(params=best_first(compiler.isas()))
def isa(request, monkeypatch):
    """Operations are those of this instruction set; where there is no compiler, the test is skipped."""
    if not ops.available():
        pytest.skip("no C++ compiler that works")
    found = libraries(request.param)
    monkeypatch.setattr(ops, "libraries", lambda: found)
    ops.op.cache_clear()
    yield request.param
    ops.op.cache_clear()


VECTORS = "avx512_bf16"
EMULATED, OPTIMISED = "emulated tiles", "optimised emulated tiles"
TILED = "int8_planes_cpu", "host_experts", "int4_cpu", "mxfp4_cpu", "q8_0_cpu", "super_blocks_cpu"  # sources
TILES = [
    pytest.param(EMULATED, marks=pytest.mark.skipif(VECTORS not in compiler.isas(), reason="no AVX-512 with bf16")),
    pytest.param("amx", marks=pytest.mark.skipif("amx" not in compiler.isas(), reason="no AMX, or not permitted")),
]


@pytest.fixture
def tiled(monkeypatch):
    """Called with one of TILES, or VECTORS: operations are those from then on."""
    if not ops.available():
        pytest.skip("no C++ compiler that works")
    needed, flags = compiler.ISAS[VECTORS]
    # Optimised as users' libraries are, what no user runs takes three times as long to compile.
    for isa, optimised in ((EMULATED, ["-Og"]), (OPTIMISED, [])):
        monkeypatch.setitem(compiler.ISAS, isa, (needed, (*flags, "-DEMULATED_TILES", *optimised)))

    def use(isa):
        found = libraries(VECTORS) | (libraries(isa, *TILED) if isa != VECTORS else {})
        monkeypatch.setattr(ops, "libraries", lambda: found)
        ops.op.cache_clear()
        assert ops.has("host_experts", "pair_rows") == (isa != VECTORS)  # compiled with tiles, or without

    yield use
    ops.op.cache_clear()


@pytest.fixture(scope="session")
def cuda_models(tmp_path_factory):
    return cuda_model.Builder(tmp_path_factory.mktemp("cuda_models"))


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def called(monkeypatch):
    """Names of the operations that were run; new tensors are poisoned, so that what none has written is seen."""
    names, run = [], ops.run

    def told(*calls):
        names.extend(one.name for one, _ in calls)
        run(*calls)

    monkeypatch.setattr(ops, "run", told)
    real = torch.Tensor.new_empty
    poison = lambda x: x.fill_(float("nan") if x.is_floating_point() else -7)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: poison(real(x, *a, **k)))
    return names


DTYPES = [torch.float32, torch.bfloat16]
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}  # of operations' names


def close(got, want, dtype, atol=1e-5, rtol=1e-5):
    """Compares as closely as dtype can promise; `want` is computed in f32 or wider."""
    assert got.dtype == dtype
    if dtype == torch.bfloat16:
        atol, rtol = max(atol, 1e-2), 1e-2
    torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=rtol, equal_nan=True)


def planes_error(dtype, weight):
    """The error that rows as whole numbers (kernels/cpp/int8_planes.h), of 23 bits or 15, leave of a sum, however small
    that is, by the largest of the weights [O, I]. Of 15 bits 7e-6 was the most in 400,000 sums."""
    size = weight.abs().max().item() * weight.shape[1] ** 0.5
    return (4e-6 if dtype == torch.float32 else 2e-5) * max(1, size)
