"""What rank/gguf/architectures makes of metadata that few files have."""

from types import SimpleNamespace

import pytest
from phalanx.errors import FatalError
from phalanx.rank.gguf.architectures._common import rope

NUMBERS = {"embedding_length": 64, "attention.head_count": 4, "context_length": 512}


def metadata(**given):
    """As Metadata has them; the keys without the architecture's name."""
    found = NUMBERS | {key.replace("__", "."): value for key, value in given.items()}
    return SimpleNamespace(
        number=lambda key, other=None: found.get(key, other),
        integer=lambda key, other=None: found.get(key, other),
        text=lambda key, other=None: found.get(key, other),
        has=found.__contains__,
        vector=lambda name: None,
        given=lambda **names: {},
        architecture="llama",
        file="x.gguf",
    )


def test_linear_rope_as_files_of_2023_have_it():
    old = rope(metadata(rope__scale_linear=4.0))
    new = rope(metadata(**{"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}))
    assert old == new == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    assert "rope_type" not in rope(metadata(rope__scale_linear=1.0))


def test_an_unknown_rope_is_refused():
    with pytest.raises(FatalError, match="rope.scaling.type is 'spiral'"):
        rope(metadata(rope__scaling__type="spiral"))
