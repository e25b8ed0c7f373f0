"""One rank: join, load, then schedule or follow. Started by the launcher, which has bound this process already."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # a sixth of the time that imports take goes into looking for garbage, of which they make none

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from .. import errors, logs
from ..comm import broadcast, gpu_owners, mesh, threads
from ..comm.hosts import name_hosts
from ..comm.watchdog import LocalWatchdog, Watchdog
from ..kernels.cpp import ops
from . import protocol
from .model.base import Model
from .options import JOB_ENV, Job, Options, decode_job, degrees, encode_job
from .scheduler.blocks import Blocks
from .scheduler.host_tier import HostTier
from .scheduler.image_store import ImageStore
from .scheduler.loop import StepLoop
from .scheduler.progress import Progress
from .scheduler.replica import Executor, Replica
from .scheduler.scheduler import Scheduler
from .scheduler.server_link import ServerLink
from .scheduler.snapshots import Snapshots
from .scheduler.speculation import Speculation
from .vision import CPU_PIXELS
from .worker.engine import Engine, Limits, LoadRefused, RankContext
from .worker.executor import LocalExecutor, RemoteExecutor, Reporter, ResultChannel, follow

log = logging.getLogger("phalanx")
Lines = dict[int, tuple[broadcast.PlanBroadcast, ResultChannel]]  # by replica: its plans, and the way back


class Rank:
    """One rank's way through the job; in a job of threads there are several in this process."""

    def __init__(self, job: Job, world: Any, hosts: list[str], watch: LocalWatchdog):
        self.job = job
        self.options: Options = job.options
        self.world = world
        self.hosts = hosts
        self.watch = watch
        self.link: ServerLink | None = None
        self._engine: Engine
        self._ready: protocol.Ready  # of the model that is loaded
        self._model = 0  # its number, the server's
        self._switch: protocol.Switch | None = None  # what the last plan asked for

    def run(self) -> int:
        """Load, then schedule or follow until the job ends; the exit code."""
        if self.world.rank == 0:
            self.connect()
        self._say(f"rank 0 of {self.world.size} on {self.hosts[0]}" + (f", {self.job.bound}" if self.job.bound else ""))
        device = self._device()
        gpu_owners.check(self.world, self.hosts, device)
        self.watch.begin("compiling kernels")  # on all ranks, as phases are counted
        if device.type == "cpu":
            ops.available()
        self.watch.begin("connecting groups of ranks")
        replicas, grid = self._mesh(device)
        self.watch.divide(mesh.replica_ranks(self.world.size, replicas))
        lines = self._open_lines(replicas)
        place = RankContext(self.world, self.hosts, grid, device, self.watch, self.job.local_rank)
        code = self.serve(Engine(self.options, place, self._progress), lines)
        if self.link is not None:
            self.link.close()
        self.watch.stop()
        return code

    def serve(self, engine: Engine, lines: Lines) -> int:
        """Load the engine's model and schedule or follow, then other models, until a plan stops the job; the exit
        code."""
        self._engine = engine
        limits: Limits | None = engine.load()
        while limits is not None:
            code = self._steps(engine, limits, lines)
            limits = None
            while (switch := self._switch) is not None and limits is None:
                limits = self._other_model(engine, switch)
                if limits is None:
                    code = self._wait_unloaded(engine, lines)
        return code

    def _steps(self, engine: Engine, limits: Limits, lines: Lines) -> int:
        """Schedule or follow until a plan stops it. `_switch` is the model that the plan asks for, if any."""
        grid = engine.place.mesh
        self._switch = None
        if self.world.rank:
            plans, results = lines[grid.replica]
            reports = grid.replica and self.world.rank % (grid.tensor.size * grid.stages) == 0
            return self._stopped(follow(engine.runner, plans, Reporter(results, self.watch) if reports else None))
        tiers = [HostTier(*limits.host_blocks) for _ in lines]
        counts = limits.blocks, limits.block_size, limits.prefix_cache
        pools = [Blocks(*counts, tier, Snapshots(limits.snapshots), limits.groups) for tier in tiers]
        executors: list[Executor] = [LocalExecutor(lines[0][0], engine.runner)]
        executors += [RemoteExecutor(*line) for replica, line in lines.items() if replica]
        most = limits.max_num_seqs, limits.token_budget, limits.max_model_len, grid.stages
        images = int(engine.options.mm_cache_gb * (1 << 30)), *limits.images
        schedulers = [Scheduler(pool, *most, self._speculation(limits), ImageStore(*images)) for pool in pools]
        return self.run_scheduler([Replica(*pair) for pair in zip(schedulers, executors, strict=True)], engine.model)

    @staticmethod
    def _speculation(limits: Limits) -> Speculation | None:
        """A replica's; None: steps verify no drafts."""
        if len(limits.query_lens) == 1:
            return None
        return Speculation(limits.query_lens, limits.verified_tokens, limits.draft_model, limits.step_times)

    def _stopped(self, plan: protocol.Plan) -> int:
        self._switch = protocol.decode_switch(plan.switch) if plan.switch else None
        return plan.stop

    def _other_model(self, engine: Engine, switch: protocol.Switch) -> Limits | None:
        """Unload what is loaded, and load what is asked for; None: nothing.

        A model that cannot be loaded is given up for the one from before, or for none where none was loaded.
        """
        served = hasattr(engine, "runner")
        if hasattr(engine, "model") and not (engine.kept and switch.options):
            engine.unload(keep=switch.weights == "keep")
        if not switch.options:
            self.watch.started()
            return None
        before, options = engine.options, msgspec.json.decode(switch.options, type=Options)
        engine.options = options
        try:
            if switch.weights == "only":
                engine.load_weights()
                self.watch.started()
                return None
            limits = engine.load()
            self._model = switch.model
            return limits
        except LoadRefused as stop:
            why = str(stop)
        engine.abandon()
        engine.options = before
        self._say(f"cannot serve {options.model}: {why}" + (f"; going back to {before.model}" if served else ""))
        if self.link is not None:
            self.link.send(protocol.SwitchFailed(switch.model, why))
        if not served:
            self.watch.started()
            return None
        return engine.load()

    def _wait_unloaded(self, engine: Engine, lines: Lines) -> int:
        """Without a model: wait for a plan that asks for one, or that ends the job; its exit code."""
        if self.world.rank:
            last = protocol.decode_plan(lines[engine.place.mesh.replica][0].receive())
            assert isinstance(last, protocol.Plan)
            return self._stopped(last)
        assert self.link is not None
        self._say("the model sleeps" if engine.kept else "no model is loaded; the next request loads one")
        self.link.send(protocol.Unloaded())
        plan = None
        while plan is None:
            plan = self._next_plan()
        for control, _ in lines.values():
            control.publish(protocol.encode_plan(plan))
            while control.progress():
                pass
        return self._stopped(plan)

    def _next_plan(self) -> protocol.Plan | None:
        """Rank 0, without a model: what the server's next messages ask for."""
        assert self.link is not None
        plan = None
        for message in self.link.receive(None):
            if isinstance(message, protocol.Switch) and (not message.options or self._accepts(message)):
                plan = protocol.Plan(step=-1, stop=errors.OK, switch=protocol.encode_switch(message))
            elif isinstance(message, protocol.Drain):
                return protocol.Plan(step=-1, stop=message.code)
        if self.link.signalled:
            self.link.signalled = False
            self.link.send(protocol.Draining())
        return plan

    def _accepts(self, switch: protocol.Switch) -> bool:
        """Rank 0: whether a model's files can be served, before the one that is loaded is given up."""
        assert self.link is not None
        if not switch.options or self._engine.kept:  # its files are not needed
            return True
        try:
            self._engine.check(msgspec.json.decode(switch.options, type=Options))
        except errors.FatalError as stop:
            self._say(f"cannot switch: {stop}")
            self.link.send(protocol.SwitchFailed(switch.model, str(stop)))
            self.link.send(self._ready if hasattr(self._engine, "runner") else protocol.Unloaded())
            return False
        return True

    def connect(self) -> None:
        """Rank 0: reach the server process, which passes on how loading goes."""
        self.link = ServerLink(self.job.server_socket)
        self.watch.on_failure = self.link.fail
        if self.job.server_watched:
            self.link.watch(self.options.timeout, self.watch.fail)

    def run_scheduler(self, replicas: list[Replica], model: Model) -> int:
        """Rank 0: serve the server process until it drains."""
        assert self.link is not None
        if threading.current_thread() is threading.main_thread():
            self.link.catch_signals()
            signal.signal(signal.SIGTERM, self._on_term)
        one = replicas[0].scheduler
        self._ready = protocol.Ready(
            max_model_len=one.max_model_len,
            vocab_size=model.vocab_size,
            kv_tokens=one.blocks.capacity(one.max_model_len) * len(replicas),
            block_size=one.blocks.size,
            max_num_seqs=one.max_num_seqs * len(replicas),
            ranks=self.world.size,
            pids=self._pids,
            hosts=self.hosts,
            model=self._model,
            images=model.image_token >= 0,
            image_pixels=CPU_PIXELS if self.job.device_index < 0 else 0,
        )
        self.link.send(self._ready)
        loop = StepLoop(replicas, self.link, self._accepts)
        code = loop.run()
        self._switch = loop.switch
        return code

    def _device(self) -> torch.device:
        """The launcher's choice as this process sees it: a rank that was given one GPU has it as number 0."""
        if self.options.device == "mps":
            if not torch.backends.mps.is_available():
                raise errors.FatalError(
                    f"--device mps: PyTorch {torch.__version__} finds no Metal on {self.hosts[self.world.rank]}: a Mac "
                    "with Apple silicon is needed; --device cpu computes without",
                    errors.USAGE,
                )
            return torch.device("mps")
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
            tp, pp, replicas = degrees(self.world.size, options.tp, options.pp, options.dp, options.ep)
        except ValueError as error:
            raise errors.FatalError(str(error), errors.USAGE) from None
        if device.type == "mps":
            from ..comm.host_copies import HostCopiesComm

            return replicas, mesh.build(self.world, tp, pp, HostCopiesComm, ep=options.ep)
        if device.type == "cpu":
            if isinstance(self.world, threads.ThreadComm):
                return replicas, mesh.build(self.world, tp, pp, ep=options.ep)
            from ..comm.shm import ShmComm

            return replicas, mesh.build(self.world, tp, pp, tp_backend_factory=ShmComm, ep=options.ep)
        from ..comm.custom_allreduce import CustomAllReduceComm
        from ..comm.nccl import NcclComm

        grid = mesh.build(self.world, tp, pp, NcclComm, CustomAllReduceComm, options.ep)
        if isinstance(grid.tensor, CustomAllReduceComm):
            if grid.tensor.why:
                self._say(f"all-reduces go over NCCL alone: {grid.tensor.why}")
            if grid.tensor.why_not_dma:
                self._say(f"large all-reduces go over NCCL: {grid.tensor.why_not_dma}")
        return replicas, grid

    def _on_term(self, *_: object) -> None:
        self.watch.stop()
        if self.link is not None:
            self.link.fail("the job was stopped", errors.STOPPED)
        self.watch.end(errors.STOPPED)

    def _open_lines(self, replicas: int) -> Lines:
        """The way of each replica's plans, and the way back: rank 0 has all, others their own."""
        groups: dict[int, Any] = mesh.control_groups(self.world, replicas)
        if isinstance(self.world, threads.ThreadComm):
            self._pids = [os.getpid()]
            return {
                replica: (broadcast.ThreadPlanBroadcast(group), threads.ThreadResultChannel(group))
                for replica, group in groups.items()
            }
        from ..comm.mpi import MpiResultChannel

        self._pids = [int(p) for p in broadcast.gather_bytes(self.world, str(os.getpid()).encode())]
        assert isinstance(self.watch, Watchdog)
        ranks = mesh.replica_ranks(self.world.size, replicas)
        return {
            replica: (broadcast.MpiPlanBroadcast(group, self.watch, ranks[replica]), MpiResultChannel(group))
            for replica, group in groups.items()
        }

    def _progress(self, phase: str) -> Callable[[int, int], None]:
        """Told of bytes done and all bytes; it tells the watch, and on rank 0 the server process."""
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
            logs.say(str(error), "error")
        logs.flush()
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
            logs.say(str(stop), "error")
        else:
            time.sleep(1)  # another rank speaks; mpirun would end it with this one
        logs.flush()
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
    logs.say(
        f"rank {job.rank} on {socket.gethostname()}: the ranks have not all joined within {job.options.timeout:g} s; "
        "is every node of the job up and reachable, with the same Phalanx and MPI?",
        "error",
    )
    logs.flush()
    os._exit(errors.RANK_STUCK)


def start_log(options: Options, rank: int) -> None:
    """Rank 0 tells its story on stderr; with --log every rank writes phalanx-rank-N.log."""
    if options.log_format == "json":
        logs.use_json(f"rank {rank}")
    path = os.path.abspath(f"phalanx-rank-{rank}.log") if options.log else ""
    try:
        logs.start(options.log_level.upper(), "%(asctime)s %(message)s", path)
    except OSError as error:
        logs.say(f"--log: {path} cannot be written ({error.strerror})", "error")
        logs.flush()
        os._exit(errors.USAGE)


def main(make: type[Rank] = Rank) -> int:
    job = decode_job(os.environ.pop(JOB_ENV))
    start_log(job.options, job.rank)
    run = run_threads if job.options.multithread or job.announced_size == 1 else run_mpi
    try:
        return run(job, make)
    finally:
        logs.flush()  # callers end by os._exit


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    code = main()
    os._exit(code)  # nothing is left to do, and no library's exit handler may hang
