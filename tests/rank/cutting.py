"""A rank that cuts every step it may, small as they are here. With ALL_REDUCE=nccl no kernel of ours makes a sum."""

import os
import sys

from phalanx.kernels.collective import allreduce
from phalanx.rank import __main__ as main
from phalanx.rank.worker import batch_builder, engine


def cut_at(*arguments, real=batch_builder.microbatch_split):
    at = real(*arguments)
    if at:
        print("a step is cut", file=sys.stderr, flush=True)
    return at


batch_builder.TILE = 4
batch_builder.microbatch_split = cut_at
engine.microbatch_tokens = lambda *_: 2
if os.environ.get("ALL_REDUCE") == "nccl":
    allreduce.supports = lambda *_: False
os._exit(main.main())
