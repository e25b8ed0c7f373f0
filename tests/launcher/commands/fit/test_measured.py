"""The figures of `phalanx fit` against ranks that really load: weights, cache, and the constants of their rooms."""

import functools
import json
import operator
import re

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.comm.broadcast import ThreadPlanBroadcast
from phalanx.comm.watchdog import LocalWatchdog
from phalanx.errors import MODEL, USAGE, FatalError
from phalanx.kernels.cpp import compiler, ops
from phalanx.launcher.builtin_model import DIRECTORY
from phalanx.launcher.commands.fit import headers, measured, memory, plan
from phalanx.launcher.commands.fit.measured import Question
from phalanx.launcher.commands.fit.memory import Layout
from phalanx.rank import protocol
from phalanx.rank.model import architectures, measure
from phalanx.rank.model import config as rank_config
from phalanx.rank.model.drafts import find, most_verified
from phalanx.rank.model.load import load
from phalanx.rank.model.weights import dummy, ggml
from phalanx.rank.options import IN_SITU, Options
from phalanx.rank.worker import engine, kv_cache
from phalanx.rank.worker.executor import LocalExecutor

from .... import gguf_files
from ....checkpoints import make_checkpoint
from ....rank.speculating import Hasty, Server
from .configs import ask, read, write

TOKENS = 4096
ROWS = 3
CONTEXT = 512
LAYOUTS = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3)]
FEW = [(1, 1), (3, 1), (2, 2)]
NONE = find.Wanted("none", "")  # no model drafts
# Keys that architectures read; what each does not know it leaves alone. Five layers, and sizes that do not divide.
COMMON = {
    "hidden_size": 384, "head_dim": 32, "intermediate_size": 500, "vocab_size": 517, "num_hidden_layers": 5,
    "num_attention_heads": 12, "num_key_value_heads": 6, "max_position_embeddings": CONTEXT, "torch_dtype": "float32",
    "num_experts": 7, "num_local_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 250,
    "shared_expert_intermediate_size": 101, "mlp_only_layers": [1], "n_routed_experts": 7,
}  # fmt: skip
VARIANTS = {
    "plain": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "few keys": {"num_key_value_heads": 1},  # replicated
}
DEEPSEEK = {
    "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 12, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
HYBRID = {
    "linear_num_key_heads": 6, "linear_num_value_heads": 12, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
# Keys that some model types need besides, or have in other places.
OTHERS = {
    "chatglm": {"multi_query_attention": True},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "kimi_k25"), DEEPSEEK),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), DEEPSEEK | {"index_n_heads": 16, "index_head_dim": 16}),
    **dict.fromkeys(("minicpm3", "mistral4"), DEEPSEEK),
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), {
        "dense_intermediate_size": 500, "shared_intermediate_size": 101, "index_n_heads": 6, "index_head_dim": 32,
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 4], "moe_layer_freq": [0, 1, 1, 1, 1],
    }),
    "kimi_linear": DEEPSEEK | {
        "num_experts_per_token": 2, "num_shared_experts": 1, "linear_num_heads": 6, "linear_head_dim": 16,
    },
    **dict.fromkeys(("glm5_next", "glm5_next_text"), DEEPSEEK | {
        "qk_rope_head_dim": 0, "linear_num_heads": 6, "linear_head_dim": 16, "index_n_heads": 16, "index_head_dim": 16,
    }),
    "bailing_hybrid": DEEPSEEK | {
        "head_dim": 16, "num_experts": 8, "num_experts_per_token": 2, "layer_group_size": 2, "q_lora_rank": None,
    },
    "qwen": {"intermediate_size": 1000},
    **dict.fromkeys(("llama4", "llama4_text"), {
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 500,
    }),
    **dict.fromkeys(("step3p5", "step3p7"), {"share_expert_dim": 101}),
    "hy_v3": {"num_shared_experts": 1},
    "deepseek_v4": {
        "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 40, "o_groups": 12, "o_lora_rank": 8,
        "num_hash_layers": 1,
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    **dict.fromkeys(("gemma4", "gemma4_text"), {"hidden_size_per_layer_input": 0, "global_head_dim": 32}),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), {"n_inner": 500}),
    "falcon": {"ffn_hidden_size": 500, "num_kv_heads": 6, "new_decoder_architecture": True},
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"] * 3, "block_multiple_of": 1}),
    "ernie4_5_moe": {"moe_num_experts": 7, "moe_k": 2},
    "falcon_h1": {"mamba_n_heads": 12, "mamba_d_ssm": 768, "mamba_d_state": 32},
    "nemotron_h": {"mamba_num_heads": 12, "mamba_head_dim": 64, "ssm_state_size": 32, "n_groups": 1},
    "granitemoehybrid": {"mamba_n_heads": 12, "mamba_d_state": 32, "shared_intermediate_size": 100},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), HYBRID),
    "moondream1": {"config": {
        "vision": {"enc_dim": 32, "enc_n_layers": 1, "enc_ff_dim": 64, "proj_inner_dim": 64},
        "region": {"inner_dim": 64},
    }},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        }
    },
}  # fmt: skip
REFUSED = [
    ("phi", "tied"), ("gptj", "tied"), ("moondream1", "tied"), ("nemotron_h", "biased"), ("falcon_h1", "biased"),
    ("ernie4_5_moe", "biased"), ("hy_v3", "biased"), ("bailing_hybrid", "biased"),
    ("minimax_m3_vl", "few keys"), ("minimax_m3_vl_text", "few keys"),
]  # fmt: skip


def config_of(model_type, **variant):
    return {"model_type": model_type, **COMMON, **OTHERS.get(model_type, {}), **variant}


@pytest.fixture(autouse=True)
def few_numbers(monkeypatch):
    """Bytes do not depend on what weights hold, and a million random numbers for each rank take most of its load."""
    monkeypatch.setattr(dummy, "PERIOD", 65_537)


def live(path, tp, pp, dtype, isq, ep=1, wanted=NONE):
    """The report and the allocations of each rank of a job: weights, rope table, KV cache for TOKENS of ROWS sequences,
    by rank. wanted: by which a model that drafts is found."""

    def rank(world):
        grid, cpu = mesh.build(world, tp, pp, ep=ep), torch.device("cpu")
        model = load(path, grid, "cpu", dtype, max_model_len=CONTEXT, load_format="dummy", isq=isq)
        weights, rope, specs = model.weight_bytes, model.rope.nbytes, model.cache_specs()
        source = find.find(wanted._replace(dtype=dtype, load_format="dummy", isq=isq), path, model, grid, cpu)
        if source is not None:
            own = getattr(source, "model" if wanted.speculate == "draft" else "", source)
            held = (x for one in own.sharded_modules() for x in (*one.parameters(), *one.buffers()))
            weights += sum({id(x): x.nbytes for x in held}.values())
            rope, specs = rope + own.rope.nbytes, [*specs, *source.cache_specs()]
        verified = most_verified(wanted.speculate, 0) if wanted.speculate != "none" else 1
        blocks = TOKENS // engine.BLOCK_SIZE
        caches = kv_cache.allocate(specs, blocks, engine.BLOCK_SIZE, model.dtype, cpu, ROWS, verified)
        return weights, rope, sum(x.nbytes for layer in caches for x in layer)

    return threads.run(rank, tp * pp)


def compare(path, dtype, isq="none", exact=True, layouts=FEW, wanted=NONE):
    of = dict(speculate=wanted.speculate, draft_model=wanted.draft_model)
    of["draft_tensor_parallel_size"] = wanted.tensor_size
    shape = read(path, dtype, "cpu", isq=isq, most=max(tp for tp, _ in layouts), **of)
    for tp, pp in layouts:
        stages = memory.stages(shape, Layout(tp, pp), CONTEXT)
        for rank, found in enumerate(live(path, tp, pp, dtype, isq, wanted=wanted)):
            stage = stages[pp - 1 - rank // tp]  # rank 0 is on the last stage
            kept = stage.kv_token * TOKENS + stage.state * ROWS
            assert (stage.rope, kept) == found[1:], (tp, pp, rank)
            assert stage.loaded == (found[0] if exact else pytest.approx(found[0], rel=0.05)), (tp, pp, rank)


@pytest.mark.sample(11)
@pytest.mark.parametrize(
    "dtype, variants, layouts",
    [
        pytest.param("f32", ["plain"], [(3, 1)], marks=pytest.mark.long),
        ("bf16", ["biased", "few keys", "tied"], [(2, 2)]),
        pytest.param("bf16", ["biased", "few keys", "tied"], [(1, 1)], marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("model_type", architectures.supported())
def test_bytes_of_live_ranks(tmp_path, model_type, variants, dtype, layouts, monkeypatch):
    """Plain, and with all that adds tensors, shares them or holds them twice. Weights hold what memory held."""
    monkeypatch.setattr(dummy.Dummy, "_fill", lambda *_: None)
    chosen = [VARIANTS[name] for name in variants if (model_type, name) not in REFUSED]
    path = write(tmp_path, config_of(model_type, **functools.reduce(operator.or_, chosen)))
    compare(path, dtype, layouts=LAYOUTS if model_type == "llama" else layouts)


HEADS = {
    "mtp": ("deepseek_v3", {"num_nextn_predict_layers": 1}, {}),
    "mtp with states": ("qwen3_next", {"mtp_num_hidden_layers": 1}, {}),
    "mtp of streams": ("deepseek_v4", {"num_nextn_predict_layers": 1}, {}),
    "mtp of a list's end": ("step3p7", {
        "num_nextn_predict_layers": 1, "layer_types": ["full_attention"] * 5 + ["sliding_attention"],
        "moe_layers_enum": "3,4", "sliding_window": 64,
    }, {}),
    "eagle3": ("llama", {}, {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }),
    "draft": ("llama", VARIANTS["tied"], {"num_hidden_layers": 2, "num_key_value_heads": 12}),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_bytes_of_models_that_draft(tmp_path, name):
    """Weights, caches and rotary tables of the last stage."""
    model_type, variant, draft = HEADS[name]
    path = write(tmp_path / "target", config_of(model_type, **variant))
    directory = str(write(tmp_path / "draft", config_of("llama", **draft))) if draft else ""
    compare(path, "f32", layouts=[(1, 1), (2, 2)], wanted=find.Wanted(name.split()[0], directory))
    compare(path, "bf16", layouts=[(1, 2)], wanted=find.Wanted(name.split()[0], directory))
    if name == "draft":
        compare(path, "f32", layouts=[(2, 2)], wanted=find.Wanted(name, directory, tensor_size=1))


def test_memory_of_a_start_that_drafts():
    """The built-in model with its head on a CPU: weights and the pool to the byte, and recorded steps of both within
    what the largest step is said to need."""
    options = Options(
        model=str(DIRECTORY), dtype="f32", max_num_seqs=4, max_model_len=CONTEXT, mem=16, speculate="mtp",
        max_num_batched_tokens=64,
    )  # fmt: skip
    shape = read(DIRECTORY, "f32", "cpu", speculate="mtp")
    (stage,) = memory.stages(shape, Layout(1), CONTEXT)
    found = []

    def rank(world):
        torch.set_grad_enabled(False)
        grid = mesh.build(world, 1, 1)
        started = engine.Engine(
            options, engine.RankContext(world, ["here"], grid, torch.device("cpu"), LocalWatchdog(0))
        )  # fmt: skip
        limits = started.load()
        executor = LocalExecutor(ThreadPlanBroadcast(world), started.runner)
        server = Server(limits, executor, 1, Hasty(limits.query_lens, 64, limits.draft_model))
        for i in range(4):
            sampling = protocol.SamplingParams(max_tokens=20, temperature=0)
            server.scheduler.add(protocol.Request(str(i), protocol.pack_u32([*range(5, 20 + i)]), sampling))
        while not server.replica.idle:
            server.turn()
        runner, drafting = started.runner, started.runner._drafting
        kept = [*runner.caches, *drafting.caches]
        memories = [graphs._memory for graphs in (runner._graphs, drafting.recorded) if graphs]
        lent = [block() for one in memories for block in one._lent.values()]
        recorded = sum(one.nbytes for one in memories) + sum(one.nbytes for one in lent if one is not None)
        weights = started.model.weight_bytes + started.source.weight_bytes
        found.append((weights, limits, sum(x.nbytes for layer in kept for x in layer), recorded))
        executor.start(protocol.Plan(step=-1, stop=0))
        started.unload()

    torch.set_num_threads(1)
    threads.run(rank, 1)
    ((weights, limits, kept, recorded),) = found
    assert stage.loaded == weights and stage.weights["drafts"] > 0.1 * stage.loaded
    assert limits.blocks * engine.BLOCK_SIZE * stage.kv_token == kept
    assert 0 < recorded <= memory.activations(shape, Layout(1), memory.Workload(CONTEXT, 4, CONTEXT, "f32"), 64)


def test_layers_that_share_an_indexer(tmp_path):
    """Stages begin with one that has its own, so there are fewer stages than layers."""
    path = write(tmp_path, config_of("glm_moe_dsa", index_topk_freq=2))
    compare(path, "bf16", layouts=[(2, 1), (1, 3)])
    shape = read(path)
    assert shape.layers == 5 and shape.stages == ((5,), (3, 2), (1, 2, 2))


def test_layers_that_are_one_stage(tmp_path):
    """They read embeddings of their own."""
    more = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 517}
    path = write(tmp_path, config_of("gemma4_text", **more))
    assert read(path).stages == ((5,),)


def test_features_that_enter_several_layers(tmp_path):
    """The first stage has all of these, so there are fewer stages than layers."""
    levels = {"num_heads": 4, "hidden_size": 64, "depth": 3, "deepstack_visual_indexes": [0, 1], "out_hidden_size": 384}
    text = {**COMMON, "rope_parameters": {"mrope_section": [4, 6, 6], "rope_theta": 1e6, "rope_type": "default"}}
    config = {"model_type": "qwen3_vl", "image_token_id": 3, "text_config": text, "vision_config": levels}
    path = write(tmp_path, config | {"vision_start_token_id": 1, "vision_end_token_id": 2})
    compare(path, "bf16", layouts=[(1, 3)])
    shape = read(path)
    assert shape.stages == ((5,), (3, 2), (2, 2, 1), (2, 1, 1, 1))
    assert any(one.name.startswith("vision.") for one in shape.ranks[1].ends["first"])
    draft = str(write(tmp_path / "draft", config_of("llama", num_hidden_layers=1)))
    shape = read(path, speculate="draft", draft_model=draft)  # next to which no image is taken
    assert shape.images is None and not any(one.name.startswith("vision.") for one in shape.ranks[1].ends["first"])


@pytest.mark.sample(3)
@pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
@pytest.mark.parametrize("variant", ["plain", "tied"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "deepseek_v2", "qwen3_moe"])
def test_bytes_of_weights_that_stay_in_16_bits(tmp_path, model_type, variant):
    """A latent's linear and experts become f32."""
    path = write(tmp_path, config_of(model_type, torch_dtype="bfloat16", **VARIANTS[variant]))
    compare(path, "auto", layouts=[(1, 1), (2, 2)])


@pytest.mark.parametrize("tp, ep", [(2, 2), (6, 3), (6, 2)])
def test_bytes_where_experts_are_shared_out(tmp_path, tp, ep):
    """Seven experts, so that the first ranks have most."""
    path = write(tmp_path, config_of("qwen2_moe"))
    (stage,) = memory.stages(read(path, "f32", "cpu", most=tp), Layout(tp, ep=ep), CONTEXT)
    assert stage.loaded == max(weights for weights, *_ in live(path, tp, 1, "f32", "none", ep))


OTHER_TYPES = [one for one in IN_SITU if one not in ("q8_0", "q4k")]


@pytest.mark.parametrize(
    "isq, variant",
    [
        *(("q8_0", one) for one in VARIANTS),
        ("q4k", "plain"),
        *(pytest.param(one, "plain", marks=pytest.mark.long) for one in OTHER_TYPES),
    ],
)
def test_bytes_of_weights_that_are_quantised_while_loading(tmp_path, isq, variant):
    """Some linears have whole super-blocks, and not in all layouts."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536} if "k" in isq else {"intermediate_size": 640}
    config = {"model_type": "llama", **COMMON, **VARIANTS[variant], **sizes}
    compare(write(tmp_path, config), "bf16", isq, exact=False)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
STORED = [GPTQ, AWQ, FP8]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype, width", [("float16", 2), ("float32", 4)])
@pytest.mark.parametrize("settings", STORED, ids=lambda one: one["quant_method"])
def test_bytes_of_quantised_checkpoints(tmp_path, settings, dtype, width):
    """Scales are f16 in both."""
    config = {"model_type": "llama", **COMMON, "intermediate_size": 1536, "torch_dtype": dtype}
    path = write(tmp_path, config | {"quantization_config": settings})
    compare(path, "bf16", exact=False)
    plain, shape = read(write(tmp_path / "plain", config)), read(path)
    assert shape.parameters == plain.parameters
    outside = 2 * 517 * 384 + 384 * 11  # embedding, head, norms
    bits = 4 + 20 / settings["group_size"] if "group_size" in settings else 8
    wanted = (plain.parameters - outside) * bits / 8 + width * outside
    assert shape.checkpoint_bytes == pytest.approx(wanted, rel=0.003)
    mine, whole = (memory.stages(one, Layout(1), CONTEXT)[0].loaded for one in (shape, plain))
    assert mine < (0.5 if bits < 8 else 0.65) * whole


KINDS = sorted({*ggml.CODECS, "F16", "BF16"} - {"IQ1_M"})  # gguf_files writes no IQ1_M
QUICK = "F16", "Q4_K"


@pytest.mark.parametrize("kind", [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.long]) for one in KINDS])
def test_bytes_of_gguf_files(tmp_path, kind):
    whole = ggml.CODECS[kind].group == 256 if kind in ggml.CODECS else False  # super-blocks
    sizes = dict(
        hidden_size=512 if whole else 384,
        head_dim=64,
        intermediate_size=768 if whole else 640,
        max_position_embeddings=CONTEXT,
    )
    path = make_checkpoint(tmp_path, **sizes)
    file = gguf_files.write(path, tmp_path / "tiny.gguf", kind)
    compare(file, "bf16", exact=False)
    shape = read(file)
    assert shape.degrees == (1, 2, 3, 6, 12)
    assert shape.active == read(path).active  # weights, however many bytes hold them
    assert re.search("GGUF.* 0.0[01] GB", headers.compare(shape, headers.by_class(file)))


EXPERTS = {
    "model_type": "qwen3_moe",
    **COMMON,
    "hidden_size": 512,
    "moe_intermediate_size": 768,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("isq, settings", [("q4k", {}), ("none", GPTQ), ("none", AWQ)])
def test_bytes_of_quantised_experts(tmp_path, isq, settings):
    path = write(tmp_path, EXPERTS | ({"quantization_config": settings} if settings else {}))
    compare(path, "bf16", isq, exact=False, layouts=[(1, 1), (3, 1), (1, 2)])
    (whole,) = memory.stages(read(path, isq=isq), Layout(1), CONTEXT)
    assert whole.weights["experts"] < 0.6 * 7 * 3 * 512 * 768 * 2  # of 16 bits, in the layer that has some


def test_tensor_groups_that_would_cut_groups_of_weights_are_no_layouts(tmp_path):
    path = write(tmp_path, {"model_type": "llama", **COMMON, "intermediate_size": 352})
    assert read(path).degrees == (1, 2, 3, 6, 12) and read(path, isq="q8_0").degrees == (1, 3, 6)


@pytest.mark.parametrize("variant", ["plain", "tied"])
def test_bytes_where_matrices_are_packed(tmp_path, monkeypatch, variant):
    """Without a compiler. A tied head has bytes of its own then."""
    monkeypatch.setattr(compiler, "compilers", lambda: iter(()))
    monkeypatch.setattr(ops, "available", lambda: False)
    config = {"model_type": "llama", **COMMON, **VARIANTS[variant]}
    compare(write(tmp_path, config), "f32")
    shape = read(tmp_path, "f32", "cpu")
    assert memory.stages(shape, Layout(1), CONTEXT)[0].weights["head"] == 517 * 384 * 4


def test_a_tied_head_is_counted_once_where_it_is_the_embedding(tmp_path):
    shape = read(write(tmp_path, {"model_type": "llama", **COMMON, "tie_word_embeddings": True}))
    table = 517 * 384 * 2
    (only,) = memory.stages(shape, Layout(1), CONTEXT)
    assert (only.weights["embedding"], only.weights["head"]) == (table, 0)
    first, last = memory.stages(shape, Layout(1, 2), CONTEXT)
    assert (first.weights["embedding"], first.weights["head"]) == (table, 0)
    assert (last.weights["embedding"], last.weights["head"]) == (0, table)


@pytest.mark.sample(11)
@pytest.mark.parametrize("model_type", architectures.supported())
def test_the_rest_is_the_ranks(tmp_path, model_type):
    path = write(tmp_path, config_of(model_type))
    shape, config = read(path), rank_config.read_config(path)
    degrees = rank_config.tensor_degrees(config.num_heads, config.num_kv_heads)
    hybrid = model_type.startswith(("qwen3_5", "qwen3_next", "kimi_linear", "glm5_next"))
    if hybrid:  # its gated delta net has 6 heads of keys
        degrees = [tp for tp in degrees if 6 % tp == 0]
    assert list(shape.degrees) == degrees
    assert shape.max_positions == config.max_positions
    modules = measure.build(config, measure.GroupRank(0, 1), measure.GroupRank(0, 1)).named_modules()
    gated = any(name.endswith("gate_up_proj") for name, _ in modules)
    # Gate and up, and what they make of each other, of one layer or of two experts; or, without a gate, attention's
    # queries, keys, values and outputs. A delta net of 3 heads of keys, 6 of values has what its chunks take, in f32.
    times = 2 if model_type in ("gpt_oss", "granitemoe", "minimax_m2", "mixtral", "olmoe") else 1
    widest = 3 * 250 * times if gated else 192 + 2 * 96 + 192
    if hybrid:
        keys, values = 3 * 16, 6 * 24
        widest = 2 * (2 * keys + 2 * values) + 2 * 6 * (4 * 16 + 4 * 24)
    # Each channel of these has a decay.
    if heads := {"kimi_linear": 3, "glm5_next": 3, "glm5_next_text": 3, "bailing_hybrid": 6}.get(model_type):
        widest = 2 * 4 * heads * 16 + 2 * heads * (4 * 16 + 4 * 16 + 8 * 16)
    if model_type in (
        "falcon_h1",
        "granitemoehybrid",
        "nemotron_h",
    ):  # x, z, keys and queries, and what chunks take in f32
        widest = 2 * (384 + 2 * 32 + 384) + 2 * 6 * (3 * 64 + 2 * 64)
    if model_type in ("deepseek_v32", "glm_moe_dsa"):  # latent attention's, and the indexer's queries, weights and key
        widest = 576 + 16 * (16 + 1) + 16
    # A convolution's three inputs, and its output; or as much of heads that all have keys of their own.
    if model_type.startswith(("lfm2", "gpt_neox", "blip")):
        widest = 3 * 192 + 192
    assert {tp: rank.kinds[0].inner for tp, rank in shape.ranks.items()}[2] == widest


def test_the_constants_are_the_ranks():
    assert memory.BLOCK == engine.BLOCK_SIZE
    assert {True: kv_cache.FRACTION["cpu"], False: kv_cache.FRACTION["cuda"]} == memory.FRACTION
    assert (memory.SNAPSHOTS, memory.SNAPSHOT_SHARE) == (kv_cache.SNAPSHOTS, kv_cache.SNAPSHOT_SHARE)
    assert {True: engine.TOKEN_BUDGET["cpu"], False: engine.TOKEN_BUDGET["cuda"]} == plan.BUDGET


@pytest.mark.long
def test_another_process_measures(tmp_path):
    path = write(tmp_path, {"model_type": "llama", **COMMON})
    found = measured.read(Question(str(path), "cpu", "auto", most=4), path.name)
    assert found == read(path, "auto", "cpu", most=4)
    assert sorted(found.ranks) == [1, 2, 3]


def test_the_degree_that_is_asked_for_is_measured_too(tmp_path):
    path = write(tmp_path, {"model_type": "llama", **COMMON})
    answer = json.loads(ask(Question(str(path), "cpu", "auto", tp=6, most=2)))
    assert sorted(map(int, answer["ranks"])) == [1, 2, 6]


@pytest.mark.long
def test_another_process_refuses(tmp_path):
    path = write(tmp_path, {"model_type": "llama", **COMMON})
    with pytest.raises(FatalError) as stop:
        measured.ask(Question(str(path), "cpu", "auto", tp=5))
    assert stop.value.code == USAGE and re.search("--tp 5.*12 attention.*degrees", str(stop.value))  # fmt: skip


def test_an_architecture_that_is_not_there_is_refused(tmp_path):
    path = write(tmp_path, {"model_type": "mamba", **COMMON})
    with pytest.raises(FatalError, match="'mamba'") as stop:
        ask(Question(str(path), "cpu", "auto"))
    assert stop.value.code == MODEL


def test_another_process_fails(monkeypatch):
    monkeypatch.setattr(measured, "MEASURE", ("-c", "raise SystemExit(9)"))
    with pytest.raises(FatalError, match="without memory") as stop:
        measured.ask(Question("/m", "cpu", "auto"))
    assert stop.value.code == 9
