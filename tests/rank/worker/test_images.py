"""Images on a rank: what it is told to forget and to work on, by the plans of rank 0."""

import random
from types import SimpleNamespace

import msgspec
import pytest
import torch
from phalanx.rank.protocol import Picture, Pixels
from phalanx.rank.scheduler.blocks import Blocks
from phalanx.rank.scheduler.image_store import ImageStore
from phalanx.rank.scheduler.scheduler import Scheduler
from phalanx.rank.worker.images import Images

from ..scheduler.toy import request, step_output


class Tower:
    """Computes an image of 2 x 5 pixels in three parts."""

    def pieces(self, pixels):
        yield
        yield
        return torch.zeros(1, 1) + pixels[0, 0, 0]


@pytest.mark.parametrize("memory", [0, 1000])
def test_features_are_there_whoever_leaves_meanwhile(memory):
    """Random requests, of which some end early and some go before others: ranks have the features of all that are
    admitted, and keep those alone that rank 0 knows of."""
    for seed in range(15):
        draw, store = random.Random(seed), ImageStore(memory, 10, 3, 0.3)
        scheduler = Scheduler(Blocks(32, 4), 4, 7, 100, images=store)
        model = SimpleNamespace(vision=Tower(), image_positions=None, dtype=torch.float32)
        ranks = Images(model, SimpleNamespace(), torch.device("cpu"))
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
                ranks.take(image)
            ranks.work(planned.plan.tower)
            for new in planned.plan.new:
                for picture in new.pictures:
                    if picture.start + picture.length > new.num_computed:
                        assert ranks._features[picture.digest] == picture.digest[0]
            assert {*ranks._features} <= {*store._held}
            scheduler.update(planned, step_output([[5]] * len(planned.sampled)))
            scheduler.check()
