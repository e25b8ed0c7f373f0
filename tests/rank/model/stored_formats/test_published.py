"""quantization_config in the forms in which checkpoints are published: what is stored so, or why it is refused."""

import json
from pathlib import Path

import pytest
import torch
from phalanx import errors
from phalanx.rank.model.choices import choose_format
from phalanx.rank.model.config import read_config
from phalanx.rank.model.measure import GroupRank, build, stored_bytes

from ..test_published import PUBLISHED as MODELS

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
ALONE = GroupRank(0, 1)


def built(directory, settings):
    """A model of Llama 3.1 8B."""
    config = MODELS["meta-llama/Llama-3.1-8B"]["config"] | {"quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(config))
    found = read_config(directory)
    return build(found, ALONE, ALONE, choose_format(found, "none"))


@pytest.mark.parametrize("name", [name for name, one in PUBLISHED.items() if "gigabytes" in one])
def test_what_is_read(tmp_path, name):
    """Its size tells: 16.06 GB are not quantised, of which embeddings and head are 2.1."""
    model = built(tmp_path, PUBLISHED[name]["settings"])
    assert stored_bytes(model, torch.bfloat16) / 1e9 == pytest.approx(PUBLISHED[name]["gigabytes"], abs=0.01)


@pytest.mark.parametrize("name", [name for name, one in PUBLISHED.items() if "refused" in one])
def test_what_is_refused(tmp_path, name):
    with pytest.raises(errors.FatalError) as stop:
        built(tmp_path, PUBLISHED[name]["settings"])
    words = str(stop.value)
    assert stop.value.code == errors.MODEL and PUBLISHED[name]["refused"] in words
    assert "supported are" in words and "model's unquantised" in words
