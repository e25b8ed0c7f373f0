"""Which images go to the ranks, which they forget, when the tower works on them, and hashes of blocks with images."""

from types import SimpleNamespace

import msgspec
from phalanx.rank.protocol import Picture, Pixels
from phalanx.rank.scheduler.blocks import Blocks, extend_chain
from phalanx.rank.scheduler.image_store import ImageStore
from phalanx.rank.scheduler.scheduler import Scheduler
from phalanx.rank.scheduler.step import PlannedStep

from .toy import request, step_output


def sequence(*names, computed=0):
    """A sequence of images of 10 tokens each, whose features take 100 bytes."""
    pictures = [Picture(name, 10 * i, 10, 2, 5) for i, name in enumerate(names)]
    pixels = {name: Pixels(name, 2, 5, name * 30) for name in names}
    return SimpleNamespace(pictures=pictures, pixels=pixels, num_computed=computed, towered=0)


def sent(store, one, *others):
    """The images that go to the ranks before a sequence is admitted, with what these forget. The tower has time."""
    step = PlannedStep()
    if lacking := store.lacking(one, one.num_computed):
        store.work(one, lacking, iter(()), [one, *others], 1000, step)
    assert not store.lacking(one, one.num_computed) and sum(step.tower) == len(step.pixels)
    return [(image.digest, image.dropped) for image in step.pixels]


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
        sent(store, sequence(b"%d" % i))
    new, step = sequence(*[b"new %d" % i for i in range(16)]), PlannedStep()
    store.work(new, store.lacking(new, 0), iter(()), Running([new]), 1000, step)
    assert [image.dropped for image in step.pixels] == [[b"%d" % i] for i in range(16)] and looked == [1]


def test_a_step_has_as_much_of_the_towers_work_as_its_budget_allows():
    store = ImageStore(1000, 10, 7, 11, 1)
    one, steps = sequence(b"a", b"b"), []
    while lacking := store.lacking(one, 0):
        steps.append(step := PlannedStep())
        spent = store.work(one, lacking, iter(()), [one], 100, step)
        assert spent == 30 * step.tower[0] <= 100
    assert [step.tower for step in steps] == [[3], [3], [3], [3], [2]]
    assert [[image.digest for image in step.pixels] for step in steps] == [[b"a"], [], [b"b"], [], []]


def test_a_step_has_one_piece_of_the_towers_work_at_least():
    store, step = ImageStore(1000, 10, 7, 2100.35), PlannedStep()
    one = sequence(b"a")
    assert store.work(one, store.lacking(one, 0), iter(()), [one], 1, step) == 3001 and step.tower == [1]


def test_an_image_that_an_aborted_request_left_behind_is_finished_first():
    store, step = ImageStore(1000, 10, 7, 21), PlannedStep()
    gone, one = sequence(b"a"), sequence(b"b")
    store.work(gone, store.lacking(gone, 0), iter(()), [gone], 100, PlannedStep())
    store.work(one, store.lacking(one, 0), iter(()), [one], 200, step)
    assert step.tower == [6] and [image.digest for image in step.pixels] == [b"b"]
    assert not store.lacking(gone, 0) and store.lacking(one, 0)


def test_sequences_decode_while_the_tower_works():
    """A request with an image waits for the tower, and nobody else does: the step before it is computed has the last
    piece, and a text that came later goes first."""
    store = ImageStore(1000, 10, 7, 2.8)
    scheduler = Scheduler(Blocks(32, 4), 8, 10, 100, images=store)
    scheduler.add(request("a", [1, 2], 50))
    scheduler.update(scheduler.schedule(), step_output([[3]]))
    shown = Picture(b"p", 1, 3, 1, 3), Pixels(b"p", 2, 5, b"p" * 30)
    scheduler.add(msgspec.structs.replace(request("seen", [1, 7, 7, 7]), pictures=[shown[0]], pixels=[shown[1]]))
    scheduler.add(request("text", [1]))
    found = []
    while not found or not found[-1].new or len(found) < 3:
        planned = scheduler.schedule()
        found.append(planned.plan)
        assert planned.plan.rows[:2] == b"\0\0" and len(planned.pixels) == (len(found) == 1)
        scheduler.update(planned, step_output([[5]] * len(planned.sampled)))
    assert [plan.tower for plan in found] == [[2], [2], [2], [1]]
    assert [[new.pictures for new in plan.new] for plan in found] == [[[]], [], [], [[shown[0]]]]
    scheduler.check()


def test_requests_share_out_ranks():
    """Two requests of an image each, whose features are there after the same step."""
    scheduler = Scheduler(Blocks(32, 4), 8, 12, 100, images=ImageStore(1000, 10, 3, 2.4, ranks=2))
    for name in (b"p", b"q"):
        shown = [Picture(name, 0, 2, 1, 2)], [Pixels(name, 2, 5, name * 30)]
        scheduler.add(msgspec.structs.replace(request(name.hex(), [7, 7]), pictures=shown[0], pixels=shown[1]))
    found = [scheduler.schedule() for _ in range(3)]
    assert [one.plan.tower for one in found] == [[1, 1]] * 3
    assert [len(one.plan.new) for one in found] == [0, 0, 2]
    assert [(image.digest, image.rank) for image in found[0].pixels] == [(b"p", -2), (b"q", -1)]


def test_a_step_may_have_the_towers_work_alone():
    store = ImageStore(1000, 10, 3, 2.4)
    scheduler = Scheduler(Blocks(32, 4), 8, 10, 100, images=store)
    pixels = Pixels(b"p", 2, 5, b"p" * 30)
    scheduler.add(msgspec.structs.replace(request("a", [7, 7]), pictures=[Picture(b"p", 0, 2, 1, 2)], pixels=[pixels]))
    for last in (False, False, True):
        planned = scheduler.schedule()
        assert planned.plan.tower == [1] and bool(planned.plan.rows) == last and not planned.timed
        scheduler.update(planned, step_output([[5]] if planned.sampled else []))
    assert scheduler.running[0].tokens == [7, 7, 5]


def test_images_are_shared_out_over_ranks():
    """Each rank goes on with the next one, however long the others take."""
    store = ImageStore(1000, 10, 7, 11, 1, ranks=2)
    one, steps = sequence(b"a", b"b", b"c"), []
    while lacking := store.lacking(one, 0):
        steps.append(step := PlannedStep())
        assert store.work(one, lacking, iter(()), [one], 100, step) == 30 * max(step.tower) <= 100
    assert [step.tower for step in steps] == [[3, 3], [3, 3], [3, 1], [3, 0], [2, 0]]
    sent = [[(image.digest, image.rank) for image in step.pixels] for step in steps]
    assert sent == [[(b"a", -2), (b"b", -1)], [], [(b"c", -2)], [], []]


def test_ranks_that_would_wait_work_on_later_images():
    """They take no more time than the first sequence's image, which they never delay."""
    store, step = ImageStore(1000, 10, 7, 21, ranks=3), PlannedStep()
    one, later = sequence(b"a"), sequence(b"b", b"a", b"c", b"d")
    wanted = ((later, picture) for picture in later.pictures)
    assert store.work(one, store.lacking(one, 0), wanted, [one, later], 100, step) == 90
    assert step.tower == [3, 3, 3] and [image.digest for image in step.pixels] == [b"a", b"b", b"c"]
    assert next(wanted)[1].digest == b"d" and later.towered == 2
    small, step = sequence(b"e"), PlannedStep()
    small.pixels[b"e"] = msgspec.structs.replace(small.pixels[b"e"], height=1)
    assert store.work(small, store.lacking(small, 0), iter(()), [], 1000, step) == 225  # behind the end of another
    assert step.tower == [4 + 7, 4, 4]


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
