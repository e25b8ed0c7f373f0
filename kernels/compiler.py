"""How kernels/compiled.py is compiled, and what it needs that Numba has no word for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_name
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..rank.exits import Stop
from . import jit


def _cache() -> str:
    """Where this node keeps what was compiled for its kind of processor; "" where nothing can be kept.

    Numba compiles anew when compiled.py has changed, and does not look at what that takes from here.
    """
    here = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    try:
        return str(jit.cache_folder() / f"numba-{get_host_cpu_name()}-{here}")
    except (OSError, Stop):
        return ""


numba.config.CACHE_DIR = _cache()


def compiled(signature: str, result: str = "void") -> Any:
    """Compile now, or take what this node has compiled before: no step waits for a compiler."""
    options = dict(fastmath={"reassoc", "contract", "nsz"}, nogil=True, error_model="numpy")

    def make(function: Any) -> Any:
        try:
            return numba.njit(f"{result}({signature})", cache=bool(numba.config.CACHE_DIR), **options)(function)
        except Exception:  # what was kept is damaged, or no more can be kept: this process compiles for itself
            return numba.njit(f"{result}({signature})", **options)(function)

    return make


WIDE = ir.VectorType(ir.FloatType(), 16)
LINES = 2 * WIDE.count  # elements of a row at a time, two lines of the cache; processors with shorter vectors take more


@intrinsic
def dots(typing, x, m, weight, o, inputs):
    """x[m] times each of weight[o : o + 4], where LINES divides the inputs.

    Asks for the same of weight[o + 4 : o + 8] meanwhile: what a core reads from memory is bounded by how much of it is
    under way. Measured on two cores at once: 19.6 GB/s each, 16.9 by a plain loop, 18 without asking.
    """
    number, lane = ir.IntType(64), ir.FloatType()

    def code(context, builder, signature, args):
        def start(array, row):
            at = context.make_array(signature.args[array])(context, builder, args[array])
            return builder.gep(at.data, [builder.mul(row, inputs)])

        _, m, _, o, inputs = args
        source, rows = start(0, m), start(2, o)
        zero = ir.Constant(WIDE, [0.0] * WIDE.count)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in range(4)]
        with cgutils.for_range_slice(builder, number(0), inputs, number(LINES)) as (i, _):
            for half in range(2):
                at = builder.add(i, number(half * WIDE.count))
                value = _wide(builder, builder.gep(source, [at]))
                for k in range(4):
                    here = builder.gep(rows, [builder.add(at, builder.mul(inputs, number(k)))])
                    _ask(builder, builder.gep(here, [builder.mul(inputs, number(4))]))
                    product = builder.fmul(value, _wide(builder, here), flags=("contract",))
                    total = builder.fadd(builder.load(sums[k][half]), product, flags=("contract",))
                    builder.store(total, sums[k][half])
        both = [builder.fadd(builder.load(a), builder.load(b)) for a, b in sums]
        kind = ir.FunctionType(lane, [lane, WIDE])
        add = builder.module.declare_intrinsic("llvm.vector.reduce.fadd.v16f32", (), kind)
        found = [builder.call(add, [lane(0.0), one], fastmath=("reassoc",)) for one in both]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.float32, 4)(x, types.int64, weight, types.int64, types.int64), code


def _wide(builder, at):
    return builder.load(builder.bitcast(at, WIDE.as_pointer()), align=4)


def _ask(builder, at):
    """For a line of the cache, to be there, if not yet in the nearest one, when it is read."""
    flag, place = ir.IntType(32), builder.bitcast(at, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [place.type, flag, flag, flag])
    builder.call(builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind), [place, flag(0), flag(2), flag(1)])


@intrinsic
def load(typing, counts, at):
    """counts[at]; what its writer wrote before is seen by what reads afterwards."""

    def code(context, builder, signature, args):
        return builder.load_atomic(_place(context, builder, signature, args), "acquire", 8)

    return types.int64(counts, types.int64), code


@intrinsic
def store(typing, counts, at, value):
    """counts[at] = value, seen after all that was written before."""

    def code(context, builder, signature, args):
        builder.store_atomic(args[2], _place(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(counts, types.int64, types.int64), code


def _place(context, builder, signature, args):
    kind = signature.args[0]
    array = context.make_array(kind)(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, kind, array, [args[1]])
