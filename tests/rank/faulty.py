"""A rank that raises, hangs or sleeps where FAULT says: "PLACE:RANK:STEP".

PLACE is join, load, start, step, memory or hang.
"""

import os
import sys
import time

import torch
from phalanx.rank import __main__ as main
from phalanx.rank.work.runner import Runner

place, rank, step = os.environ["FAULT"].split(":")


def execute(self, plan, real=Runner._execute):
    if self.mesh.world.rank == int(rank) and plan.step == int(step):
        if place == "step":
            raise ZeroDivisionError("made to fail")
        if place == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words")
        time.sleep(1000)
    return real(self, plan)


def load(path, grid, *rest, real=main.load_model):
    if grid.world.rank == int(rank):
        if int(step):
            time.sleep(1000)
        raise ZeroDivisionError("made to fail")
    return real(path, grid, *rest)


def prepare(self, real=Runner._prepare):
    if self.mesh.world.rank == int(rank):
        if not int(step):
            raise ZeroDivisionError("made to fail")
        time.sleep(int(step))
        print("the step thread goes on", file=sys.stderr, flush=True)
    real(self)


if place == "join" and os.environ["OMPI_COMM_WORLD_RANK"] == rank:
    time.sleep(1000)
if place == "load":
    main.load_model = load
elif place == "start":
    Runner._prepare = prepare
else:
    Runner._execute = execute
os._exit(main.main())
