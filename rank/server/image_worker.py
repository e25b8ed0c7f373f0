"""`python -m phalanx.rank.server.image_worker`: forks workers that decode images, within the limits of text_worker.py.

An image of a few kilobytes may claim billions of pixels, and decoders of images are where programs are attacked. So an
image is looked at here alone, its size is checked before its pixels are decoded, and formats are few.
"""

from __future__ import annotations

import functools
import pickle

from PIL import Image

from .. import fork_server
from . import image_decoding
from .text_worker import work

USED = image_decoding  # imported once, for all forks


def load(data: bytes) -> fork_server.Work:
    _, limits = pickle.loads(data)
    Image.init()
    return functools.partial(work, None, limits)


if __name__ == "__main__":
    fork_server.serve(load)
