import pytest
from phalanx.rank.protocol import pack_u32
from phalanx.rank.scheduler.blocks import SLICE, Blocks, chain, root


def hashes(count, salt=""):
    found = [root(salt)]
    for i in range(count):
        found.append(chain(found[-1], pack_u32([i])))
    return found[1:]


def test_blank_blocks_are_taken_before_cached_ones():
    blocks = Blocks(4, 1)
    first = blocks.allocate(2)
    for block, digest in zip(first, hashes(2), strict=True):
        blocks.cache(block, digest)
    blocks.free(first)
    assert (blocks.num_free, blocks.num_cached) == (4, 2)
    assert not set(blocks.allocate(2)) & set(first)
    assert blocks.match(hashes(2)).tables[0] == first


def test_the_least_recently_used_goes_first_and_a_sequences_end_before_its_beginning():
    blocks = Blocks(4, 1)
    a, b = hashes(2, "a"), hashes(2, "b")
    for digests in (a, b):
        mine = blocks.allocate(2)
        for block, digest in zip(mine, digests, strict=True):
            blocks.cache(block, digest)
        blocks.free(mine)
    blocks.incref(blocks.match(a).tables[0])  # a is used again, after b
    blocks.free(blocks.match(a).tables[0])
    blocks.allocate(1)
    assert [blocks.match(x).matched for x in (a, b)] == [2, 1]
    blocks.allocate(1)
    assert [blocks.match(x).matched for x in (a, b)] == [2, 0]


def test_a_shared_block_is_free_when_its_last_holder_leaves():
    blocks = Blocks(2, 1)
    mine = blocks.allocate(1)
    blocks.cache(mine[0], hashes(1)[0])
    assert blocks.num_unreferenced(mine) == 0
    blocks.incref(mine)
    blocks.free(mine)
    assert blocks.num_used == 1
    blocks.free(mine)
    assert blocks.num_used == 0 and blocks.num_unreferenced(mine) == 1


def test_of_two_equal_blocks_the_first_stays_known():
    blocks = Blocks(2, 1)
    one, two = blocks.allocate(2)
    digest = hashes(1)[0]
    blocks.cache(one, digest)
    blocks.cache(two, digest)
    assert blocks.match([digest]).tables[0] == [one]
    blocks.free([one, two])
    assert blocks.num_cached == 1
    blocks.check([])


def test_taking_more_than_is_free_takes_nothing():
    blocks = Blocks(2, 1)
    with pytest.raises(ValueError, match="3 blocks.*wanted.*2"):
        blocks.allocate(3)
    assert blocks.num_free == 2


def cached():
    """A pool of four: two blocks are cached, two are blank, and nobody holds one."""
    blocks = Blocks(4, 1)
    mine = blocks.allocate(2)
    for block, digest in zip(mine, hashes(2), strict=True):
        blocks.cache(block, digest)
    blocks.free(mine)
    blocks.check([])
    blocks.check_empty()
    return blocks, mine


def test_the_check_finds_a_leak_and_a_double_release():
    blocks = Blocks(2, 1)
    mine = blocks.allocate(1)
    blocks.check([mine])
    with pytest.raises(RuntimeError, match=r"accounting.*\[0\]"):
        blocks.check([])
    with pytest.raises(RuntimeError, match="accounting.*1 of 2"):
        blocks.check_empty()
    blocks.free(mine)
    blocks._blank.append(mine[0])
    with pytest.raises(RuntimeError, match=f"broken.*block {mine[0]}"):
        blocks.check([])
    with pytest.raises(RuntimeError, match="accounting.*3 of 2"):
        blocks.check_empty()


def swap(blocks, mine):
    """A blank block is listed twice, another one is lost: all counts are right."""
    blocks._blank[0] = blocks._blank[1]


def both(blocks, mine):
    blocks._blank[0] = mine[0]


def unknown(blocks, mine):
    """Cached, but its content cannot be found any more."""
    blocks._by_hash[b"other"] = blocks._by_hash.pop(blocks._hash_of[mine[0]])


def confused(blocks, mine):
    digests = [blocks._hash_of[block] for block in mine]
    blocks._by_hash = dict(zip(digests, reversed(mine), strict=True))


def nameless(blocks, mine):
    del blocks._by_hash[blocks._hash_of[mine[0]]]
    blocks._hash_of[mine[0]] = None


def held(blocks, mine):
    """Free, but with a holder: it would never become free again."""
    blocks._references[mine[0]] = 1


def leftover(blocks, mine):
    """A hash that is known of a block that has another one."""
    blocks._by_hash[b"other"] = mine[0]


LOST = r"the hash of block \d does not lead to it"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (swap, r"block \d is free twice"),
        (both, r"block 0 is held by 0, blank 1 times, cached 1 times; it is either held or free, once"),
        (unknown, LOST),
        (confused, LOST),
        (nameless, LOST),
        (held, r"holders of blocks \[0\] do not add up"),
        (leftover, "3 hashes are known, 2 blocks have one"),
    ],
)
def test_the_check_finds_what_has_gone_astray(fault, words):
    blocks, mine = cached()
    fault(blocks, mine)
    with pytest.raises(RuntimeError, match=f"accounting.*{words}"):
        blocks.check([])


def test_counts_alone_show_a_hash_too_many():
    blocks, mine = cached()
    leftover(blocks, mine)
    with pytest.raises(RuntimeError, match="accounting.*3 hashes.*2 cached"):
        blocks.check_empty()


def test_the_check_comes_in_slices():
    blocks = Blocks(10 * SLICE, 1)
    assert len(list(blocks.audit([]))) == 20  # the blank ones, and then all


def test_a_chain_depends_on_everything_before_it():
    none, zero, one, two, both = map(pack_u32, ([], [0], [1], [2], [1, 2]))
    assert chain(root(""), both) != chain(root("s"), both) and chain(root(""), none) != root("")
    assert chain(chain(root(""), one), two) != chain(chain(root(""), zero), two)
