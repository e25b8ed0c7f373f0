"""Runs choose_experts of route.cu on a CPU: 32 threads that meet at each shuffle."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from phalanx.kernels import jit
from torch import Tensor

HEAD = """
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
static std::barrier meet(32);
static float shared[32];
static thread_local struct { int x; } threadIdx;
template <typename T> static T __shfl_xor_sync(unsigned, T x, int step) {
    memcpy(shared + threadIdx.x, &x, 4);
    meet.arrive_and_wait();
    memcpy(&x, shared + (threadIdx.x ^ step), 4);
    meet.arrive_and_wait();
    return x;
}
static float warp_sum(float x) {
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0, x, step);
    return x;
}
static float __ldcg(const float* x) { return *x; }
static float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
"""
TAIL = """
extern "C" void choose(const float* logits, const float* bias, int* ids, float* weights, int rows, float scale) {
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 32; lane++)
        lanes.emplace_back([=] {
            threadIdx.x = lane;
            for (int r = 0; r < rows; r++)
                choose_experts(logits + r * EXPERTS, bias, ids + r * TOP, weights + r * TOP, scale);
        });
    for (auto& lane : lanes) lane.join();
}
"""


def run_warp(
    sizes: dict[str, int], logits: Tensor, bias: Tensor | None, ids: Tensor, weights: Tensor, scale: float, folder: Path
) -> None:
    """Fills ids and weights [rows, k] of logits [rows, experts]. sizes: what route.cu is compiled for."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    text = jit.SOURCES["route.cu"].read_text().partition('extern "C"')[0]
    given = [f"constexpr int {name} = {value};" for name, value in sizes.items()]
    (folder / "warp.cpp").write_text("\n".join([HEAD, *given, text, TAIL]))
    library = folder / "warp.so"
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w", "-o", library, folder / "warp.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (logits, logits if bias is None else bias, ids, weights)]
    ctypes.CDLL(str(library)).choose(*pointers, len(logits), ctypes.c_float(scale))
