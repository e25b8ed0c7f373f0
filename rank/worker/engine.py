"""A model on one rank, from its files to steps, and off it again: load, run, unload.

The ranks of a job, their mesh and their watchdog outlive it: one engine may load several models, one after the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ... import errors
from ...comm.broadcast import gather_bytes
from ...comm.mesh import Mesh
from ...comm.watchdog import LocalWatchdog
from ...kernels import jit
from ...kernels.cpp import ops
from .. import heap
from ..model import cache_spec, fingerprint
from ..model.base import Model
from ..model.experts.offload import ExpertRoom
from ..model.load import check as check_model
from ..model.load import load as load_model
from ..model.load_memory import OthersRefuse
from ..model.weights.local_copy import make_local_copy
from ..options import Options
from . import deferral_loss, graphs, kv_cache
from .microbatches import microbatch_tokens
from .model_runner import ModelRunner, StepLimits
from .profile_run import profile_run, step_seconds
from .sampler import Sampler
from .state import BatchState
from .swap import NEVER, CopyCost, HostBlocks, Swap

log = logging.getLogger("phalanx")
T = TypeVar("T")

BLOCK_SIZE = 16
TOKEN_BUDGET = {"cpu": 512, "cuda": 8192}  # of a step
# A CPU's steps must stay short, for the streams that run beside and for --timeout: about ten seconds of a slow one.
CPU_STEP = 1e12  # additions and multiplications of a rank
MOST_COPIED = 0.01  # seconds of copies back after which a plan takes no further sequence that needs some
SWAP_TIMED = {"cpu": 64, "cuda": 2048}  # tokens of the step that says how fast blocks are computed
FEW = 4  # tokens that a step may have whatever the weights


class Place(NamedTuple):
    """Where a rank runs, the same for all models of a job."""

    world: Any  # the communicator of all ranks
    hosts: list[str]  # of each rank
    mesh: Mesh
    device: torch.device
    watch: LocalWatchdog
    local_rank: int = 0  # among the ranks of this host

    @property
    def ranks_here(self) -> int:
        """How many ranks share this host."""
        return self.hosts.count(self.hosts[self.world.rank])


class Limits(NamedTuple):
    """What the scheduler has to keep to, the same on all ranks."""

    blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int  # of a step
    prefix_cache: bool  # whether prompts may begin with blocks of others
    snapshots: int = 0  # of sequences' states; 0: no layer keeps any, or there is no prefix cache
    host_blocks: HostBlocks = HostBlocks()


class LoadRefused(errors.FatalError):
    """A model that cannot be loaded; raised on all ranks alike, so that they may go on with another one."""


class Engine:
    """Collective: every rank of the job loads, runs and unloads the same models in the same order."""

    model: Model
    runner: ModelRunner

    def __init__(
        self, options: Options, place: Place, progress: Callable[[str], Callable[[int, int], None]] | None = None
    ):
        """progress: by the name of a phase that takes long, what is told of bytes done and all bytes."""
        self.options = options
        self.place = place
        self._progress = progress or (lambda _: lambda done, total: None)
        self._served = False  # at least one model

    def load(self) -> Limits:
        """Read the weights, make room for the KV cache and prepare all that steps need; on return steps may come."""
        options, place = self.options, self.place
        world, watch, device = place.world, place.watch, place.device
        watch.begin("comparing the nodes' models")
        fingerprint.check(world, place.hosts, Path(options.model), options.load_format != "dummy")
        free = [kv_cache.free_memory(where, place.ranks_here) for where in (device, torch.device("cpu"))]
        world.barrier()  # nobody takes memory before all have looked
        self.model = self._together(lambda: self._load(*free))
        block_size = options.block_size or BLOCK_SIZE
        watch.begin("measuring a step")
        budget, max_num_seqs = self._token_budget()
        self._expect(budget)
        sampler = Sampler(max_num_seqs, self.model.vocab_size, device)
        peak = self._warm_up(sampler, budget, max_num_seqs, block_size)
        sizes = budget, block_size, device, self._cache_dtype
        microbatch = microbatch_tokens(self.model, place.mesh, world, self._say, *sizes)
        watch.begin("making room for the KV cache")
        blocks, max_model_len, snapshots = self._size_cache(max_num_seqs, block_size, peak)
        caches = self._together(lambda: self._allocate(blocks, block_size, max_num_seqs + snapshots))
        shares, may_swap = self._may_share(snapshots)
        swap, in_host = self._host_tier(caches, block_size, budget) if may_swap else (None, HostBlocks())
        if options.expert_deferral:
            watch.begin("measuring expert deferral")
            room = deferral_loss.Room(caches, blocks, block_size, max_num_seqs)
            self._say(deferral_loss.told(self.model, place.mesh, room, device, watch.reached))
        limits, rows = StepLimits(microbatch, budget, peak), BatchState(max_num_seqs, max_model_len, block_size)
        watch.begin("preparing steps")
        self.runner = ModelRunner(self.model, place.mesh, rows, sampler, caches, watch, swap, limits)
        self.runner.ready.wait()
        heap.freeze()
        world.barrier()  # rank 0 says that it is ready, and speaks for all
        watch.started()
        self._served = True
        return Limits(blocks, block_size, max_model_len, max_num_seqs, budget, shares, snapshots, in_host)

    def unload(self) -> None:
        """Give all memory back that `load` took. The runner has finished: a plan said stop."""
        watch = self.place.watch
        watch.begin("unloading the model")
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()
        watch.poll_device = None  # the runner's: it would keep the model
        watch.finished = watch.entered
        self._give_back()

    def abandon(self) -> None:
        """After a `load` that failed: give back what it took."""
        self.place.watch.begin("giving up a model")
        self._give_back()

    def check(self, options: Options) -> None:
        """Raise FatalError where `load` would with these options, as far as files tell. Not collective."""
        check_model(
            options.model, self.place.mesh, options.max_model_len, options.load_format, options.isq,
            options.quantization,
        )  # fmt: skip

    def _give_back(self) -> None:
        self.__dict__.pop("runner", None)
        model = self.__dict__.pop("model", None)
        if model is not None and model.offload is not None:
            ops.stay_awake()  # as threads do without experts in host memory
        del model
        heap.collect()
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            heap.trim()
        self.place.world.barrier()  # nobody loads the next before all have given theirs back

    def _together(self, work: Callable[[], T]) -> T:
        """What `work` makes. A later model: raises LoadRefused on all ranks where any fails. The first one's failure is
        told at once, by the rank that has it, and ends the job.
        """
        if not self._served:
            try:
                return work()
            except OthersRefuse:
                time.sleep(10)  # that rank ends the job
                raise
        made, why = None, ""
        try:
            made = work()
        except OthersRefuse:
            pass
        except errors.FatalError as stop:
            why = str(stop) or "it cannot be loaded"
        told = [text.decode() for text in gather_bytes(self.place.world, why.encode()) if text]
        if told:
            raise LoadRefused(told[0], errors.MODEL)
        return cast(T, made)

    def _load(self, free: int, free_of_host: int) -> Model:
        options, place = self.options, self.place
        staged = options.stage and options.load_format != "dummy"
        directory = self._stage() if staged else Path(options.model)
        started = time.monotonic()
        fewer = "Use more ranks (--tp, --pp), a narrower --dtype or --isq"
        if options.num_experts_offload_per_rank or options.expert_memory:
            fewer = f"{fewer}, or leave more experts on the GPUs (--num-experts-offload-per-rank, --expert-memory)"
        with errors.memory_for("the weights", fewer):
            model = load_model(
                directory, place.mesh, place.device, options.dtype, options.max_model_len, options.load_format,
                options.load, self._progress("loading weights"), free, free_of_host, options.isq, options.quantization,
                ExpertRoom(options.num_experts_offload_per_rank, options.expert_memory * kv_cache.MIB,
                           options.expert_placement, options.expert_deferral, options.kvcache_mem_cpu * kv_cache.MIB),
                int(options.cpu_offload_gb * (1 << 30)),
            )  # fmt: skip
        self._say(f"loaded {model.weight_bytes / 1e6:.0f} MB on this rank in {time.monotonic() - started:.1f} s")
        return model

    def _stage(self) -> Path:
        """The model's copy on this node."""
        if self.place.local_rank:
            time.sleep(0.2)  # the node's first rank gets the lock: rank 0, where it is, shows how far it is
        started = time.monotonic()
        folder = Path(self.options.stage).expanduser().absolute()
        directory, copied = make_local_copy(Path(self.options.model), folder, self._progress("staging weights"))
        if copied:  # on each node, whichever rank it was
            rank = self.place.world.rank
            here = f"rank {rank} on {self.place.hosts[rank]}"
            gb, seconds = copied / 1e9, time.monotonic() - started
            log.info("%s staged %.2f GB in %s in %.1f s, %.2f GB/s", here, gb, directory, seconds, gb / seconds)
        else:
            self._say(f"loading the copy in {directory}")
        return directory

    def _token_budget(self) -> tuple[int, int]:
        """How many tokens a step computes, and how many sequences run at once."""
        options, device = self.options, self.place.device
        budget = options.max_num_batched_tokens or TOKEN_BUDGET[device.type]
        if device.type == "cuda" and self.model.offload is not None and not options.max_num_batched_tokens:
            budget += options.max_num_seqs  # one step of a prompt of 8192 beside decoding ones: each copies all experts
        if device.type != "cpu" or options.max_num_batched_tokens:
            return budget, options.max_num_seqs
        weights = self.model.num_weights
        longest = torch.tensor([min(budget, int(CPU_STEP / (2 * weights)))])
        budget = max(FEW, int(self.place.world.all_gather(longest).min()))
        if budget < options.max_num_seqs:
            self._say(f"at most {budget} sequences run at once on each copy, so that a step of these weights is short")
        return budget, min(budget, options.max_num_seqs)

    def _expect(self, budget: int) -> None:
        """Have the watchdog wait for steps whose experts in host memory take long. Collective over the world."""
        world, watch, offload = self.place.world, self.place.watch, self.model.offload
        if offload is None:  # on all ranks or none
            watch.expect(0.0)
            return
        mine = torch.tensor([offload.longest_step(budget)], dtype=torch.float64)
        longest = float(world.all_gather(mine).max()) * self.place.mesh.stages  # one after the other
        patience = watch.expect(longest)
        if patience > self.options.timeout:
            self._say(
                f"a step of {budget} tokens may take {longest:.1f} s for experts in host memory: it is given up after "
                f"{patience:.1f} s, as --timeout {self.options.timeout:g} is less"
            )

    def _warm_up(self, sampler: Sampler, budget: int, max_num_seqs: int, block_size: int) -> int:
        """On GPUs: compile what steps will need, and find what the largest takes beside weights and cache, in bytes."""
        device = sampler.device
        if device.type != "cuda":
            return 0
        jit.compile_ahead(graphs.gemm_variants(self.model, max_num_seqs, budget, device), device)
        advice = (
            f"Lower --max-num-batched-tokens (now {budget}) or --max-num-seqs (now {max_num_seqs}), or use more ranks"
        )

        def profile() -> int:
            with errors.memory_for(f"a step of {budget} tokens that samples {max_num_seqs} sequences", advice):
                return profile_run(
                    self.model, self.place.mesh, sampler, budget, max_num_seqs, block_size, self._cache_dtype
                )

        # Where the memory of one rank of several runs out, the others wait for it within the step: that ends the job.
        peak = self._together(profile) if self.place.world.size == 1 else profile()
        self._say(f"a step of {budget} tokens takes {peak / kv_cache.MIB:.0f} MiB beside weights and cache")
        return peak

    @property
    def _cache_dtype(self) -> torch.dtype:
        return cache_spec.cache_dtype(self.options.kv_cache_dtype, self.model.dtype)

    @property
    def _kv_fraction(self) -> float:
        return self.options.kv_fraction or kv_cache.FRACTION[self.place.device.type]

    def _size_cache(self, max_num_seqs: int, block_size: int, peak: int) -> tuple[int, int, int]:
        """Blocks in the pool, the longest sequence and state snapshots, the same on all ranks; logged by rank 0.

        peak: what steps take beside weights and cache, where that is known.
        """
        options, place, model = self.options, self.place, self.model
        if place.device.type == "cuda":
            torch.cuda.empty_cache()  # what measuring took is free
        fraction = self._kv_fraction
        specs = model.cache_specs()
        block_bytes = sum(cache_spec.block_bytes(spec, block_size, self._cache_dtype) for spec in specs)
        state = sum(map(cache_spec.row_bytes, specs))
        states = max_num_seqs * state
        free = kv_cache.free_memory(place.device, place.ranks_here)
        given = options.mem * kv_cache.MIB or int(fraction * max(0, free - peak))
        memory = self._together(lambda: kv_cache.less_states(given, states, max_num_seqs))
        longest = -(-model.max_model_len // block_size)
        asked = bool(options.max_model_len)
        wanted, snapshots = max_num_seqs * longest, 0
        if options.prefix_cache:
            first = longest * block_bytes
            if first > memory and not asked:
                first = 0  # the longest sequence is shortened to what fits: beside snapshots too
            snapshots = kv_cache.num_snapshots(place.world, state, memory, first, max_num_seqs)
            memory -= snapshots * state
        if options.mem and block_bytes:
            wanted = memory // block_bytes
        blocks = kv_cache.num_blocks(place.world, block_bytes, wanted, memory)
        max_model_len = self._together(lambda: kv_cache.fit_length(blocks, block_size, model.max_model_len, asked))
        why = f"--mem {options.mem}" if options.mem else f"{fraction:g} of the free memory, at most what can be used"
        self._say(
            f"KV cache: {blocks * block_size} tokens in {blocks} blocks of {block_size}, "
            f"{blocks * block_bytes / kv_cache.MIB:.0f} MiB a rank ({why}); sequences of up to {max_model_len} tokens"
        )
        if states:
            self._say(
                f"recurrent states of {max_num_seqs} sequences: {states / kv_cache.MIB:.0f} MiB on this rank; "
                f"{snapshots} snapshots of them: {snapshots * state / kv_cache.MIB:.0f} MiB"
            )
        return blocks, max_model_len, snapshots

    def _may_share(self, snapshots: int) -> tuple[bool, bool]:
        """Whether prompts may begin with blocks of others, and whether blocks may be in host memory; the same on all
        ranks. Where a layer keeps what is of a whole sequence, the first needs state snapshots, which stay on the
        device."""
        asked, options = self.options.prefix_cache, self.options
        here = any(spec.row() for spec in self.model.cache_specs())
        if not int(self.place.world.all_gather(torch.tensor([int(here)])).max()):
            return asked, asked
        if asked and not snapshots:
            self._say(
                "no prefix cache: there is no memory for snapshots of states; lower --max-num-seqs or "
                "--max-model-len, or raise --mem or --kv-fraction"
            )
        if asked and options.kvcache_mem_cpu:
            self._say("--kvcache-mem-cpu is not used: this model's states are on the device alone")
        return asked and snapshots > 0, False

    def _allocate(self, blocks: int, block_size: int, rows: int = 0) -> cache_spec.Caches:
        """The KV cache of each local layer, and what it keeps of each of so many sequences."""
        options, model = self.options, self.model
        now = f"--mem (now {options.mem})" if options.mem else f"--kv-fraction (now {self._kv_fraction:g})"
        with errors.memory_for(f"a KV cache of {blocks * block_size} tokens", f"Lower {now}, or use more ranks"):
            return kv_cache.allocate(
                model.cache_specs(), blocks, block_size, self._cache_dtype, self.place.device, rows
            )

    def _host_tier(self, caches: cache_spec.Caches, block_size: int, budget: int) -> tuple[Swap | None, HostBlocks]:
        """The cache's host blocks, as many on each rank. None where no copy is worth it, or none are asked for."""
        asked, place, model = self.options.kvcache_mem_cpu, self.place, self.model
        if not asked:
            return None, HostBlocks()
        specs = model.cache_specs()
        block_bytes = sum(cache_spec.block_bytes(spec, block_size, self._cache_dtype) for spec in specs)
        tokens = min(budget, SWAP_TIMED[place.device.type], model.max_model_len)
        seconds = step_seconds(model, place.mesh, tokens, block_size, place.device, self._cache_dtype)
        memory = asked * kv_cache.MIB
        self._together(lambda: kv_cache.check_host(memory, self._free_of_host(caches)))
        count = kv_cache.num_blocks(place.world, block_bytes, memory // block_bytes, memory)

        def make() -> Swap:
            if not count:
                raise errors.FatalError(
                    f"--kvcache-mem-cpu {asked}: a block takes {block_bytes / kv_cache.MIB:.1f} MiB: ask for more",
                    errors.USAGE,
                )
            with errors.memory_for(f"--kvcache-mem-cpu {asked}", "Ask for less"):
                return Swap(specs, caches, block_size, self._cache_dtype, count)

        swap = self._together(make)
        mine = torch.tensor([*swap.measure(), block_size * seconds / tokens])
        *copy, compute = place.world.all_gather(mine).view(-1, 3).amax(0).tolist()  # of the slowest
        cost = CopyCost(*copy)
        least = cost.least_blocks(compute)
        figures = f"a block is copied back in {cost.block * 1e6:.0f} us and computed in {compute * 1e6:.0f} us"
        if least == NEVER:
            self._say(f"--kvcache-mem-cpu is not used: {figures}")
            return None, HostBlocks()
        self._say(
            f"KV cache in host memory: {count * block_size} tokens in {count} blocks, "
            f"{count * block_bytes / kv_cache.MIB:.0f} MiB a rank; {figures}, so {least} or more come back"
        )
        return swap, HostBlocks(count, least, cost.blocks_in(MOST_COPIED))

    def _free_of_host(self, caches: cache_spec.Caches) -> int:
        """What weights, experts in host memory too, and a CPU's cache leave of this rank's share of the host. Nothing
        is taken before all ranks have looked: what follows is collective."""
        free = kv_cache.free_memory(torch.device("cpu"), self.place.ranks_here)
        if self.place.device.type == "cpu":  # steps have yet to touch it
            free -= sum(tensor.nbytes for layer in caches for tensor in layer)
        return max(0, free)

    def _say(self, text: str) -> None:
        if self.place.world.rank == 0:
            log.info(text)
