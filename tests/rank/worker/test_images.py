"""Images on ranks: what they are told to forget and to work on, by the plans of rank 0, and the way of the pixels."""

import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from phalanx.comm import threads
from phalanx.comm.broadcast import MpiPlanBroadcast, ThreadPlanBroadcast
from phalanx.rank import protocol
from phalanx.rank.protocol import Picture, Pixels
from phalanx.rank.scheduler.blocks import Blocks
from phalanx.rank.scheduler.image_store import ImageStore
from phalanx.rank.scheduler.scheduler import Scheduler
from phalanx.rank.worker import executor
from phalanx.rank.worker.images import Images

from ..scheduler.toy import request, step_output


class Tower:
    """Computes an image of 2 x 5 pixels in three parts."""

    depth, levels, rules = 2, 1, SimpleNamespace(grid=lambda height, width: (1, 3))

    def __init__(self):
        self.seen = []

    def pieces(self, pixels):
        self.seen.append(int(pixels[0, 0, 0]))
        yield
        yield
        return torch.zeros(3, 2, device=pixels.device) + pixels[0, 0, 0]


class Rank:
    """Follows plans as ModelRunner does. Features of all images are there that new sequences need."""

    def __init__(self, comm):
        self.tower, self.control = Tower(), ThreadPlanBroadcast(comm)
        model = SimpleNamespace(vision=self.tower, image_positions=None, dtype=torch.float32, hidden_size=1)
        self.images = Images(model, SimpleNamespace(), torch.device("cpu"), comm)
        self.show = self.images.take

    def start(self, plan):
        self.images.work(plan.tower) if plan.tower else None
        for new in plan.new:
            for picture in new.pictures:
                if picture.start + picture.length > new.num_computed:
                    features = self.images._features[picture.digest].values
                    assert features.shape == (3, 2) and features.unique().tolist() == [picture.digest[0]]

    def finish(self):
        self.control = None


@pytest.mark.parametrize("depth", [1, 3])
def test_a_tower_of_another_number_of_parts_makes_no_features(depth):
    def run(comm):
        rank = Rank(comm)
        rank.tower.depth = depth
        rank.images.take(Pixels(b"1" * 16, 2, 5, bytes(30)))
        rank.images.work([4])

    with pytest.raises(AssertionError, match="parts"):
        threads.run(run, 1)


def lead(ranks, memory, seed, size):
    """Random requests, of which some end early and some go before others."""
    draw, store = random.Random(seed), ImageStore(memory, 10, 3, 0.3, ranks=size)
    scheduler, local = Scheduler(Blocks(32, 4), 4, 7, 100, images=store), executor.LocalExecutor(ranks.control, ranks)
    for i in range(60):
        if draw.random() < 0.4:
            names = [b"%d" % draw.randrange(9) for _ in range(draw.randrange(3))]
            pictures = [Picture(name, 1 + 3 * at, 3, 1, 3) for at, name in enumerate(names)]
            pixels = [Pixels(name, 2, 5, name * 30) for name in {*names}]
            one = request(str(i), [1, *[7] * 3 * len(names)], draw.randint(1, 5), draw.choice((0, 0, -1)))
            scheduler.add(msgspec.structs.replace(one, pictures=pictures, pixels=pixels))
        if draw.random() < 0.1:
            scheduler.abort([str(draw.randrange(i + 1))])
        if (planned := scheduler.schedule()) is None:
            continue
        for image in planned.pixels:
            local.show(image)
        local.start(planned.plan)
        assert {*ranks.images._features} <= {*store._held}
        scheduler.update(planned, step_output([[5]] * len(planned.sampled)))
        scheduler.check()
    local.start(protocol.Plan(0, stop=0))
    return {*ranks.images._features}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("memory", [0, 1000])
def test_features_are_there_whoever_leaves_meanwhile(memory, size):
    """Ranks have the features of all that are admitted, whichever of them made these, and keep those alone that rank 0
    knows of."""
    makers = [0] * size
    for seed in range(8):

        def run(comm, seed=seed):
            ranks = Rank(comm)
            if comm.rank:
                executor.follow(ranks, ranks.control, None)
            else:
                assert lead(ranks, memory, seed, size) == {*ranks.images._features}
            return ranks.tower.seen, {*ranks.images._features}

        seen, held = zip(*threads.run(run, size), strict=True)
        assert all(one == held[0] for one in held)
        makers = [count + len(one) for count, one in zip(makers, seen, strict=True)]
    assert min(makers) > 10


def embed(device):
    """Seconds of the tower's work on images, and the embeddings of prompts with one each."""
    model = SimpleNamespace(vision=Tower(), image_positions=None, dtype=torch.float32, hidden_size=1, image_token=7)
    prompt = SimpleNamespace(tokens=[np.array([5, 7, 7, 7])])

    def run(comm):
        images, found = Images(model, prompt, torch.device(device), comm), []
        for value in range(1, 20):
            name = bytes([value])
            images.take(Pixels(name, 2, 5, name * 30))
            images.work([3])
            images.enter(SimpleNamespace(row=0, pictures=[Picture(name, 1, 3, 1, 3)]))
            found.append(images.embeddings(SimpleNamespace(spans=lambda: [(0, 0, 4, 0, 0)])))
        if device == "cuda":
            torch.cuda.synchronize()
        images.work([0])  # counts seconds
        return images.seconds, found

    return threads.run(run, 1)[0]


def check(seconds, found):
    assert seconds > 0 and len(found) == 19
    for value, one in enumerate(found, 1):
        assert one.at.tolist() == [1, 2, 3] and one.values.tolist() == [[value]] * 3
        assert one.deeper.tolist() == [[[value]]] * 3


def test_embeddings():
    check(*embed("cpu"))


def test_pixels_go_to_one_rank_once():
    """To the others on its node and on other nodes goes what the image is called."""
    sent, told = [], []

    class Handle:
        def Dup(self):
            return self

        def Ibcast(self, data, root):
            told.append(len(data))
            return SimpleNamespace(Test=lambda: True)

        def Isend(self, data, to):
            sent.append((bytes(data), to))
            return SimpleNamespace(Test=lambda: len(sent) > 2)

    waker = SimpleNamespace(wake=lambda ranks: None)
    control = MpiPlanBroadcast(SimpleNamespace(handle=Handle(), rank=0, size=4), waker, range(4))
    for rank in (-4, -2, -1, -2):
        assert not sent or control.progress() == (len(sent) < 3)
        executor.show(control, Pixels(b"d" * 16, 200, 300, b"%d" % -rank * 180_000, rank=rank))
    assert sent == [(b"2" * 180_000, 2), (b"1" * 180_000, 3), (b"2" * 180_000, 2)]
    assert sum(told) <= 4 * 4096 and not control.progress()
