"""A model on one rank, from its files to steps, and off it again: load, run, unload.

The ranks of a job, their mesh and their watchdog outlive it: one engine may load several models, one after the other.
"""

from __future__ import annotations

import contextlib
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
from .. import cache_groups, heap
from ..cache_groups import ONE_GROUP, Groups
from ..gguf import checkpoint
from ..model import cache_spec, fingerprint
from ..model.base import Model
from ..model.drafts import DraftSource, most_verified
from ..model.drafts.find import Wanted, find, kind_of
from ..model.experts.offload import OffloadOptions
from ..model.load import check as check_model
from ..model.load import load as load_model
from ..model.load_memory import OthersRefuse
from ..model.weights.local_copy import make_local_copy
from ..options import Options
from . import graphs, kv_cache
from .host_copy import HostCopy, storages
from .microbatches import microbatch_tokens
from .model_runner import ModelRunner, StepLimits
from .profile_run import profile_run, step_seconds
from .sampler import Sampler
from .state import BatchState
from .swap import NEVER, CopyCost, HostBlocks, Swap

log = logging.getLogger("phalanx")
T = TypeVar("T")

BLOCK_SIZE = 16
TOKEN_BUDGET = {"cpu": 512, "cuda": 8192, "mps": 512}  # of a step
# A CPU's steps must stay short, for the other streams and for --timeout: about ten seconds of a slow one.
CPU_STEP = 1e12  # additions and multiplications of a rank
MAX_COPIED = 0.01  # seconds of copies back after which a plan takes no further sequence that needs some
SWAP_TIMED = {"cpu": 64, "cuda": 2048, "mps": 64}  # tokens of the step that says how fast blocks are computed
VERIFIED = 64  # tokens that a step with drafts may sample, however few sequences run: their logits take little memory
QUERY_LENS = 1, 2, 4, 8  # tokens of a sequence that steps verify, on a CPU
TABLES = 1 << 16  # block tables of all rows and cache groups, as plans number them
FEW = 4  # tokens that a step may have whatever the weights


class RankContext(NamedTuple):
    """A rank's communicator, mesh, device and watchdog, the same for all models of a job."""

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


class ImageCosts(NamedTuple):
    """The costs of an image's features."""

    token_bytes: int = 1  # of what one of its tokens stands for
    pieces: int = 1  # in which the tower computes it
    pixel: float = 0.0  # tokens of a prompt that take about as long as a pixel ...
    pair: float = 0.0  # ... and as two pixels that attend to each other
    ranks: int = 1  # that have a tower


class Limits(NamedTuple):
    """Limits that the scheduler keeps to, the same on all ranks."""

    blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int  # of a step, which an image's tokens may exceed where they attend to each other
    prefix_cache: bool  # whether prompts may begin with blocks of others
    snapshots: int = 0  # of sequences' states; 0: no layer keeps any, or there is no prefix cache
    host_blocks: HostBlocks = HostBlocks()
    groups: Groups = ONE_GROUP
    query_lens: tuple[int, ...] = (1,)  # tokens that a sequence may have verified in a step
    draft_model: str = ""  # the kind of the draft model, as --speculate names it; empty: there is none
    images: ImageCosts = ImageCosts()
    verified_tokens: int = 0  # of all sequences in a step with drafts, those of prompts' ends apart
    step_times: tuple[tuple[int, int, float], ...] = ()  # as ModelRunner.step_times


class LoadRefused(errors.FatalError):
    """A model that cannot be loaded; raised on all ranks alike, so that they may go on with another one."""


class Engine:
    """Collective: every rank of the job loads, runs and unloads the same models in the same order."""

    model: Model
    runner: ModelRunner
    draft_kind = ""  # of the draft model, as --speculate names it; empty: there is none
    source: DraftSource | None = None  # that model, on the last stage

    def __init__(
        self, options: Options, place: RankContext, progress: Callable[[str], Callable[[int, int], None]] | None = None
    ):
        """progress: by the name of a phase that takes long, what gets bytes done and all bytes."""
        self.options = options
        self.place = place
        self._progress = progress or (lambda _: lambda done, total: None)
        self._served = False  # at least one model
        self._parked: HostCopy | None = None  # of the model's weights, where they are not on the device

    @property
    def kept(self) -> bool:
        """Whether there are weights but nothing that computes with them: the model sleeps."""
        return hasattr(self, "model") and not hasattr(self, "runner")

    def load_weights(self) -> None:
        """Read the weights, or bring those back that are kept."""
        options, place, watch = self.options, self.place, self.place.watch
        if self.kept:
            watch.begin("copying the weights back")
            started, parked = time.monotonic(), self._parked
            if parked is not None:
                self._together(lambda: self._restore(parked))
                self._parked = None
                self._say(f"the weights were copied back in {time.monotonic() - started:.1f} s")
            return
        watch.begin("comparing the nodes' models")
        checkpoint.pair(options.model, options.mmproj)
        fingerprint.check(place.world, place.hosts, Path(options.model), options.load_format != "dummy")
        free = [kv_cache.free_memory(where, place.ranks_here) for where in (place.device, torch.device("cpu"))]
        place.world.barrier()  # nobody takes memory before all have looked
        directory = self._together(self._directory)
        self.model = self._together(lambda: self._load(directory, *free))
        self.draft_kind, self.source = self._together(lambda: self._find_source(directory, free[0]))

    def _restore(self, parked: HostCopy) -> None:
        with errors.memory_for("the weights", "Something else has taken the device's memory meanwhile"):
            parked.restore()

    def load(self) -> Limits:
        """Read the weights, make room for the KV cache and prepare all that steps need; on return steps may come."""
        options, place = self.options, self.place
        world, watch, device = place.world, place.watch, place.device
        self.load_weights()
        block_size = options.block_size or BLOCK_SIZE
        watch.begin("measuring a step")
        budget, max_num_seqs = self._token_budget()
        largest = budget + max(0, self.model.image_span - 1)  # of a step: a chunk does not end within an image
        self._expect(largest)
        samples = place.mesh.last and place.mesh.tensor.rank == 0
        sampler = Sampler(max_num_seqs, self.model.vocab_size, device, samples)
        peak = self._warm_up(sampler, largest, max_num_seqs, block_size)
        sizes = largest, block_size, device, self._cache_dtype
        microbatch = microbatch_tokens(self.model, place.mesh, world, self._say, *sizes)
        watch.begin("making room for the KV cache")
        layout = self._layout(max_num_seqs, block_size)
        blocks, max_model_len, snapshots = self._size_cache(layout, max_num_seqs, block_size, largest, peak)
        caches, pool = self._together(lambda: self._allocate(layout, blocks, block_size, max_num_seqs + snapshots))
        shares, may_swap = self._may_share(snapshots)
        swap, in_host = self._host_tier(layout, pool, block_size, largest) if may_swap else (None, HostBlocks())
        verified = self._verified_tokens(max_num_seqs)
        limits = StepLimits(microbatch, largest, peak, self._query_lens, verified)
        rows = BatchState(max_num_seqs, max_model_len, block_size, layout.groups, layout.layer_groups, blocks)
        watch.begin("preparing steps")
        self.runner = ModelRunner(self.model, place.mesh, rows, sampler, caches, watch, swap, limits, self.source)
        self.runner.ready.wait()
        heap.freeze()
        world.barrier()  # rank 0 says that it is ready, and speaks for all
        watch.started()
        self._served = True
        return Limits(
            blocks, block_size, max_model_len, max_num_seqs, budget, shares, snapshots, in_host, layout.groups,
            self._query_lens, self.draft_kind, self._image_costs, verified, self.runner.step_times,
        )  # fmt: skip

    def unload(self, keep: bool = False) -> None:
        """Give all memory back that `load` took. The runner has finished: by a plan.

        keep: the weights stay in host memory where it has room for them, and `load` brings them back.
        """
        watch = self.place.watch
        watch.begin("unloading the model")
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()
        watch.poll_device = None  # the runner's: it would keep the model
        watch.finished = watch.entered
        self.__dict__.pop("runner", None)
        if keep and self._park():
            self._free_unused()
        else:
            self._give_back()

    def _park(self) -> bool:
        """Move the weights to host memory; CPUs and Macs have them there, as tables and layers that steps read there.
        False where they have to be dropped, as then on all ranks."""
        device, model = self.place.device, self.model
        if device.type != "cuda" or self._parked is not None:
            return True
        if model.offload is not None:  # on all ranks
            self._say("the weights are dropped: addresses of experts in host memory are known to kernels")
            return False
        heap.collect()
        found = storages((model, self.source), device)
        size = sum(storage.nbytes() for storage in found)
        free, started = kv_cache.free_memory(torch.device("cpu"), self.place.ranks_here), time.monotonic()
        if not self._all(size <= free):
            self._say(f"the weights are dropped: there is no host memory for them ({size / 1e9:.1f} GB a rank)")
            return False
        copy: HostCopy | None = None
        with contextlib.suppress(errors.HostMemoryError):
            copy = HostCopy(found)
        if not self._all(copy is not None) or copy is None:
            self._say(f"the weights are dropped: the system refuses host memory for them ({size / 1e9:.1f} GB a rank)")
            return False
        copy.give_device_memory()
        self._parked = copy
        self._say(
            f"{size / 1e9:.1f} GB of weights a rank were moved to host memory in {time.monotonic() - started:.1f} s"
        )
        return True

    def _all(self, here: bool) -> bool:
        """Whether it holds on all ranks. Collective."""
        return bool(int(self.place.world.all_gather(torch.tensor([int(here)])).min()))

    def abandon(self) -> None:
        """After a `load` that failed: give back what it took."""
        self.place.watch.begin("giving up a model")
        self._give_back()

    def check(self, options: Options) -> None:
        """Raise FatalError where `load` would with these options, as far as files tell. Not collective."""
        checkpoint.pair(options.model, options.mmproj)
        check_model(
            options.model, self.place.mesh, options.max_model_len, options.load_format, options.isq,
            options.quantization,
        )  # fmt: skip

    def _give_back(self) -> None:
        self.__dict__.pop("runner", None)
        self.__dict__.pop("source", None)
        self.draft_kind = ""
        model = self.__dict__.pop("model", None)
        if model is not None and model.offload is not None:
            ops.stay_awake()  # as threads do without experts in host memory
        del model
        self._parked = None
        self._free_unused()

    def _free_unused(self) -> None:
        """Hand freed memory back. Collective."""
        heap.collect()
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.place.device.type == "mps":
            torch.mps.empty_cache()
        else:
            heap.trim()
        self.place.world.barrier()  # nobody loads the next before all have given theirs back

    def _together(self, work: Callable[[], T]) -> T:
        """The result of `work`. A later model: raises LoadRefused on all ranks where any fails. The first one's failure
        is logged at once, by the rank that has it, and ends the job."""
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
        reasons = [text.decode() for text in gather_bytes(self.place.world, why.encode()) if text]
        if reasons:
            raise LoadRefused(reasons[0], errors.MODEL)
        return cast(T, made)

    def _directory(self) -> Path:
        """The directory that the model is read from."""
        staged = self.options.stage and self.options.load_format != "dummy"
        return self._stage() if staged else Path(self.options.model)

    def _find_source(self, directory: Path, free: int) -> tuple[str, DraftSource | None]:
        """The kind of the draft model, the same on all ranks, and this rank's, if its stage has it."""
        options, place = self.options, self.place
        wanted = Wanted(
            options.speculate, options.draft_model, options.dtype, options.load_format, options.load, options.isq,
            options.quantization, options.draft_tensor_parallel_size,
        )  # fmt: skip
        room = max(0, free - self.model.weight_bytes)
        with errors.memory_for("the draft model", "Use --speculate none, or more ranks (--tp)"):
            source = find(wanted, directory, self.model, place.mesh, place.device, room)
        return kind_of(wanted, place.device), source

    @property
    def _cache_specs(self) -> list[cache_spec.CacheSpec]:
        """The cache specs of this stage's layers, and of the draft model's behind them."""
        return [*self.model.cache_specs(), *(self.source.cache_specs() if self.source is not None else ())]

    @property
    def _image_costs(self) -> ImageCosts:
        """Costs of images, equal on all ranks; those of the first pipeline stage have the tower."""
        tower, costs = self.model.vision, ImageCosts()
        if tower is not None:
            size = (1 + tower.levels) * self.model.hidden_size * self.model.dtype.itemsize
            weights = max(1, self.model.num_weights)
            pixel, pair = tower.multiplications()
            costs = ImageCosts(size, tower.depth + 1, pixel / weights, pair / weights)
        found = self.place.world.all_gather(torch.tensor(costs, dtype=torch.float64)).view(-1, len(costs))
        size, pieces, pixel, pair, _ = found.max(0).values.tolist()
        return ImageCosts(int(size), int(pieces), pixel, pair, self.place.mesh.tensor.size)

    @property
    def _sees(self) -> bool:
        """Whether the model is to take images, where it can. Models that draft know texts alone."""
        wanted = self.options.speculate in ("auto", "none", "ngram") and not self.options.draft_model
        return wanted and self.options.images_per_prompt > 0

    def _load(self, directory: Path, free: int, free_of_host: int) -> Model:
        options, place = self.options, self.place
        started = time.monotonic()
        fewer = "Use more ranks (--tp, --pp), a narrower --dtype or --isq"
        if options.num_experts_offload_per_rank or options.expert_memory:
            fewer = f"{fewer}, or leave more experts on the GPUs (--num-experts-offload-per-rank, --expert-memory)"
        with errors.memory_for("the weights", fewer):
            model = load_model(
                directory, place.mesh, place.device, options.dtype, options.max_model_len, options.load_format,
                options.load, self._progress("loading weights"), free, free_of_host, options.isq, options.quantization,
                OffloadOptions(options.num_experts_offload_per_rank, options.expert_memory * kv_cache.MIB,
                           options.expert_placement, options.expert_deferral),
                int(options.cpu_offload_gb * (1 << 30)), images=self._sees,
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
        """On GPUs: compile what steps will need, and find what the largest takes in addition to weights and cache, in
        bytes."""
        device = sampler.device
        if device.type != "cuda":
            return 0
        jit.compile_ahead(graphs.gemm_variants(self.model, max_num_seqs, budget, device), device)
        sampled = max_num_seqs + self._verified_tokens(max_num_seqs)  # beside prompts' ends
        advice = (
            f"Lower --max-num-batched-tokens (now {budget}) or --max-num-seqs (now {max_num_seqs}), or use more ranks"
        )

        def profile() -> int:
            with errors.memory_for(f"a step of {budget} tokens that samples {sampled} tokens", advice):
                of = self.model, self.place.mesh, sampler, budget, max_num_seqs, block_size, self._cache_dtype
                return profile_run(*of, sampled, self._query_lens, self.source)

        # The others wait within the step where the memory of one rank of several runs out: that ends the job.
        peak = self._together(profile) if self.place.world.size == 1 else profile()
        self._say(f"a step of {budget} tokens takes {peak / kv_cache.MIB:.0f} MiB beside weights and cache")
        return peak

    def _verified_tokens(self, max_num_seqs: int) -> int:
        """Limits.verified_tokens; 0: no step has drafts."""
        return max(max_num_seqs, VERIFIED) if len(self._query_lens) > 1 else 0

    @property
    def _query_lens(self) -> tuple[int, ...]:
        """How many tokens of a sequence a step may verify: some numbers, the least of which is one."""
        options = self.options
        if options.speculate == "none":
            return (1,)
        if options.speculate == "auto" and not self.draft_kind and not self._verifies_for_free:
            return (1,)
        most = most_verified(self.draft_kind, options.num_speculative_tokens)
        if self.place.device.type == "cuda":  # each number takes graphs of its own
            return 1, most
        return *(n for n in QUERY_LENS if n < most), most

    @property
    def _verifies_for_free(self) -> bool:
        """Whether a step may have several tokens of a sequence without memory or a longer start for that: then what
        sequences repeat is verified, unless options say otherwise. The same on all ranks."""
        if self.place.device.type != "cpu" or self.place.mesh.stages > 1:
            return False
        return not any(spec.row() for spec in self._cache_specs)

    @property
    def _cache_dtype(self) -> torch.dtype:
        return cache_spec.cache_dtype(self.options.kv_cache_dtype, self.model.dtype)

    @property
    def _kv_fraction(self) -> float:
        return self.options.kv_fraction or kv_cache.FRACTION[self.place.device.type]

    def _layout(self, max_num_seqs: int, block_size: int) -> kv_cache.Layout:
        """How layers share the cache's blocks, where the longest sequence is the model's."""
        model, place = self.model, self.place
        of = self._cache_specs, place.world, place.mesh.pipe.rank
        return kv_cache.layout(*of, block_size, self._cache_dtype, model.max_model_len, TABLES // max_num_seqs)

    def _size_cache(
        self, layout: kv_cache.Layout, max_num_seqs: int, block_size: int, budget: int, peak: int
    ) -> tuple[int, int, int]:
        """Blocks in the pool, the longest sequence and state snapshots, the same on all ranks; logged by rank 0.

        peak: what steps take in addition to weights and cache, where that is known.
        """
        options, place, model = self.options, self.place, self.model
        if place.device.type == "cuda":
            torch.cuda.empty_cache()  # what measuring took is free
        fraction = self._kv_fraction
        groups, block_bytes = layout.groups, layout.block_bytes
        state = sum(cache_spec.row_bytes(spec, self._query_lens[-1]) for spec in self._cache_specs)
        states = max_num_seqs * state
        free = kv_cache.free_memory(place.device, place.ranks_here)
        given = options.mem * kv_cache.MIB or int(fraction * max(0, free - peak))
        memory = self._together(lambda: kv_cache.less_states(given, states, max_num_seqs))
        asked = bool(options.max_model_len)
        whole = sum(cache_groups.covering(group, block_size, model.max_model_len) for group in groups)
        wanted, snapshots = max_num_seqs * whole, 0  # what a window has no need of is for the prefix cache
        if options.prefix_cache:
            first = cache_groups.held(groups, block_size, model.max_model_len, budget) * block_bytes
            if first > memory and not asked:
                first = 0  # the longest sequence is shortened to what fits: beside snapshots too
            snapshots = kv_cache.num_snapshots(place.world, state, memory, first, max_num_seqs)
            memory -= snapshots * state
        if options.mem and block_bytes:
            wanted = memory // block_bytes
        blocks = kv_cache.num_blocks(place.world, block_bytes, wanted, memory)
        max_model_len = self._together(
            lambda: kv_cache.fit_length(blocks, block_size, model.max_model_len, asked, groups, budget)
        )
        why = f"--mem {options.mem}" if options.mem else f"{fraction:g} of the free memory, at most what can be used"
        if place.device.type == "cpu":
            why += "; taken from the system as it is first used"
        self._say(
            f"KV cache: {cache_groups.capacity(groups, block_size, blocks, max_model_len)} tokens in {blocks} blocks "
            f"of {block_size}, {blocks * block_bytes / kv_cache.MIB:.0f} MiB a rank ({why}); sequences of up to "
            f"{max_model_len} tokens"
        )
        if any(group.window for group in groups):
            said = (f"{group.window or 'all'} tokens in blocks of {group.entries * block_size}" for group in groups)
            self._say(f"layers keep {', others '.join(said)}; as many tokens fit where sequences are that long")
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
        here = any(spec.row() for spec in self._cache_specs)
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

    def _allocate(
        self, layout: kv_cache.Layout, blocks: int, block_size: int, rows: int
    ) -> tuple[cache_spec.Caches, list[torch.Tensor]]:
        """The KV cache of each local layer, with what it keeps of each of so many sequences, and the block pool's
        tensors."""
        options = self.options
        now = f"--mem (now {options.mem})" if options.mem else f"--kv-fraction (now {self._kv_fraction:g})"
        with errors.memory_for(f"a KV cache of {blocks * block_size} tokens", f"Lower {now}, or use more ranks"):
            return kv_cache.allocate_pool(
                self._cache_specs, layout, blocks, block_size, self._cache_dtype, self.place.device, rows,
                self._query_lens[-1],
            )  # fmt: skip

    def _host_tier(
        self, layout: kv_cache.Layout, pool: list[torch.Tensor], block_size: int, budget: int
    ) -> tuple[Swap | None, HostBlocks]:
        """The cache's host blocks, as many on each rank. None where no copy is worth it, or none are asked for."""
        asked, place, model = self.options.kvcache_mem_cpu, self.place, self.model
        if not asked:
            return None, HostBlocks()
        block_bytes = layout.block_bytes
        tokens = min(budget, SWAP_TIMED[place.device.type], model.max_model_len)
        seconds = step_seconds(model, place.mesh, tokens, block_size, place.device, self._cache_dtype)
        memory = asked * kv_cache.MIB
        self._together(lambda: kv_cache.check_host(memory, self._free_of_host(pool)))
        count = kv_cache.num_blocks(place.world, block_bytes, memory // block_bytes, memory)

        def make() -> Swap:
            if not count:
                raise errors.FatalError(
                    f"--kvcache-mem-cpu {asked}: a block takes {block_bytes / kv_cache.MIB:.1f} MiB: ask for more",
                    errors.USAGE,
                )
            with errors.memory_for(f"--kvcache-mem-cpu {asked}", "Ask for less"):
                return Swap(pool, count)

        swap = self._together(make)
        together = sum(1 / group.entries for group in layout.groups)  # blocks that as many tokens have, in all groups
        mine = torch.tensor([*swap.measure(), block_size * seconds / tokens / together])
        *copy, compute = place.world.all_gather(mine).view(-1, 3).amax(0).tolist()  # of the slowest
        cost = CopyCost(*copy)
        least = cost.least_blocks(compute)
        figures = f"a block is copied back in {cost.block * 1e6:.0f} us and computed in {compute * 1e6:.0f} us"
        if least == NEVER:
            self._say(f"--kvcache-mem-cpu is not used: {figures}")
            return None, HostBlocks()
        self._say(
            f"KV cache in host memory: {cache_groups.capacity(layout.groups, block_size, count, model.max_model_len)} "
            f"tokens in {count} blocks, "
            f"{count * block_bytes / kv_cache.MIB:.0f} MiB a rank; {figures}, so {least} or more come back"
        )
        return swap, HostBlocks(count, least, cost.blocks_in(MAX_COPIED))

    def _free_of_host(self, pool: list[torch.Tensor]) -> int:
        """This rank's share of the host, less weights, experts in host memory, and a CPU's cache. Nothing
        is taken before all ranks have looked: what follows is collective."""
        free = kv_cache.free_memory(torch.device("cpu"), self.place.ranks_here)
        if self.place.device.type == "cpu":  # steps have yet to touch it
            free -= sum(tensor.nbytes for tensor in pool)
        return max(0, free)

    def _say(self, text: str) -> None:
        if self.place.world.rank == 0:
            log.info(text)
