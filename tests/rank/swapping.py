"""A rank that copies any block back from host memory. Times of tiny models on a busy machine could say otherwise."""

import os

from phalanx.rank import __main__ as main
from phalanx.rank.worker.swap import CopyCost

CopyCost.least_blocks = lambda self, compute: 1
os._exit(main.main())
