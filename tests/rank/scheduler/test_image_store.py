"""Which images go to the ranks, and which they forget; blocks of prompts with images in the prefix cache."""

from types import SimpleNamespace

from phalanx.rank.protocol import Picture, Pixels
from phalanx.rank.scheduler.blocks import extend_chain
from phalanx.rank.scheduler.image_store import ImageStore


def sequence(*names, computed=0):
    """A sequence of images of 10 tokens each, whose features take 100 bytes."""
    pictures = [Picture(name, 10 * i, 10, 2, 5) for i, name in enumerate(names)]
    pixels = {name: Pixels(name, 2, 5, name * 30) for name in names}
    return SimpleNamespace(pictures=pictures, pixels=pixels, num_computed=computed)


def sent(store, one, *others):
    return [(image.digest, image.dropped) for image in store.send(one, [one, *others])]


def test_each_image_goes_once():
    store = ImageStore(1000, 10)
    assert sent(store, sequence(b"a", b"b", b"a")) == [(b"a", []), (b"b", [])]
    assert sent(store, sequence(b"b", b"c")) == [(b"c", [])]


def test_what_the_prefix_cache_has_does_not_go():
    store = ImageStore(1000, 10)
    assert sent(store, sequence(b"a", b"b", computed=10)) == [(b"b", [])]
    assert sent(store, sequence(b"c", computed=9)) == [(b"c", [])]


def test_the_least_recently_used_are_forgotten():
    store = ImageStore(200, 10)
    assert sent(store, sequence(b"a", b"b")) == [(b"a", []), (b"b", [])]
    assert sent(store, sequence(b"a")) == []
    assert sent(store, sequence(b"c")) == [(b"c", [b"b"])]
    assert sent(store, sequence(b"b")) == [(b"b", [b"a"])]


def test_images_of_running_sequences_stay():
    store, running = ImageStore(0, 10), sequence(b"a")
    assert sent(store, running) == [(b"a", [])]
    assert sent(store, sequence(b"b"), running) == [(b"b", [])]
    assert sent(store, sequence(b"c"), running) == [(b"c", [b"b"])]
    assert sent(store, sequence(b"d")) == [(b"d", [b"a", b"c"])]


def test_a_full_store_costs_a_request_little():
    """Its images may be tens of thousands, and running sequences thousands: neither is gone through for each image."""
    store, looked = ImageStore(100 * 20_000, 10), []

    class Running(list):
        def __iter__(self):
            looked.append(1)
            return super().__iter__()

    for i in range(20_000):
        store.send(one := sequence(b"%d" % i), [one])
    new = sequence(*[b"new %d" % i for i in range(16)])
    found = store.send(new, Running([new]))
    assert [image.dropped for image in found] == [[b"%d" % i] for i in range(16)] and looked == [1]


def chain(*pictures, salt=""):
    hashes = []
    extend_chain(hashes, [7] * 20, 4, salt, pictures)
    return hashes


def test_hashes_of_blocks_with_images():
    """A block's hash depends on the images that have tokens in it or before it, and on where they are."""
    plain, one = chain(), chain(Picture(b"a", 5, 6, 2, 3))
    other, turned, later = (chain(Picture(*of)) for of in ((b"b", 5, 6, 2, 3), (b"a", 5, 6, 3, 2), (b"a", 6, 6, 2, 3)))
    assert one == chain(Picture(b"a", 5, 6, 2, 3))
    assert plain[0] == one[0] == other[0]
    for found in (one, other, turned, later):
        assert not set(found[1:]) & set(plain)
    assert len({hashes[1] for hashes in (one, other, turned, later)}) == 4
    assert chain(Picture(b"a", 8, 4, 2, 2), Picture(b"b", 12, 4, 2, 2))[:3] == chain(Picture(b"a", 8, 4, 2, 2))[:3]


def test_hashes_that_are_extended_are_those_of_the_whole():
    picture, hashes = Picture(b"a", 5, 6, 2, 3), []
    for length in (7, 12, 20):
        extend_chain(hashes, [7] * length, 4, "", [picture])
    assert hashes == chain(picture)
