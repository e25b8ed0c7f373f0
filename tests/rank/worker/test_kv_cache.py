import psutil
import pytest
import torch
from phalanx import errors
from phalanx.comm import threads
from phalanx.rank import cache_groups
from phalanx.rank.cache_groups import ONE_GROUP, CacheGroup
from phalanx.rank.model.cache_spec import PagedKV, PagedLatent, RecurrentState, block_bytes, row_bytes
from phalanx.rank.worker import kv_cache


def group(place, limit, usage, stat, version):
    place.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (place / names[0]).write_text(f"{limit}\n")
    (place / names[1]).write_text(f"{usage}\n")
    (place / "memory.stat").write_text(stat)


def test_the_tightest_cgroup_on_the_way_up_counts(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/slurm/job_7/step_0\n")
    stat = "anon 5\ninactive_file 100\n"
    group(tmp_path / "slurm/job_7", 5000, 1000, stat, 2)
    group(tmp_path / "slurm/job_7/step_0", "max", 900, stat, 2)
    assert min(kv_cache._cgroup_rooms(own, tmp_path)) == 4100


def test_the_older_kind_of_cgroup(tmp_path):
    own = tmp_path / "own"
    own.write_text("9:cpu,cpuacct:/other\n4:memory:/job_8\n")
    group(tmp_path / "memory/job_8", 7000, 2000, "inactive_file 1\ntotal_inactive_file 500\n", 1)
    assert min(kv_cache._cgroup_rooms(own, tmp_path)) == 5500


def test_no_cgroup_is_no_limit(tmp_path):
    assert kv_cache._cgroup_rooms(tmp_path / "none", tmp_path) == [1 << 62]
    assert 0 < kv_cache.free_memory(torch.device("cpu"), 2) < 1 << 50


def test_every_rank_gets_what_the_poorest_can_hold():
    blocks = threads.run(lambda comm: kv_cache.num_blocks(comm, 100, wanted=50, memory=[9000, 700, 2000][comm.rank]), 3)
    assert blocks == [7, 7, 7]
    assert threads.run(lambda comm: kv_cache.num_blocks(comm, 100, wanted=5, memory=9000), 2) == [5, 5]


def test_a_sequence_is_never_longer_than_the_pool():
    assert kv_cache.fit_length(10, 16, 100, chosen=False) == 100
    assert kv_cache.fit_length(10, 16, 1000, chosen=False) == 160
    for blocks, chosen in ((10, True), (0, False)):
        with pytest.raises(errors.FatalError, match=f"holds {blocks * 16}.*tokens.*--max-model-len") as caught:
            kv_cache.fit_length(blocks, 16, 1000, chosen)
        assert caught.value.code == errors.MEMORY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tensors_are_zero_and_of_the_shape_asked_for(dtype):
    specs = [PagedKV(2, 5, 5), PagedKV(1, 6, 3, window=9)]
    (keys, values), other = kv_cache.allocate(specs, 3, 4, dtype, torch.device("cpu"))
    assert keys.shape == values.shape == (3, 4, 2, 5) and keys.dtype == dtype
    assert [x.shape for x in other] == [(3, 4, 1, 6), (3, 4, 1, 3)]
    assert not keys.any() and keys.data_ptr() != values.data_ptr()
    keys[1] = 1
    assert not values.any()


def test_states_have_an_entry_for_each_row():
    specs = [PagedKV(2, 5, 5), RecurrentState(3, 7, 2, 4, 5)]
    _, (convolution, state) = kv_cache.allocate(specs, 3, 4, torch.bfloat16, torch.device("cpu"), 6)
    assert convolution.shape == (6, 3, 7) and convolution.dtype == torch.float32
    assert state.shape == (6, 1, 2, 4, 5) and state.dtype == torch.float32  # errors of a recurrence add up
    _, several = kv_cache.allocate(specs, 3, 4, torch.bfloat16, torch.device("cpu"), 6, query_len=4)
    assert [x.shape for x in several] == [(6, 6, 7), (6, 4, 2, 4, 5)]  # a state behind each token, and their inputs
    assert block_bytes(specs[1], 16, torch.bfloat16) == 0
    assert row_bytes(specs[1]) == (3 * 7 + 2 * 4 * 5) * 4 and row_bytes(specs[0]) == 0


def test_states_that_do_not_fit_are_refused():
    assert kv_cache.less_states(1000, 0, 8) == 1000 and kv_cache.less_states(1000, 300, 8) == 700
    with pytest.raises(errors.FatalError, match="8 sequences.*2 MiB"):
        kv_cache.less_states(1 << 20, 2 << 20, 8)


@pytest.mark.parametrize(
    "states, memory, count",
    [
        ((10, 10), 1 << 20, 16),  # two for each of eight sequences
        ((10, 20), 800, 10),  # a quarter of the memory, on the rank with the most
        ((10, 0), 800, 16),  # one of two stages has none
        ((10, 10), 130, 3),  # the longest sequence's blocks come first
        ((10, 10), 100, 0),
        ((0, 0), 800, 0),
    ],
)
def test_snapshots_get_a_part_of_the_memory(states, memory, count):
    found = threads.run(lambda world: kv_cache.num_snapshots(world, states[world.rank], memory, 100, 8), 2)
    assert found == [count] * 2


def test_a_stage_without_keys_has_as_many_blocks_as_others():
    threads.run(lambda world: _check_blocks(world), 2)


def _check_blocks(world):
    assert kv_cache.num_blocks(world, [0, 100][world.rank], 50, 3000) == 30


def test_codes_have_scales():
    (keys, values, scales), (latents, more) = kv_cache.allocate(
        [PagedKV(2, 5, 3), PagedLatent(24)], 3, 4, torch.float8_e4m3fn, torch.device("cpu")
    )
    assert keys.shape == (3, 4, 2, 5) and values.shape == (3, 4, 2, 3) and latents.shape == (3, 4, 24)
    assert keys.dtype == values.dtype == latents.dtype == torch.float8_e4m3fn
    assert scales.shape == (3, 2, 2, 4) and more.shape == (3, 1, 2, 4) and scales.dtype == more.dtype == torch.uint8


def test_layers_of_one_shape_may_share():
    specs = [PagedKV(2, 5, 5), PagedKV(1, 6, 3), PagedKV(2, 5, 5, window=9)]
    first, other, last = kv_cache.allocate_shared(specs, 3, 4, torch.float32, torch.device("cpu"))
    assert first is last and other is not first and other[0].shape == (3, 4, 1, 6)


def test_a_cpus_cache_takes_memory_as_it_is_used():
    """The pool has addresses for all that may be asked for; pages come when they are first written."""

    def resident():
        return psutil.Process().memory_info().rss

    spec, before = PagedKV(4, 64, 64), resident()
    (layer,) = kv_cache.allocate([spec], 16384, 16, torch.float32, torch.device("cpu"))
    size = sum(one.nbytes for one in layer)
    assert size >= 1 << 29 and resident() - before < size / 8
    for tensor in layer:
        tensor[: len(tensor) // 2] = 1
    assert size / 4 < resident() - before < size * 3 / 4


FULL, NARROW, WIDE = PagedKV(2, 8, 8), PagedKV(2, 8, 8, 16), PagedKV(2, 8, 8, 64)


def layouts(*stages, longest=1000, max_tables=8):
    """Gives the layouts of ranks, each a pipeline stage with these layers."""
    return threads.run(
        lambda comm: kv_cache.layout(stages[comm.rank], comm, comm.rank, 16, torch.float32, longest, max_tables),
        len(stages),
    )


def test_layers_with_a_window_are_a_group_of_their_own():
    layer = block_bytes(FULL, 16, torch.float32)
    (one,) = layouts([NARROW, FULL, NARROW, NARROW])
    assert one == kv_cache.Layout((CacheGroup(0, 3), CacheGroup(16)), [1, 0, 1, 1], 3 * layer)
    first, last = layouts([NARROW, NARROW, FULL], [NARROW])
    assert first.groups == last.groups and [group.window for group in first.groups] == [0, 16], "stages agree"
    assert (first.layer_groups, last.layer_groups) == ([1, 1, 0], [1])
    entries = first.groups[0].entries
    assert (first.block_bytes, last.block_bytes) == (max(entries, 2) * layer, layer)
    (all_windows,) = layouts([NARROW] * 2)
    assert all_windows == kv_cache.Layout((CacheGroup(16),), [0, 0], 2 * layer)
    (two_windows,) = layouts([WIDE, FULL, NARROW])
    assert [group.window for group in two_windows.groups] == [0, 64, 16]


def test_chunks_are_known_on_all_stages():
    chunked = PagedKV(2, 8, 8, 64, chunked=True)
    first, last = layouts([chunked, chunked, FULL], [FULL])
    assert [(group.window, group.chunked) for group in first.groups] == [(0, False), (64, True)]
    assert first.groups == last.groups
    with pytest.raises(errors.FatalError, match="--block-size 24"):
        chunked.block(24, torch.float32)


def test_windows_that_cannot_be_a_group_free_nothing():
    (long,) = layouts([NARROW, FULL], longest=16 + cache_groups.TILE - 2)
    assert long.groups == ONE_GROUP, "no sequence is longer"
    (unlike,) = layouts([NARROW, PagedKV(4, 8, 8)])
    assert unlike.groups == ONE_GROUP and unlike.layer_groups == [0, 0]  # blocks would differ in bytes
    (many,) = layouts([NARROW, FULL], max_tables=1)
    assert many.groups == ONE_GROUP  # plans could not number the tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_groups_have_the_same_memory_for_a_block(dtype):
    """A block's entries of one group are apart from one another and from other blocks, and in the block's memory."""
    specs = [NARROW, FULL, NARROW, NARROW, RecurrentState(3, 8, 2, 4, 4)]
    how = kv_cache.Layout((CacheGroup(0, 3), CacheGroup(16)), [1, 0, 1, 1, 0], 3 * block_bytes(FULL, 16, dtype))
    blocks = 5
    caches, pool = kv_cache.allocate_pool(specs, how, blocks, 16, dtype, torch.device("cpu"), rows=2)
    assert sum(x.nbytes for x in pool) == blocks * how.block_bytes and all(len(x) == blocks for x in pool)
    assert [len(layer[0]) for layer in caches] == [5, 15, 5, 5, 2] and len(caches[4]) == 2
    for group, entries in ((0, 3), (1, 1)):
        for block in range(blocks):
            for x in pool:
                x.view(torch.uint8).zero_()
            written = 0
            for layer, number in zip(caches[:4], how.layer_groups, strict=False):
                for x in layer if number == group else ():
                    assert x.is_contiguous()
                    places = x.view(torch.uint8)[[entry * blocks + block for entry in range(entries)]]
                    assert not places.any()  # another layer or entry has this memory
                    x.view(torch.uint8)[[entry * blocks + block for entry in range(entries)]] = 1
                    written += places.numel()
            assert written == how.block_bytes  # all of it, as both groups have three layers' blocks
            assert all(x.view(torch.uint8)[block].all() for x in pool)
            assert not any(x.view(torch.uint8)[:block].any() or x.view(torch.uint8)[block + 1 :].any() for x in pool)


def test_the_longest_sequence_has_its_windows_blocks_alone():
    groups = CacheGroup(0), CacheGroup(16)
    window = cache_groups.held((CacheGroup(16),), 16, 10_000, 32)
    assert kv_cache.fit_length(100, 16, 10_000, False, groups, 32) == (100 - window) * 16
    with pytest.raises(errors.FatalError):
        kv_cache.fit_length(100, 16, 10_000, True, groups, 32)
