"""Every architecture: f32 logits equal transformers' within 1e-4, however the model is cut; greedy tokens are equal."""

import copy
import functools
import json
import shutil

import pytest
import torch
import transformers
from packaging.version import parse as version
from phalanx.comm import mesh, threads
from phalanx.errors import MODEL, USAGE, FatalError
from phalanx.rank.model import architectures
from phalanx.rank.model.batch import Replayed
from phalanx.rank.model.config import read_config, tensor_degrees
from phalanx.rank.model.load import load
from phalanx.rank.model.measure import GroupRank, build
from safetensors.torch import load_file, save_file

from ...fields import each
from . import harness
from .harness import MIXED_LENGTHS, MIXED_STEPS, auto_model, distance, run_steps, tokens
from .shapes import COMMON, DEEPSEEK, LONGROPE, MODELS, ONE_STAGE, TWO_ROPES, VISION

TOLERANCE = 1e-4


def first_of_each_class(models):
    """Names: an architecture whose file hands on another's Model differs from it by its Args."""
    found = {architectures.find(options["model_type"]).Model: name for name, options in reversed(models.items())}
    return set(found.values())


TRANSFORMERS = "5.23"  # makes all of MODELS; what a machine has may be older, and know fewer of them


def of_short(names, short):
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in names]


def options_of(**options):
    """An entry of MODELS with what all have: a copy, as transformers' configs write into the dicts they get."""
    options = copy.deepcopy(options)
    if "text_config" in options:
        whole = {"text_config": COMMON | options["text_config"], "vision_config": VISION | options["vision_config"]}
        return options | whole
    return COMMON | options


def write(directory, **options):
    """A checkpoint of random weights, as transformers writes it."""
    if options["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not know {options['model_type']}")
    torch.manual_seed(0)
    try:
        config = transformers.AutoConfig.for_model(**options_of(**options))
        model = auto_model(config).from_config(config, dtype=torch.float32)
    except Exception as error:
        if version(transformers.__version__) >= version(TRANSFORMERS):
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot make {options['model_type']}: {error}"[:200])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5 * (2 if "lm_head" in name or "embed" in name else 1))
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter += 0.2 * torch.randn(parameter.shape)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(0, 0.3)
            elif name.endswith(("put_min", "put_max", "std_bias", "std_scale")):  # of Gemma 4's tower
                buffer.fill_(-1.5 if name.endswith("min") else 1.5)
            elif name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), config.n_routed_experts).topk(buffer.shape[1]).indices)
    model.save_pretrained(directory)
    if options["model_type"] == "qwen3_vl_moe":  # published with inputs before outputs, as transformers loads it
        tensors = load_file(directory / "model.safetensors")
        turned = {name: x.mT.contiguous() if ".experts." in name else x for name, x in tensors.items()}
        save_file(turned, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> its checkpoint, made once."""
    return functools.cache(lambda name: write(tmp_path_factory.mktemp("model"), **MODELS[name]))


def test_another_limit_of_gpt_oss(made, tmp_path):
    path, ids = shutil.copytree(made("gpt_oss"), tmp_path / "m"), tokens(20)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"swiglu_limit": 0.25}))
    usual, model = harness.reference(made("gpt_oss")), harness.reference(path)
    for module in model.modules():  # some versions of transformers have 7 there, whatever config.json says
        if hasattr(module, "limit"):
            module.limit = 0.25
    want = harness.reference_logits(model, ids)
    (logits,) = run_steps(path, [ids], [[(0, 12)], *[[(0, 1)]] * 8], max_model_len=512)
    assert distance(logits, want) < TOLERANCE < distance(harness.reference_logits(usual, ids), want)


def cuts():
    """Models, tensor and pipeline degrees: the short run has the first shape of each model type, cut in one way. Whole,
    these are in tests/rank/test_served.py, and the others are here."""
    first = {options["model_type"]: name for name, options in reversed(MODELS.items())}.values()
    for at, name in enumerate(MODELS):
        ways = [(3, 1), (1, 2 if name in first else 1), (2, 1 if name in ONE_STAGE else 2)]
        for way in ways:
            short = name in first and way == ways[at % 2]
            yield pytest.param(name, *way, marks=[] if short else [pytest.mark.long])


@pytest.mark.parametrize("name, tp, pp", list(cuts()))
def test_logits(made, expected, name, tp, pp):
    """In two chunks and, as where texts are generated, token by token."""
    path, ids = made(name), tokens(60)
    (logits,) = run_steps(path, [ids], [[(0, 33)], [(0, 23)], *[[(0, 1)]] * 4], tp=tp, pp=pp, max_model_len=512)
    assert distance(logits, expected(path, ids)) < TOLERANCE


def test_kimi_k2(made, tmp_path, expected):
    """Which transformers does not know: DeepSeek-V3 by another name."""
    path = made("deepseek_v3")
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    (logits,) = run_steps(tmp_path, [tokens(20)], tp=2)
    assert distance(logits, expected(path, tokens(20))) < TOLERANCE


def test_matrices_of_gpt2_are_not_quantised(tmp_path):
    path = write(tmp_path, **MODELS["gpt2"] | {"hidden_size": 96, "num_attention_heads": 6})
    with pytest.raises(FatalError, match="qkv_proj.*--isq") as refused:
        run_steps(path, [tokens(2)], isq="q8_0")
    assert refused.value.code == USAGE


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "glm_moe_dsa",
        "llama4_text",
        "minimax_m3_vl_text",
        "minimax_m3_vl",
    ],  # fmt: skip
)
@pytest.mark.parametrize("tp, pp", [(1, 1), (3, 1), (2, 2)])
def test_chunks_and_mixed_batches(made, expected, name, tp, pp):
    """Latents that are expanded for long chunks and not for short ones, and tokens that an indexer chooses, beside
    sequences that decode."""
    sequences = [tokens(n, seed=n) for n in MIXED_LENGTHS]
    found = run_steps(made(name), sequences, MIXED_STEPS, tp=tp, pp=pp)
    for ids, logits in zip(sequences, found, strict=True):
        assert distance(logits, expected(made(name), ids)) < TOLERANCE


@pytest.mark.parametrize("pp", [2, 3])
def test_stages_begin_with_an_indexer(tmp_path, expected, pp):
    kinds = ["full", "shared", "full", "full", "shared", "shared", "shared"]
    shape = dict(num_hidden_layers=7, mlp_layer_types=["dense"] * 7, indexer_types=kinds)
    path, ids = write(tmp_path, **MODELS["glm_moe_dsa"] | shape), tokens(40)
    args = architectures.find("glm_moe_dsa").Args.from_config(read_config(path))
    stages = [args.stage_layers(i, pp) for i in range(pp)]
    assert [one.start for one in stages] == ([0, 3] if pp == 2 else [0, 2, 3]) and stages[-1].stop == 7
    (logits,) = run_steps(path, [ids], [[(0, 33)], *[[(0, 1)]] * 7], pp=pp)
    assert distance(logits, expected(path, ids)) < TOLERANCE
    with pytest.raises(FatalError, match="--pp 4.*3 layers") as stop:
        args.stage_layers(0, 4)
    assert stop.value.code == USAGE


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa"])
def test_latents_between_the_segments_of_a_captured_step(made, name):
    """Which CPUs capture no steps of, as theirs have tokens without a slot."""

    def run(comm):
        grid = mesh.build(comm, 1, 1)
        model = load(made(name), grid)
        found = []
        for replayed in (None, Replayed(50)):
            caches = harness.nan_caches(model, 13)
            step = [(tokens(1, seed=1), 0, [12]), (tokens(48), 0, range(12))], harness.BLOCK, caches
            batch = harness.make_batch(*step)
            if replayed is not None:
                batch.replayed, replayed.batch = replayed, harness.make_batch(*step)
            found.append(model([batch]))
        return found

    ((plain, between),) = threads.run(run, 1)
    assert torch.equal(plain, between)


def test_deepseek_v4_by_its_own_names(made, tmp_path, expected, caplog):
    """DeepSeek's own names are read, also beside layers that predict further tokens."""
    path, ids = made("deepseek_v4"), tokens(40)
    spelled = {"embed_tokens.": "embed.", "hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."}

    def own(name):
        for theirs, ours in spelled.items():
            name = name.replace(theirs, ours)
        return name.removeprefix("model.")

    tensors = {own(name): x for name, x in load_file(path / "model.safetensors").items()}
    tensors["mtp.0.attn.wkv.weight"] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    config |= {"compress_ratios": [ratios[one] for one in config.pop("layer_types")], "num_hash_layers": 1}
    del config["mlp_layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    caplog.set_level("WARNING", "phalanx")
    (logits,) = run_steps(tmp_path, [ids])
    assert distance(logits, expected(path, ids)) < TOLERANCE
    assert not caplog.messages


def test_longrope_beyond_the_original_context(tmp_path, expected):
    """The longest sequence that is served decides on the list of factors."""
    path = write(
        tmp_path, model_type="phi3", rope_parameters=LONGROPE, original_max_position_embeddings=32,
        max_position_embeddings=256,
    )  # fmt: skip
    ids = tokens(100)
    (logits,) = run_steps(path, [ids])
    assert distance(logits, expected(path, ids)) < TOLERANCE


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_longrope_by_its_old_name(made, tmp_path, expected, key):
    """Phi-3's first checkpoints: rope_scaling of type su, and rope_theta beside it."""
    path, ids = made("phi3 short"), tokens(60)
    config = json.loads((path / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    old = {key: "su"} | {name: LONGROPE[name] for name in ("short_factor", "long_factor")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": old, "rope_theta": theta}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    (logits,) = run_steps(tmp_path, [ids], max_model_len=512)
    assert distance(logits, expected(path, ids)) < TOLERANCE


def test_the_vision_part_is_left_out(made, caplog):
    caplog.set_level("INFO")
    run_steps(made("gemma3"), [[1]], images=False)
    (message,) = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert message.startswith("text alone is served: ") and not [
        one for one in caplog.records if one.levelname != "INFO"
    ]


@pytest.mark.parametrize("name, tp, pp", [("qwen2_moe", 1, 2), ("glm4_moe", 1, 2), ("stablelm parallel", 2, 1)])
def test_what_other_ranks_read_is_used(made, caplog, name, tp, pp):
    """One rank logs for all: it reads neither layers of other stages nor norms of other ranks' heads."""
    caplog.set_level("WARNING", "phalanx")
    run_steps(made(name), [[1]], tp=tp, pp=pp)
    assert not caplog.messages


@pytest.mark.parametrize("pp", [1, 2])
def test_a_layer_that_predicts_a_second_token_is_left_out(made, tmp_path, caplog, pp):
    path = made("glm4_moe plain")
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    further = {"model.layers.4.eh_proj.weight": torch.zeros(3), "model.layers.4.mlp.gate.weight": torch.zeros(3)}
    save_file(further, tmp_path / "more.safetensors")
    files = {name: "model.safetensors" for name in load_file(path / "model.safetensors")}
    weight_map = files | dict.fromkeys(further, "more.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    caplog.set_level("INFO", "phalanx")
    run_steps(tmp_path, [[1]], pp=pp)
    assert "multi-token prediction" in caplog.text
    assert not [one for one in caplog.records if one.levelname != "INFO"]


def test_a_head_of_its_own_is_read_whatever_the_whole_says(tmp_path, expected):
    path = write(tmp_path, **MODELS["mistral3"])
    want = expected(path, tokens(20))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    (logits,) = run_steps(path, [tokens(20)], tp=2)
    assert distance(logits, want) < TOLERANCE


def test_a_head_that_is_not_there_is_tied_whatever_the_whole_says(made, tmp_path, expected):
    path = made("mistral3 of ministral3")
    config = json.loads((path / "config.json").read_text())
    assert config["text_config"]["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    (logits,) = run_steps(tmp_path, [tokens(20)], tp=2)
    assert distance(logits, expected(path, tokens(20))) < TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gemma2", {"layer_types": ["linear_attention"] * 4}, "layer type 'linear_attention' is not supported"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, and none for layer 1"),
        ("mistral", {"rope_parameters": TWO_ROPES}, "differ between full_attention and sliding_attention layers"),
        ("ministral3", {}, "rope_parameters has no llama_4_scaling_beta, which this model type needs"),
        ("mistral3", {"text_config": {"model_type": "llama"}}, "text model of a mistral3 model is 'llama'"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block False is not supported"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4 layers"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ("deepseek_v2", DEEPSEEK | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (
            "deepseek_v2", DEEPSEEK | {"attention_bias": True, "q_lora_rank": None},
            "attention_bias without q_lora_rank is not supported",
        ),
        ("deepseek_v3", DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("deepseek_v3", {}, "config.json has no kv_lora_rank"),
        (
            "deepseek_v2", DEEPSEEK | {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 0.7}},
            "rope type 'yarn' needs 'factor'",
        ),
        (
            "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0},
            "swiglu_limit is 0: it must be a multiple of 1/1024 above 0",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("step3p5", {"swiglu_limits": [7.0] * 3}, "swiglu_limits is .* and has no number for layer 3"),
        ("step3p5", {"swiglu_limits_shared": [0, 1e-9, 0, 0]}, r"swiglu_limits_shared\[1\] is 1e-09"),
        ("step3p5", {"rope_theta": [1e4, 0, 1e4, 1e4]}, "rope_theta is .* and has no number for layer 1"),
        ("step3p5", {"moe_layers_enum": "3,x"}, "moe_layers_enum is '3,x', expected numbers of layers"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, model_type, changes, message):
    config = COMMON | {"model_type": model_type, "head_dim": 16} | changes
    if "text_config" in changes:
        config["text_config"] = COMMON | changes["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FatalError, match=message) as stop:
        build(read_config(tmp_path), GroupRank(0, 1), GroupRank(0, 1))
    assert stop.value.code == MODEL


def test_each_architecture_is_here():
    # test_fidelity.py, test_chatglm.py, …
    elsewhere = {"llama", "qwen3", "bailing_moe", "blip", "chatglm", "internlm2", "kimi_k2", "mimo", "moondream1"}
    elsewhere |= {"qwen", "apertus1p5", "baichuan", "glm5_next_text", "step3p5"}
    assert set(each(MODELS.values(), "model_type")) | elsewhere == set(architectures.supported())


def test_each_shape_can_be_cut_in_two_and_in_three():
    """Shapes are cut as `make test-long` cuts them."""
    wrong = {}
    for name, options in MODELS.items():
        shape = COMMON | options | options.get("text_config", {})
        heads, keys = shape["num_attention_heads"], shape["num_key_value_heads"]
        if not {2, 3} <= set(tensor_degrees(heads, keys or heads)):
            wrong[name] = f"{heads} attention heads and {keys} key heads"
    assert not wrong
