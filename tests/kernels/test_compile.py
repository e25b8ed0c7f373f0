"""The kernels compile for every supported generation, also where no GPU is."""

import ast
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from phalanx import errors
from phalanx.kernels import jit, kernel_cache
from phalanx.kernels.candidate import choose
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.gemm import gemv, linear, pipelined_gemm
from phalanx.kernels.rope.fp8_cache import E4M3
from phalanx.kernels.rope.rope import CosSin, CurrentKV, QKNorm

from ..kept import kept, version
from .programs import PROGRAMS


def compile_program(text: str, arch: str, folder) -> None:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError):
        if shutil.which("nvcc") is None:
            pytest.skip("neither CuPy's NVRTC nor nvcc is installed")
        source = folder / "program.cu"
        source.write_text(text)
        command = ["nvcc", f"-arch={arch}", "-std=c++17", "-cubin"]

        def make(binary: Path) -> None:
            done = subprocess.run([*command, "-o", str(binary), str(source)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr

        assert kept(make, *command, version("nvcc"), text).stat().st_size
    else:
        assert jit.compile_text("program", text, arch)


def checked(programs, archs=("sm_80", "sm_90a", "sm_100")):
    """The first program of each source, and of its caches in e4m3, for all generations, any other for Hopper: what
    generations differ in, the preprocessor decides, mostly the same for all sizes.

    All but each source's first one for Hopper are marked long; Triton's for a plain cache and for one in e4m3 are two
    sources. `make test` samples what is not marked. What Hopper's copies are for is empty before it.
    """
    kinds, sources, found = set(), set(), []
    for program in programs:
        kind = kind_of(program)
        first, short = kind not in kinds, kind[0] not in sources
        kinds.add(kind)
        sources.add(kind[0])
        for arch in archs if first else archs[1:2]:
            if arch == "sm_80" and needs_hopper(program):
                continue
            marks = [] if short and arch == archs[1] else [pytest.mark.long]
            found.append(pytest.param(*program, arch, marks=marks))
    return found


def kind_of(program):
    """Its source, whether its cache is in e4m3 and what brings its tiles; Triton's have e4m3 last, and a type."""
    sizes = program[-1]
    return (program[0], sizes.get("FP8", 0), sizes.get("TILES")) if isinstance(sizes, dict) else (sizes, program[0])


def needs_hopper(program) -> bool:
    return isinstance(program[-1], dict) and "fence_mbarrier_init();" in jit.variant_text(program[0], program[-1])


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """Compiles each of the chosen programs, by its test's name: as many at a time as there are cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = {}
        for item in request.session.items:
            if getattr(item, "function", None) is test_compiles:
                one = item.callspec.params
                text = jit.variant_text(one["source"], one["sizes"])
                made[item.name] = pool.submit(compile_program, text, one["arch"], tmp_path_factory.mktemp("program"))
        yield made
        pool.shutdown(cancel_futures=True)


@pytest.mark.sample(3)  # as C++, the short run compiles the others, too (cuda_model.py)
@pytest.mark.parametrize("source, sizes, arch", checked(PROGRAMS))
def test_compiles(source, sizes, arch, request, compiled, tmp_path):
    if future := compiled.pop(request.node.name, None):
        future.result()
    else:  # tried again: the compiler itself may not have started
        compile_program(jit.variant_text(source, sizes), arch, tmp_path)


class Recorder:
    """In a kernel's place: keeps what it would be launched with."""

    def __init__(self):
        self.found = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.found.append((args, options))


# Arguments of Triton's decode: dtype, heads, key heads, head size, splits, window, cap, norms; None: turned before.
DECODES = [
    (torch.bfloat16, 32, 8, 128, 1, 0, 0.0, False),
    (torch.bfloat16, 32, 8, 128, 32, 0, 0.0, True),
    (torch.bfloat16, 28, 4, 128, 4, 0, 50.0, None),
    (torch.float16, 64, 4, 256, 8, 4096, 50.0, True),
    (torch.float16, 3, 3, 80, 2, 0, 0.0, False),
    (torch.bfloat16, 12, 4, 96, 1, 512, 0.0, None),
    (torch.float32, 8, 2, 64, 32, 0, 0.0, True),
    (torch.float32, 16, 1, 112, 2, 100, 30.0, False),
]
DECODES = [(*one, False) for one in DECODES]  # and whether the cache is e4m3
DECODES[1:1] = [(*DECODES[1][:-1], True)]
DECODES += [(*DECODES[i][:-1], True) for i in (4, 5, 7)]
PROMPTS = [(torch.bfloat16, 128, 0, 0.0, True)]
PROMPTS += [(*one, cap, False) for one in ((torch.bfloat16, 128, 0), (torch.float16, 256, 4096)) for cap in (0.0, 50.0)]
TRITON = (80, 90, 100)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "dtype, heads, kv_heads, dim, splits, window, cap, normed, fp8, arch", checked(DECODES, TRITON)
)
def test_decode_kernel_compiles(dtype, heads, kv_heads, dim, splits, window, cap, normed, fp8, arch, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.attention import attention_triton

    kernel, launches = attention_triton.decode_kernel, Recorder()
    monkeypatch.setattr(attention_triton, "decode_kernel", launches)
    monkeypatch.setattr(attention_triton, "_overlaps", lambda _: arch >= 90)
    wide, cache = torch.zeros(2, heads + 2 * kv_heads, dim, dtype=dtype), torch.zeros(2, 3, 16, kv_heads, dim).to(dtype)
    q, k, v = wide.split([heads, kv_heads, kv_heads], 1)
    norms = QKNorm(wide[0, 0], wide[0, 0], 1e-6) if normed else None
    new = CurrentKV(k, v, CosSin(*torch.zeros(2, 2, 1, dim)), norms, torch.zeros(2, dtype=torch.int64))
    tables, lengths = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    new = None if normed is None else new
    sinks = torch.zeros(heads) if window == 512 else None
    cache, scales = as_stored(cache, fp8)
    for query_len in (1, 2) if new is None else (1,):
        attention_triton.decode(
            q, *cache, tables, lengths, torch.empty_like(q), dim**-0.5, window, cap, sinks, splits, new, scales,
            query_len,
        )  # fmt: skip
    for launch in launches.found:
        compiled = compile_launch(kernel, *launch, arch)
        assert compiled.metadata.shared <= (227 if arch >= 90 else 163) << 10


def as_stored(cache, fp8):
    """Keys and values, and their scales if they are to be e4m3."""
    if not fp8:
        return cache, None
    return cache.to(E4M3), torch.zeros(cache.shape[1], cache.shape[3], 2, cache.shape[2], dtype=torch.uint8)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype, dim, window, cap, fp8, arch", checked(PROMPTS, TRITON))
def test_prompt_kernel_compiles(dtype, dim, window, cap, fp8, arch, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.attention import attention_triton

    kernel, launches = attention_triton.prefill_kernel, Recorder()
    monkeypatch.setattr(attention_triton, "prefill_kernel", launches)
    q, cache = torch.zeros(200, 8, dim, dtype=dtype), torch.zeros(2, 3, 16, 4, dim, dtype=dtype)
    tables, ends = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    sinks = torch.zeros(8) if window and not cap else None
    cache, scales = as_stored(cache, fp8)
    reach = torch.zeros(200, dtype=torch.int32) if window and cap else None
    attention_triton.prefill(
        q, *cache, tables, ends, ends, torch.empty_like(q), dim**-0.5, window, cap, sinks, 0, 2, 200, scales, reach
    )
    assert compile_launch(kernel, *launches.found[0], arch).metadata.shared <= (227 if arch >= 90 else 163) << 10


def compile_launch(kernel, args, options, arch: int):
    """For any generation, as a launch with these arguments would, pointers and multiples of 16 aligned."""
    import triton
    from triton.backends.compiler import GPUTarget

    types = {torch.uint8: "u8", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    types |= {torch.int32: "i32", torch.int64: "i64"}
    signature, constants, aligned = {}, {}, {}
    for i, (parameter, x) in enumerate(zip(kernel.params, args, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[parameter.name] = "*" + types[x.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(x, float) else "i32"
        told = not parameter.is_constexpr and not parameter.do_not_specialize
        if isinstance(x, torch.Tensor) or (told and isinstance(x, int) and x % 16 == 0):
            aligned[i,] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


FUNCTION = re.compile(r'extern "C" __global__ void\s+(?:PAIRED\s+)?(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(')


def test_every_function_that_is_looked_up_is_there_and_no_other():
    """Only a GPU would tell otherwise."""
    there = {
        path.stem: set(FUNCTION.findall(path.read_text())) for path in jit.SOURCES.values() if path.suffix == ".cu"
    }
    assert all(there.values())
    words = set()
    kernels = Path(jit.__file__).parent
    for path in [*kernels.rglob("*.py"), *(kernels.parent / "rank").rglob("*.py")]:
        text = path.read_text()
        words.update(re.findall(r'"(\w+)"', text))
        for node in ast.walk(ast.parse(text)) if "jit.kernel" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "jit.kernel":
                source, name = node.args[:2]
                if not isinstance(source, ast.Constant):  # of a table, whose sources are named as their functions
                    assert ast.unparse(source) == ast.unparse(name), ast.unparse(node)
                    continue
                assert not isinstance(name, ast.Constant) or name.value in there[source.value], ast.unparse(node)
    assert set().union(*there.values()) <= words


def test_every_source_is_tried():
    assert {path.stem for path in jit.SOURCES.values() if path.suffix == ".cu"} == {source for source, _ in PROGRAMS}


def test_a_program_is_compiled_once_and_kept(tmp_path, monkeypatch, caplog):
    """Which is told once: it takes a while."""
    caplog.set_level("INFO", "phalanx")
    monkeypatch.setattr(jit, "_told", set())
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    calls = []
    monkeypatch.setattr(jit, "compile_text", lambda *a: calls.append(a) or b"binary")
    assert jit.cached("norm", "text", "sm_90") == jit.cached("norm", "text", "sm_90") == b"binary"
    assert jit.cached("gemv", "text", "sm_90") == b"binary" and len(calls) == 2
    (said,) = caplog.messages
    assert "compiling" in said and "sm_90" in said
    assert jit.cached("norm", "text", "sm_80") == b"binary" and len(calls) == 3


def test_programs_are_compiled_ahead(tmp_path, monkeypatch):
    """Each once; one that fails leaves the others alone, and its words are for who needs it, who waits meanwhile."""
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(jit, "device_caps", lambda device: DeviceCaps(132, "sm_90a", True, True, True))
    begun, go, calls = threading.Event(), threading.Event(), []

    def compile_text(name, text, arch):
        calls.append((name, arch))
        begun.set()
        assert go.wait(20)
        if "FAILS" in text:
            raise errors.FatalError("no", 1)
        return text.encode()

    monkeypatch.setattr(jit, "compile_text", compile_text)
    good, bad = (jit.variant("norm", torch.bfloat16, N=64, V=8, **more) for more in ({}, {"FAILS": 1}))
    jit.compile_ahead([bad, good, good, jit.variant("norm", torch.bfloat16, V=8, N=64)], torch.device("cuda", 0))
    assert begun.wait(20)
    threading.Timer(0.2, go.set).start()
    assert jit.cached("norm", good.text, "sm_90a") == good.text.encode()
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join(20)
    assert calls == [("norm", "sm_90a")] * 2
    assert len(list(tmp_path.glob("*.cubin"))) == 1
    with pytest.raises(errors.FatalError, match="no"):
        jit.cached("norm", bad.text, "sm_90a")


@pytest.mark.parametrize(
    "found", [DeviceCaps(132, "sm_90a", True, True, True), DeviceCaps(148, "sm_100", True, True, False)]
)
@pytest.mark.parametrize("outputs, inputs", [(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (1000, 100)])
def test_what_products_of_a_few_rows_are_compiled_as(found, outputs, inputs, monkeypatch):
    asked, rows = [], [1, 2, 4, *range(8, 65, 8)]
    for module in (gemv, pipelined_gemm):
        monkeypatch.setattr(module, "device_caps", lambda device: found)
        monkeypatch.setattr(module, "readable", lambda *_: True)
    monkeypatch.setattr(jit, "tensor_map", lambda *_: None)
    monkeypatch.setattr(
        jit, "kernel", lambda *a, **sizes: asked.append(jit.variant(a[0], a[2], **sizes)) or (lambda *_, **__: None)
    )
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    for gated, bias in (("", None), ("silu", None), ("", weight[0])):
        asked.clear()
        for n in rows:
            x = torch.empty(n, inputs, dtype=torch.bfloat16, device="meta")
            if one := choose(linear.GPU[:2], x, weight, gated, bias):
                one.run(x, weight, gated, bias)
        assert list(linear.variants(rows, weight, gated, bias is not None, found)) == asked and bool(asked) is (
            outputs != 1000
        )
    assert not list(linear.variants(rows, weight.float(), "", False, found))


def test_a_folder_that_others_write_to_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = kernel_cache.cache_folder()
    assert folder == kernel_cache.cache_folder()
    folder.chmod(0o777)
    with pytest.raises(errors.FatalError) as stop:
        kernel_cache.cache_folder()
    assert str(folder) in str(stop.value) and "remove" in str(stop.value)
    assert stop.value.code == errors.USAGE


def test_nowhere_to_keep_binaries(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path / "absent"))
    with pytest.raises(errors.FatalError) as stop:
        kernel_cache.cache_folder()
    folder = tmp_path / "absent" / f"phalanx-kernels-{os.getuid()}"
    assert f"folder {folder}" in str(stop.value)


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)  # where it has been imported before
    with pytest.raises(errors.FatalError, match="CuPy .*make install TORCH=cuda"):
        jit.compile_text("norm", "", "sm_90")


def test_the_compilers_words(monkeypatch):
    class NVRTCError(Exception):
        pass

    def compile_program(*_):
        raise NVRTCError("NVRTC_ERROR_COMPILATION")

    nvrtc = SimpleNamespace(
        NVRTCError=NVRTCError, createProgram=lambda *_: 1, compileProgram=compile_program,
        getProgramLog=lambda _: "norm.cu(3): error: expected a ;", destroyProgram=lambda _: None,
    )  # fmt: skip
    for name, module in (("cupy", ModuleType("cupy")), ("cupy.cuda", SimpleNamespace(nvrtc=nvrtc))):
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(errors.FatalError) as stop:
        jit.compile_text("norm", "", "sm_90")
    assert "sm_90: NVRTC_ERROR_COMPILATION" in str(stop.value)


def test_an_error_of_the_driver_is_named(monkeypatch):
    def text(status, found):
        found._obj.value = b"out of memory"

    monkeypatch.setattr(jit, "libcuda", lambda: SimpleNamespace(cuGetErrorString=text))
    jit.check(0, "norm")
    with pytest.raises(RuntimeError, match="error 2 in norm"):
        jit.check(2, "norm")


def test_vector_follows_alignment():
    x = torch.empty(64, dtype=torch.float16)
    assert jit.vector(x, 64) == 8 and jit.vector(x, 12) == 4 and jit.vector(x, 33) == 1
    assert jit.vector(x[1:], 64) == 1 and jit.vector(x, 64, most=4) == 2
