"""Runs a .cu of kernels/ on a CPU, thread by thread, as cuda_model.h has it: no GPU tells more of its indices."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from phalanx.kernels import jit

from ..kept import kept, version

HEADER, SHARED = (Path(__file__).with_suffix(ending) for ending in (".h", ".cpp"))
# hidden: each library has its own model.
COMMAND = ("-Og", "-fno-exceptions", "-fno-rtti", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-w")
REPLACED = ("common.cuh", "tma.cuh", "async_copy.cuh", "mma.cuh", "wgmma.cuh", "half2.cuh")
FUNCTION = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\(.*\)\s*)?(\w+)\(([^)]*)\)')
RUN = "void run_kernel(void** args) {{ {call}; }}"


class Box(ctypes.Structure):
    """A TensorMap of a matrix [rows, columns] of 16-bit elements, in boxes of `height` rows by 64, or by runs."""

    _fields_ = [
        ("start", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "columns", "height", "runs", "run")),
    ]


class Builder:
    """Compiles kernels, each once, and before them what is the same for all."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._built: dict[str, ctypes.CDLL] = {}
        self._copied = [*sorted(HEADER.parent.glob(f"{HEADER.stem}*.h")), SHARED]
        self._shared: Path | None = None

    def build(self, source: str, sizes: dict, name: str | None = None) -> ctypes.CDLL:
        """The library of a source's kernel `name`, or of its only one, for the element type T and sizes of `sizes`."""
        text = model_text(source, sizes, name)
        if text not in self._built:
            self._built[text] = ctypes.CDLL(str(self._kept(lambda library: self._make(text, library), text)))
        return self._built[text]

    def _kept(self, make: Callable[[Path], object], text: str) -> Path:
        return kept(make, *COMMAND, version(_compiler()), *(one.read_text() for one in self._copied), text)

    def _make(self, text: str, library: Path) -> None:
        if self._shared is None:
            for one in self._copied:
                shutil.copy(one, self._folder)
            self._compile("-x", "c++-header", HEADER.name, "-o", f"{HEADER.name}.gch")
            self._shared = self._kept(lambda made: self._compile("-c", SHARED.name, "-o", str(made)), "")
        (self._folder / "kernel.cpp").write_text(text)
        self._compile("-shared", "kernel.cpp", "-x", "none", str(self._shared), "-o", str(library))

    def _compile(self, *words: str) -> None:
        command = [_compiler(), *COMMAND, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=self._folder)
        assert done.returncode == 0, done.stderr


def _compiler() -> str:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    return compiler


def included(text: str) -> str:
    def header(line: re.Match) -> str:
        return "" if line[1] in REPLACED else included(jit.SOURCES[line[1]].read_text())

    return re.sub(r'#include "(.*)"', header, text)


def model_text(source: str, sizes: dict, name: str | None = None) -> str:
    text = jit.SOURCES[f"{source}.cu"].read_text()
    for key, value in sizes.items():
        text = text.replace(f"#include {key}\n", f'#include "{value}.cuh"\n')
    text = included(text)
    text = text.replace("extern __shared__ uint4 memory[];", "uint4* const memory = (uint4*)(model::smem + 16);")
    text = text.replace("__shared__ alignas(8)", "static").replace("__shared__", "static")
    ((name, parameters),) = [one for one in FUNCTION.findall(text) if name in (None, one[0])]
    types = [re.sub(r"\w+$", "", one.replace("__grid_constant__", "")).strip() for one in parameters.split(",")]
    call = f"{name}({', '.join(f'*({one}*)args[{i}]' for i, one in enumerate(types))})"
    given = [
        f"constexpr int {key} = {value};" if isinstance(value, int) else f"typedef {jit.TYPES[value]} {key};"
        for key, value in sizes.items()
        if not isinstance(value, str)
    ]
    return "\n".join([f'#include "{HEADER.name}"', *given, text, RUN.format(call=call)])


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold NaN, so that what no kernel has written is seen."""

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else 0x7F)

    new, empty = torch.Tensor.new_empty, torch.empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: poison(new(x, *a, **k)))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))


def launch(
    library: ctypes.CDLL, grid: tuple[int, int, int], threads: int, args: tuple, weights: torch.Tensor, seed: int = 0,
    x: torch.Tensor | None = None, writes: Sequence[tuple[torch.Tensor, torch.Tensor]] = (), any_order: bool = False,
    cluster: int = 1,
) -> None:  # fmt: skip
    """weights: what may be streamed, and copied in bulk; x: what may be copied in bulk, too. What a thread does that a
    GPU would not bear is an error.

    writes: contiguous tensors that the kernel before writes, each with what it holds before that. any_order: of blocks.
    cluster: blocks of one, along the grid's x, whose kernel has no shared memory but dynamic.
    """
    values = [_c_value(one) for one in args]
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(one) for one in values])
    begin, end = weights.data_ptr(), weights.data_ptr() + weights.nbytes
    of_x = [None, None] if x is None else [x.data_ptr(), x.data_ptr() + x.nbytes]
    for after, before in writes:
        to, there = (ctypes.c_void_p(one.data_ptr()) for one in (after, before))
        library.write(to, there, to, after.nbytes)
    library.launch.restype = ctypes.c_char_p
    ends = [ctypes.c_void_p(one) for one in (begin, end, *of_x)]
    failed = library.launch(*ends[:2], grid[0], grid[1], threads, seed, pointers, *ends[2:], any_order, cluster)
    assert not failed, failed.decode()


def _c_value(x: Box | torch.Tensor | float) -> Box | ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if isinstance(x, Box):
        return x
    if isinstance(x, float):
        return ctypes.c_float(x)
    return ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else ctypes.c_int(x)
