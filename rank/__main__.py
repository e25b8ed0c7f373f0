"""One rank: join, load, then lead or follow. Started by the launcher, which has bound this process already."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from .. import errors
from ..comm import broadcast, gpu_owners, mesh, threads
from ..comm.hosts import name_hosts
from ..comm.watchdog import LocalWatchdog, Watchdog
from ..kernels import jit
from . import protocol
from .model import fingerprint
from .model.base import Model
from .model.load import load as load_model
from .model.weights.local_copy import make_local_copy
from .options import JOB_ENV, Job, Options, decode_job, degrees, encode_job
from .scheduler.blocks import Blocks
from .scheduler.loop import StepLoop
from .scheduler.progress import Progress
from .scheduler.replica import Executor, Replica
from .scheduler.scheduler import Scheduler
from .scheduler.server_link import ServerLink
from .worker import graphs, kv_cache
from .worker.executor import LocalExecutor, RemoteExecutor, Reporter, ResultChannel, follow
from .worker.model_runner import ModelRunner
from .worker.profile_run import profile_run
from .worker.sampler import Sampler
from .worker.state import BatchState

log = logging.getLogger("phalanx")

BLOCK_SIZE = 16
TOKEN_BUDGET = {"cpu": 512, "cuda": 8192}  # of a step
# A CPU's steps must stay short, for the streams that run beside and for --timeout: about ten seconds of a slow one.
CPU_STEP = 1e12  # additions and multiplications of a rank
FEW = 4  # tokens that a step may have whatever the weights


class Rank:
    """One rank's way through the job; in a job of threads there are several in this process."""

    def __init__(self, job: Job, world: Any, hosts: list[str], watch: LocalWatchdog):
        self.job = job
        self.options: Options = job.options
        self.world = world
        self.hosts = hosts
        self.watch = watch
        self.link: ServerLink | None = None

    def run(self) -> int:
        """Load, then lead or follow until the job ends; the exit code."""
        if self.world.rank == 0:
            self.connect()
        self._say(f"rank 0 of {self.world.size} on {self.hosts[0]}" + (f", {self.job.bound}" if self.job.bound else ""))
        options = self.options
        self.watch.begin("comparing the nodes' models")
        fingerprint.check(self.world, self.hosts, Path(options.model), options.load_format != "dummy")
        device = self._device()
        gpu_owners.check(self.world, self.hosts, device)
        rooms = [kv_cache.free_memory(place, self._here) for place in (device, torch.device("cpu"))]
        self.world.barrier()  # nobody takes memory before all have looked
        self.watch.begin("connecting groups of ranks")
        replicas, grid = self._mesh(device)
        self.watch.divide(mesh.replica_ranks(self.world.size, replicas))
        model = self._load(grid, device, *rooms)
        block_size = options.block_size or BLOCK_SIZE
        self.watch.begin("measuring a step")
        budget, max_num_seqs = self._token_budget(model, device)
        sampler = Sampler(max_num_seqs, model.vocab_size, device)
        peak = self._warm_up(model, grid, sampler, budget, max_num_seqs, block_size)
        self.watch.begin("making room for the KV cache")
        blocks, max_model_len = self._size_cache(model, max_num_seqs, block_size, device, peak)
        caches = self._allocate(model, blocks, block_size, device)
        rows = BatchState(max_num_seqs, max_model_len, block_size)
        self.watch.begin("preparing steps")
        runner = ModelRunner(model, grid, rows, sampler, caches, self.watch)
        lines = self._open_lines(replicas)
        runner.ready.wait()
        self.world.barrier()  # rank 0 says that it is ready, and speaks for all
        self.watch.started()
        if self.world.rank:
            plans, mail = lines[grid.replica]
            reports = grid.replica and self.world.rank % (self.world.size // replicas) == 0
            code = follow(runner, plans, Reporter(mail, self.watch) if reports else None)
        else:
            pools = [Blocks(blocks, block_size, options.prefix_cache) for _ in lines]
            teams: list[Executor] = [LocalExecutor(lines[0][0], runner), *(RemoteExecutor(*line) for line in lines[1:])]
            schedulers = [Scheduler(pool, max_num_seqs, budget, max_model_len, grid.stages) for pool in pools]
            code = self.lead([Replica(*pair) for pair in zip(schedulers, teams, strict=True)], model)
        self.watch.stop()
        return code

    @property
    def _here(self) -> int:
        """How many ranks share this host."""
        return self.hosts.count(self.hosts[self.world.rank])

    def _load(self, grid: mesh.Mesh, device: torch.device, room: int, host_room: int) -> Model:
        options = self.options
        staged = options.stage and options.load_format != "dummy"
        directory = self._stage() if staged else Path(options.model)
        started = time.monotonic()
        with errors.memory_for("the weights", "Use more ranks (--tp, --pp) or a narrower --dtype"):
            model = load_model(
                directory, grid, device, options.dtype, options.max_model_len, options.load_format, options.load,
                self._progress("loading weights"), room, host_room,
            )  # fmt: skip
        self._say(f"loaded {model.weight_bytes / 1e6:.0f} MB on this rank in {time.monotonic() - started:.1f} s")
        return model

    def connect(self) -> None:
        """Rank 0: reach the front, which passes on how loading goes."""
        self.link = ServerLink(self.job.server_socket)
        self.watch.on_failure = self.link.fail

    def lead(self, replicas: list[Replica], model: Model) -> int:
        """Rank 0: serve the front until it drains."""
        assert self.link is not None
        if threading.current_thread() is threading.main_thread():
            self.link.catch_signals()
            signal.signal(signal.SIGTERM, self._on_term)
        one = replicas[0].scheduler
        self.link.send(
            protocol.Ready(
                max_model_len=one.max_model_len,
                vocab_size=model.vocab_size,
                kv_tokens=one.blocks.count * one.blocks.size * len(replicas),
                block_size=one.blocks.size,
                max_num_seqs=one.max_num_seqs * len(replicas),
                ranks=self.world.size,
                pids=self._pids,
                hosts=self.hosts,
            )
        )
        code = StepLoop(replicas, self.link).run()
        self.link.close()
        return code

    def _token_budget(self, model: Model, device: torch.device) -> tuple[int, int]:
        """How many tokens a step computes, and how many sequences run at once."""
        options = self.options
        budget = options.max_num_batched_tokens or TOKEN_BUDGET[device.type]
        if device.type != "cpu" or options.max_num_batched_tokens:
            return budget, options.max_num_seqs
        weights = model.weight_bytes / model.dtype.itemsize
        longest = torch.tensor([min(budget, int(CPU_STEP / (2 * weights)))])
        budget = max(FEW, int(self.world.all_gather(longest).min()))
        if budget < options.max_num_seqs:
            self._say(f"at most {budget} sequences run at once on each copy, so that a step of these weights is short")
        return budget, min(budget, options.max_num_seqs)

    def _device(self) -> torch.device:
        """What the launcher chose, as this process sees it: a rank that was given one GPU has it as number 0."""
        if self.job.device_index < 0:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise errors.FatalError(
                f"GPU {self.job.device_index} was chosen, but PyTorch {torch.__version__} sees none: install it for "
                "CUDA (`make install TORCH=cuda`), or choose --device cpu",
                errors.USAGE,
            )
        seen = torch.cuda.device_count()
        device = torch.device("cuda", self.job.device_index if seen > 1 else 0)
        torch.cuda.set_device(device)
        return device

    def _mesh(self, device: torch.device) -> tuple[int, mesh.Mesh]:
        """The number of replicas, and this rank's place among them."""
        options = self.options
        try:
            tp, pp, replicas = degrees(self.world.size, options.tp, options.pp, options.dp)
        except ValueError as error:
            raise errors.FatalError(str(error), errors.USAGE) from None
        if device.type == "cpu":
            if isinstance(self.world, threads.ThreadComm):
                return replicas, mesh.build(self.world, tp, pp)
            from ..comm.shm import ShmComm

            return replicas, mesh.build(self.world, tp, pp, tp_backend_factory=ShmComm)
        from ..comm.custom_allreduce import CustomAllReduceComm
        from ..comm.nccl import NcclComm

        grid = mesh.build(self.world, tp, pp, NcclComm, CustomAllReduceComm)
        if isinstance(grid.tensor, CustomAllReduceComm):
            if grid.tensor.why:
                self._say(f"all-reduces go over NCCL alone: {grid.tensor.why}")
            if grid.tensor.why_not_dma:
                self._say(f"large all-reduces go over NCCL: {grid.tensor.why_not_dma}")
        return replicas, grid

    def _stage(self) -> Path:
        """The model's copy on this node."""
        if self.job.local_rank:
            time.sleep(0.2)  # the node's first rank gets the lock: rank 0, where it is, shows how far it is
        started = time.monotonic()
        place = Path(self.options.stage).expanduser().absolute()
        directory, copied = make_local_copy(Path(self.options.model), place, self._progress("staging weights"))
        if copied:  # on each node, whichever rank it was
            here = f"rank {self.world.rank} on {self.hosts[self.world.rank]}"
            gb, seconds = copied / 1e9, time.monotonic() - started
            log.info("%s staged %.2f GB in %s in %.1f s, %.2f GB/s", here, gb, directory, seconds, gb / seconds)
        else:
            self._say(f"loading the copy in {directory}")
        return directory

    def _on_term(self, *_: object) -> None:
        self.watch.stop()
        if self.link is not None:
            self.link.fail("the job was stopped", errors.STOPPED)
        self.watch.end(errors.STOPPED)

    def _size_cache(
        self, model: Model, max_num_seqs: int, block_size: int, device: torch.device, peak: int
    ) -> tuple[int, int]:
        """Blocks in the pool and the longest sequence, the same on all ranks; logged by rank 0.

        peak: what steps take beside weights and cache, where that is known.
        """
        options, spec = self.options, model.kv_spec
        block_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * block_size * model.dtype.itemsize
        fraction = options.kv_fraction or kv_cache.FRACTION[device.type]
        memory = options.mem * kv_cache.MIB or int(fraction * max(0, kv_cache.free_memory(device, self._here) - peak))
        wanted = max_num_seqs * -(-model.max_model_len // block_size)
        if options.mem:
            wanted = memory // block_bytes
        blocks = kv_cache.num_blocks(self.world, block_bytes, wanted, memory)
        max_model_len = kv_cache.fit_length(blocks, block_size, model.max_model_len, bool(options.max_model_len))
        why = f"--mem {options.mem}" if options.mem else f"{fraction:g} of the free memory, at most what can be used"
        self._say(
            f"KV cache: {blocks * block_size} tokens in {blocks} blocks of {block_size}, "
            f"{blocks * block_bytes / kv_cache.MIB:.0f} MiB a rank ({why}); sequences of up to {max_model_len} tokens"
        )
        return blocks, max_model_len

    def _warm_up(
        self, model: Model, grid: mesh.Mesh, sampler: Sampler, budget: int, max_num_seqs: int, block_size: int
    ) -> int:
        """On GPUs: compile what steps will need, and find what the largest takes beside weights and cache, in bytes."""
        device = sampler.device
        if device.type != "cuda":
            return 0
        jit.compile_ahead(graphs.gemm_variants(model, max_num_seqs, device), device)
        advice = (
            f"Lower --max-num-batched-tokens (now {budget}) or --max-num-seqs (now {max_num_seqs}), or use more ranks"
        )
        with errors.memory_for(f"a step of {budget} tokens that samples {max_num_seqs} sequences", advice):
            peak = profile_run(model, grid, sampler, budget, max_num_seqs, block_size)
        self._say(f"a step of {budget} tokens takes {peak / kv_cache.MIB:.0f} MiB beside weights and cache")
        return peak

    def _allocate(
        self, model: Model, blocks: int, block_size: int, device: torch.device
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The KV cache, keys and values of each local layer."""
        options, spec = self.options, model.kv_spec
        fraction = options.kv_fraction or kv_cache.FRACTION[device.type]
        now = f"--mem (now {options.mem})" if options.mem else f"--kv-fraction (now {fraction:g})"
        with errors.memory_for(f"a KV cache of {blocks * block_size} tokens", f"Lower {now}, or use more ranks"):
            return kv_cache.allocate(spec.layers, blocks, block_size, spec.kv_heads, spec.head_dim, model.dtype, device)

    def _open_lines(self, replicas: int) -> list[tuple[broadcast.PlanBroadcast, ResultChannel]]:
        """For each replica the way of its plans, and the way back; rank 0 has use for all, others for their own."""
        groups: list[Any] = mesh.control_groups(self.world, replicas)
        if isinstance(self.world, threads.ThreadComm):
            self._pids = [os.getpid()]
            return [(broadcast.ThreadPlanBroadcast(group), threads.ThreadResultChannel(group)) for group in groups]
        from ..comm.mpi import MpiResultChannel

        self._pids = [int(p) for p in broadcast.gather_bytes(self.world, str(os.getpid()).encode())]
        assert isinstance(self.watch, Watchdog)
        lines = zip(groups, mesh.replica_ranks(self.world.size, replicas), strict=True)
        return [
            (broadcast.MpiPlanBroadcast(group, self.watch, ranks), MpiResultChannel(group)) for group, ranks in lines
        ]

    def _progress(self, phase: str) -> Callable[[int, int], None]:
        """Told of bytes done and all bytes; it tells the watch, and on rank 0 the front."""
        self.watch.begin(phase)
        show = Progress(phase, self.link.send, self.job.columns).look if self.link else None

        def look(done: int, total: int) -> None:
            self.watch.reached(done)
            if show is not None:
                show(done, total)

        return look

    def _say(self, text: str) -> None:
        if self.world.rank == 0:
            log.info(text)


def share_job(job: Job, world: Any) -> Job:
    """Rank 0's options win: the other nodes do not have our environment or files."""
    first = decode_job(broadcast.broadcast_bytes(world, encode_job(job).encode()).decode())
    return msgspec.structs.replace(job, options=first.options, over=first.over)


def run_threads(job: Job, make: type[Rank] = Rank) -> int:
    """Every rank a thread of this process."""
    size = job.options.ranks or 1
    torch.set_num_threads(max(1, torch.get_num_threads() // size))

    def one(world: threads.ThreadComm) -> int:
        watch = LocalWatchdog(world.rank)
        try:
            return make(job, world, [socket.gethostname()] * size, watch).run()
        except threads.PeerFailed:
            raise  # the rank that failed has the word
        except BaseException as error:
            watch.fail(error)
            raise

    return threads.run(one, size)[0]


def run_mpi(job: Job, make: type[Rank] = Rank) -> int:
    """This process is one rank of an MPI job."""
    alarm = threading.Timer(job.options.timeout, _join_failed, (job,))
    alarm.daemon = True
    alarm.start()
    from ..comm import mpi

    try:
        world = mpi.join(job.announced_size)
    except RuntimeError as error:
        if job.rank == 0:
            print(f"phalanx: {error}", file=sys.stderr, flush=True)
        os._exit(errors.USAGE)
    try:
        hosts = name_hosts(world)
        job = share_job(job, world)
        if job.over:
            mpi.leave()
            return errors.OK
        alarm.cancel()  # from here on the watch sees who is missing
        watch = Watchdog(world, hosts, job.options.timeout)
        watch.abort = mpi.abort if job.abort else None
    except errors.FatalError as stop:
        if str(stop):
            print(f"phalanx: {stop}", file=sys.stderr, flush=True)
        else:
            time.sleep(1)  # another rank speaks; mpirun would end it with this one
        if job.abort:
            mpi.abort(stop.code)
        os._exit(stop.code)
    try:
        code = make(job, world, hosts, watch).run()
    except BaseException as error:
        watch.fail(error)
        raise
    mpi.leave()
    return code


def _join_failed(job: Job) -> None:
    print(
        f"phalanx: rank {job.rank} on {socket.gethostname()}: the ranks have not all joined within "
        f"{job.options.timeout:g} s; is every node of the job up and reachable, with the same Phalanx and MPI?",
        file=sys.stderr,
        flush=True,
    )
    os._exit(errors.RANK_STUCK)


def start_log(options: Options, rank: int) -> None:
    """Rank 0 tells its story on stderr; with --log every rank writes phalanx-rank-N.log."""
    level = logging.getLevelName(options.log_level.upper())
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if options.log:
        path = os.path.abspath(f"phalanx-rank-{rank}.log")
        try:
            handlers.append(logging.FileHandler(path))
        except OSError as error:
            print(f"phalanx: --log: {path} cannot be written ({error.strerror})", file=sys.stderr, flush=True)
            os._exit(errors.USAGE)
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=handlers)


def main(make: type[Rank] = Rank) -> int:
    job = decode_job(os.environ.pop(JOB_ENV))
    start_log(job.options, job.rank)
    if job.options.multithread or job.announced_size == 1:
        return run_threads(job, make)
    return run_mpi(job, make)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to do, and no library's exit handler may hang
