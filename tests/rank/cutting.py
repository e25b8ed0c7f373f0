"""A rank that cuts every step it may, small as they are here. With SUMS=nccl no kernel of ours makes a sum."""

import os
import sys

from phalanx.kernels import allreduce
from phalanx.rank import __main__ as main
from phalanx.rank.work import prepare, runner


def cut_at(*arguments, real=prepare.cut_at):
    at = real(*arguments)
    if at:
        print("a step is cut", file=sys.stderr, flush=True)
    return at


prepare.TILE = 4
prepare.cut_at = cut_at
runner.least_rows = lambda *_: 2
if os.environ.get("SUMS") == "nccl":
    allreduce.suits = lambda *_: False
os._exit(main.main())
