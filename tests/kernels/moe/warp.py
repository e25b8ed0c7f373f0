"""Runs choose_experts of router.cu on a CPU: 32 lanes that take turns at each shuffle."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from phalanx.kernels import jit
from torch import Tensor

HEAD = """
#include <ucontext.h>
#include <cmath>
#include <cstring>
#define __device__
static struct { int x; } threadIdx;
static ucontext_t lanes[32], caller;
static char stacks[32][64 << 10];
static void next_lane() {  // comes back when all others have come to the same place
    int lane = threadIdx.x;
    threadIdx.x = (lane + 1) % 32;
    swapcontext(&lanes[lane], &lanes[threadIdx.x]);
}
static float shared[32];
template <typename T> static T __shfl_xor_sync(unsigned, T x, int step) {
    memcpy(shared + threadIdx.x, &x, 4);
    next_lane();
    memcpy(&x, shared + (threadIdx.x ^ step), 4);
    next_lane();
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
static struct { const float *logits, *bias; int* ids; float* weights; int rows; float scale; } given;
static void lane_main() {
    for (int r = 0; r < given.rows; r++)
        choose_experts(
            given.logits + r * EXPERTS, given.bias, given.ids + r * TOP, given.weights + r * TOP, given.scale);
    threadIdx.x++;  // of the lane that goes on
}
extern "C" void choose(const float* logits, const float* bias, int* ids, float* weights, int rows, float scale) {
    given = {logits, bias, ids, weights, rows, scale};
    for (int lane = 0; lane < 32; lane++) {
        getcontext(&lanes[lane]);
        lanes[lane].uc_stack.ss_sp = stacks[lane];
        lanes[lane].uc_stack.ss_size = sizeof stacks[lane];
        lanes[lane].uc_link = lane < 31 ? &lanes[lane + 1] : &caller;
        makecontext(&lanes[lane], lane_main, 0);
    }
    threadIdx.x = 0;
    swapcontext(&caller, &lanes[0]);
}
"""


def run_warp(
    sizes: dict[str, int], logits: Tensor, bias: Tensor | None, ids: Tensor, weights: Tensor, scale: float, folder: Path
) -> None:
    """Fills ids and weights [rows, k] of logits [rows, experts]. sizes: what router.cu is compiled for."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    text = jit.SOURCES["router.cu"].read_text().partition('#include "mma.cuh"')[0]  # what chooses
    given = [f"constexpr int {name} = {value};" for name, value in sizes.items()]
    (folder / "warp.cpp").write_text("\n".join([HEAD, *given, text, TAIL]))
    library = folder / "warp.so"
    command = [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-o", library, folder / "warp.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (logits, logits if bias is None else bias, ids, weights)]
    ctypes.CDLL(str(library)).choose(*pointers, len(logits), ctypes.c_float(scale))
