"""measure rejects what loading rejects, in the same words, and writes JSON."""

import json

import pytest
from phalanx.comm import mesh, threads
from phalanx.errors import MODEL, USAGE, FatalError
from phalanx.rank.model import measure
from phalanx.rank.model.load import load

from ...checkpoints import make_config
from ...fields import each

QUESTION = {
    "mmproj": "",
    "device": "cpu",
    "dtype": "auto",
    "isq": "none",
    "kv_cache_dtype": "auto",
    "tp": 0,
    "pp": 0,
    "most": 4,
    "speculate": "auto",
    "draft_model": "",
    "draft_tensor_parallel_size": 0,
    "num_speculative_tokens": 0,
}


@pytest.fixture
def write(tmp_path):
    def config(**changes):
        (tmp_path / "config.json").write_text(json.dumps(make_config("llama", **changes)))
        return QUESTION | {"model": str(tmp_path)}

    return config


@pytest.mark.parametrize(
    ("changes", "tp", "pp", "code"),
    [
        ({}, 5, 1, USAGE),
        ({}, 1, 5, USAGE),
        ({"num_key_value_heads": 5}, 1, 1, MODEL),
        ({"hidden_act": "sine"}, 1, 1, MODEL),
        ({"rope_parameters": {"rope_type": "spiral"}}, 1, 1, MODEL),
        ({"quantization_config": {"quant_method": "aqlm"}}, 1, 1, MODEL),
    ],
)
def test_what_loading_refuses(write, tmp_path, capsys, changes, tp, pp, code):
    question = write(**changes) | {"tp": tp, "pp": pp}

    def rank(world):
        with pytest.raises(FatalError) as stop:
            load(tmp_path, mesh.build(world, tp, pp), load_format="dummy")
        return str(stop.value), stop.value.code

    found = threads.run(rank, tp * pp)[0]
    assert measure.main(json.dumps(question)) == code == found[1]
    assert capsys.readouterr() == ("", found[0] + "\n")


def test_the_answer(write, capsys):
    assert measure.main(json.dumps(write(tie_word_embeddings=True))) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model_type"], found["hidden"], found["vocab"], found["max_positions"]) == ("llama", 48, 512, 512)
    assert found["usual_dtype"] == "f32"
    assert (found["degrees"], sorted(found["ranks"])) == ([1, 2, 3, 6, 12], ["1", "2", "3"])
    assert found["stages"] == [[4], [2, 2], [2, 1, 1], [1, 1, 1, 1]]
    rank = found["ranks"]["2"]
    assert rank["layers"] == [0, 0, 0, 0]
    (layer,) = rank["kinds"]
    # 3 of 6 key heads of 8 dimensions, keys and values, 4 bytes; gate, up and their product, 50 each
    assert (layer["kv"], layer["inner"], layer["scores"]) == (2 * 3 * 8 * 4, 150, 6 * 2 * 8)
    names = ["input_layernorm", "self_attn.qkv_proj", "self_attn.o_proj", "post_attention_layernorm"]
    assert each(layer["weights"], "name") == [*names, "mlp.gate_up_proj", "mlp.down_proj"]
    assert layer["weights"][1] == {
        "name": "self_attn.qkv_proj", "elements": 96 * 48, "bytes": 96 * 48 * 4, "matrix": True, "moves": True,
        "row": 0, "fp8": False, "shared": False,
    }  # fmt: skip
    tables = {place: [one["row"] for one in ends if one["row"]] for place, ends in rank["ends"].items()}
    assert tables == {"whole": [], "first": [48 * 4], "middle": [], "last": []}, "the head reads all of the whole's"
    shared = {place: [(one["name"], one["shared"]) for one in ends] for place, ends in rank["ends"].items()}
    assert shared == {
        "whole": [("model.embed_tokens", False), ("model.norm", False), ("lm_head", True)],
        "first": [("model.embed_tokens", False)],
        "middle": [],
        "last": [("model.norm", False), ("lm_head", False)],
    }
