"""Images on a GPU: features that are copied to the host and back are those of the tower."""

from ...devices import require_gpu
from .test_images import check, embed

require_gpu()


def test_embeddings():
    check(*embed("cuda"))
