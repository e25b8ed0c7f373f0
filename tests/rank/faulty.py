"""A rank that raises, hangs or sleeps where FAULT says: "PLACE:RANK:STEP".

PLACE is join, load, slow, stripe, start, step, memory, host-memory, hang, limit, pin, cgroup, swap, experts or fixed.
fixed: on all ranks so many experts of a layer are on the device alone, as if the host lacked memory. limit:
the rank's address space may grow by STEP MB once it asks for host memory. pin: all ranks pin what they would beside a
GPU, by a driver that locks no more than STEP MB of one. cgroup: its cgroup is that of the folders in
CGROUPS. swap: it is killed in its STEPth copy to host blocks. experts: those in host memory take 2 s a layer, on all
ranks, are measured so, and this rank hangs at STEP. PATIENCE: of the watch, with the start.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from phalanx.comm import startup
from phalanx.kernels import host_memory
from phalanx.rank import __main__ as main
from phalanx.rank.model.experts import offload
from phalanx.rank.model.experts.host import HostExperts
from phalanx.rank.model.weights.striped import Reader
from phalanx.rank.worker import engine, kv_cache
from phalanx.rank.worker.model_runner import ModelRunner
from phalanx.rank.worker.swap import Swap

place, rank, step = os.environ["FAULT"].split(":")
startup.PATIENCE = float(os.environ.get("PATIENCE", startup.PATIENCE))


def execute(self, plan, real=ModelRunner._execute):
    if self.mesh.world.rank == int(rank) and plan.step == int(step):
        if place == "step":
            raise ZeroDivisionError("made to fail")
        if place == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words")
        if place == "host-memory":
            torch.empty(1 << 50)
        time.sleep(1000)  # longer than the test runs: it never ends the step
    return real(self, plan)


def load(path, grid, *rest, real=engine.load_model, **options):
    if grid.world.rank == int(rank):
        if int(step):
            time.sleep(1000)  # longer than the test runs: it never loads
        raise ZeroDivisionError("made to fail")
    return real(path, grid, *rest, **options)


def load_slowly(path, grid, *rest, real=engine.load_model, **options):
    if grid.world.rank == int(rank):
        for done in range(int(step)):
            rest[5](done, int(step))  # progress
            time.sleep(0.25)  # a file takes so long from a slow network file system, and it gets on
    return real(path, grid, *rest, **options)


def read(self, real=Reader.next):
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == int(rank):
        time.sleep(1000)  # longer than the test runs: it never gets on
    return real(self)


def prepare(self, real=ModelRunner._prepare):
    if self.mesh.world.rank == int(rank):
        if not int(step):
            raise ZeroDivisionError("made to fail")
        time.sleep(int(step))  # the others are ready long before
        print("the step thread goes on", file=sys.stderr, flush=True)
    real(self)


def zeros(shape, dtype, pin, real=host_memory.zeros):
    if mine:
        most = psutil.Process().memory_info().vms + int(step) * (1 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return real(shape, dtype, pin)


def pinned_zeros(shape, dtype, pin, real=host_memory.zeros):
    return real(shape, dtype, True)


def register(address, size, flags):
    if sum(locked) + size > int(step) << 20:
        return 2  # cudaErrorMemoryAllocation
    locked.append(size)
    return 0


def store(self, blocks, places, real=Swap.store):
    stores.append(len(blocks))
    if mine and len(stores) == int(step):
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, blocks, places)


def measure(stack, *rest, real=offload.measure):
    return real(stack, *rest)._replace(cpu=(2 / stack.stack.size,) * 4)


def finish(self, pending, real=HostExperts.finish):
    time.sleep(2)  # two layers take longer than --timeout 3: slow memory
    return real(self, pending)


mine = os.environ.get("OMPI_COMM_WORLD_RANK", "0") == rank
stores: list[int] = []
locked: list[int] = []
if place == "join" and os.environ["OMPI_COMM_WORLD_RANK"] == rank:
    time.sleep(1000)  # longer than the test runs: it never joins
if place == "load":
    engine.load_model = load
elif place == "slow":
    engine.load_model = load_slowly
elif place == "stripe":
    Reader.next = read
elif place == "limit":
    host_memory.zeros = zeros
elif place == "pin":
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(int(step) << 20, hard % (1 << 64)), hard))
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    torch.cuda.cudart, host_memory.zeros = (lambda: runtime), pinned_zeros
    host_memory._forget_error = lambda: None  # there is no CUDA that would keep it
elif place == "cgroup":
    if mine:
        kv_cache.PROC, kv_cache.SYS = Path(os.environ["CGROUPS"], "proc"), Path(os.environ["CGROUPS"], "sys")
elif place == "swap":
    Swap.store = store
elif place == "fixed":
    offload.Offload.fewest_fixed = lambda self, *_: int(step)
elif place == "start":
    ModelRunner._prepare = prepare
else:
    if place == "experts":
        offload.measure, HostExperts.finish = measure, finish
    ModelRunner._execute = execute
os._exit(main.main())
