"""Bytes and tokens of well-known models, against arithmetic done by hand; GB are 10^9 bytes."""

import re

import pytest
from phalanx.errors import MODEL, FatalError
from phalanx.launcher.commands.fit import headers, memory
from phalanx.launcher.commands.fit.devices import DEVICES
from phalanx.launcher.commands.fit.memory import Layout, Workload
from phalanx.rank.safetensors_header import INDEX

from .configs import ASKED, CONFIGS, GPU80, GPU141, WITH_WINDOWS, read, write


@pytest.fixture
def shape(tmp_path):
    def shape(name, **changes):
        """The config of a well-known model; changes to None leave keys out."""
        config = {key: value for key, value in ((CONFIGS | WITH_WINDOWS)[name] | changes).items() if value is not None}
        return read(write(tmp_path / name, config))

    return shape


def weights(shape, layout, stage=0):
    return memory.stages(shape, layout, ASKED.context)[stage].weights


def test_llama_8b(shape):
    model = shape("Llama-3.1-8B")
    # embedding and head: 128256 x 4096 = 525,336,576 each
    # attention: q 4096 x 4096 + k, v 2 x 1024 x 4096 + o 4096 x 4096 = 16,777,216 + 8,388,608 + 16,777,216 = 41,943,040
    # MLP: 3 x 4096 x 14336 = 176,160,768; norms: 2 x 4096 in a layer, 4096 at the end
    # 2 x 525,336,576 + 32 x (41,943,040 + 176,160,768 + 8,192) + 4,096
    assert model.parameters == 8_030_261_248
    # one rank, bf16: twice that
    assert weights(model, Layout(1)) == {
        "tower": 0,
        "embedding": 1_050_673_152,
        "attention": 2 * 32 * 41_943_040,
        "MLP": 2 * 32 * 176_160_768,
        "experts": 0,
        "norms": 2 * (32 * 8_192 + 4_096),
        "head": 1_050_673_152,
        "drafts": 0,
    }
    # KV: 32 layers x 2 x 8 heads x 128 x 2 bytes = 131,072 bytes a token
    (stage,) = memory.stages(model, Layout(1), ASKED.context)
    assert (stage.loaded, stage.kv_token) == (16_060_522_496, 131_072)
    # 8192 positions x 64 cosines and 64 sines x 4 bytes
    assert stage.rope == 8192 * 128 * 4


def test_kv_tokens_of_llama_8b(shape):
    model = shape("Llama-3.1-8B")
    held = memory.memory_fit(model, Layout(1), ASKED, GPU80, 8192)
    # a step of 8192 tokens: four times the stream of 4096 and three times the MLP's 14336, 2 bytes each; more than the
    # logits of 64 sequences, 64 x 128256 x 51 bytes
    assert held.activations == 8192 * 2 * (4 * 4096 + 3 * 14336) == 973_078_528
    # 85 GB less 0.6 GB of libraries, 16.06 GB of weights, 4 MB of rope and that step
    free = 85_000_000_000 - 600_000_000 - 16_060_522_496 - 4_194_304 - 973_078_528
    assert free == 67_362_204_672
    # 95 % of it is 63,994,094,438; a block of 16 tokens takes 16 x 131,072 = 2,097,152 bytes: 30,514 blocks
    assert held.kv_capacity == 30_514 * 16
    # sequences can use 64 x 8192 = 524,288 tokens, which is more: all that fits is taken
    assert held.kv_tokens == held.kv_capacity
    fewer = Workload(context=8192, concurrency=8, length=4096)
    held = memory.memory_fit(model, Layout(1), fewer, GPU80, 8192)
    assert (held.kv_capacity, held.kv_tokens, held.kv_bytes) == (30_514 * 16, 8 * 8192, 8 * 8192 * 131_072)
    # half of it: --kv-fraction 0.5
    half = memory.memory_fit(model, Layout(1), Workload(8192, 64, 4096, kv_fraction=0.5), GPU80, 8192)
    assert half.kv_capacity == int(0.5 * free) // 2_097_152 * 16


def test_a_run_on_an_h200(shape):
    """Llama 8B, 256 sequences of 8192: what rank 0 logged on one H200 (2026-11-21). Asked for 5 %."""
    asked = Workload(context=8192, concurrency=256, length=150)
    held = memory.memory_fit(shape("Llama-3.1-8B"), Layout(1), asked, DEVICES["H200"], 8192)
    assert round(held.heaviest.loaded / 1e6) == 16061  # of its log: loaded 16061 MB
    assert held.activations == pytest.approx(1601 * 2**20, rel=0.05)  # of its log: 1601 MiB
    assert held.kv_tokens == pytest.approx(948128, rel=0.01)  # "KV cache: 948128 tokens"
    assert held.kv_bytes == pytest.approx(118516 * 2**20, rel=0.01)  # "118516 MiB a rank"


@pytest.mark.parametrize("gpus, tokens", [(1, 913616), (2, 1936928)])
def test_runs_of_1024_sequences_on_h200(shape, gpus, tokens):
    """Llama 8B, 1024 sequences of 8192: "KV cache: ... tokens", as rank 0 logged on 2026-11-22. Asked for 5 %."""
    asked = Workload(context=8192, concurrency=1024, length=150)
    held = memory.memory_fit(shape("Llama-3.1-8B"), Layout(gpus), asked, DEVICES["H200"], 8192)
    assert held.kv_tokens == pytest.approx(tokens, rel=0.01)


def test_llama_70b_over_four(shape):
    model = shape("Llama-3.1-70B")
    # 2 x 128256 x 8192 + 80 x (2 x 8192^2 + 2 x 1024 x 8192 + 3 x 8192 x 28672 + 16384) + 8192
    assert model.parameters == 70_553_706_496
    # tp 4: a quarter of all but the norms. attention 150,994,944 / 4, MLP 704,643,072 / 4, head 1,050,673,152 / 4
    held = weights(model, Layout(4))
    assert held["attention"] == 2 * 80 * 37_748_736 == 6_039_797_760
    assert held["MLP"] == 2 * 80 * 176_160_768 == 28_185_722_880
    assert held["head"] == held["embedding"] == 2 * 262_668_288
    assert held["norms"] == 2 * (80 * 16_384 + 8_192)
    # KV: 80 layers x 2 x (8 / 4 heads) x 128 x 2 bytes = 81,920 bytes a token on each rank
    assert memory.stages(model, Layout(4), ASKED.context)[0].kv_token == 81_920
    # tp 16: key heads are replicated, one on each rank
    assert memory.stages(model, Layout(16), ASKED.context)[0].kv_token == 80 * 2 * 128 * 2
    # pp 4, tp 1: 20 layers a stage, the embedding on the first, the head on the last
    first, *_, last = memory.stages(model, Layout(1, 4), ASKED.context)
    layer = 2 * (150_994_944 + 704_643_072 + 16_384)
    assert first.loaded == 20 * layer + 2 * 1_050_673_152
    assert last.loaded == 20 * layer + 2 * 1_050_673_152 + 2 * 8_192
    assert last.kv_token == 20 * 2 * 8 * 128 * 2


@pytest.mark.long
def test_llama_405b(shape):
    model = shape("Llama-3.1-405B")
    # 2 x 128256 x 16384 = 4,202,692,608; a layer: attention 2 x 16384^2 + 2 x 1024 x 16384 = 570,425,344,
    # MLP 3 x 16384 x 53248 = 2,617,245,696, norms 32,768; 126 of them, 16,384 at the end
    assert model.parameters == 4_202_692_608 + 126 * (570_425_344 + 2_617_245_696 + 32_768) + 16_384
    assert model.parameters == 405_853_388_800
    # by tp 8: an eighth of 2 x 405.85e9 bytes, and all of the norms
    held = memory.memory_fit(model, Layout(8), ASKED, GPU141, 8192)
    assert held.problem == ""
    assert held.heaviest.loaded == 2 * (4_202_692_608 + 126 * 3_187_671_040) // 8 + 2 * (126 * 32_768 + 16_384)
    assert held.heaviest.loaded == 101_470_601_216
    # 126 layers x 2 x 1 head x 128 x 2 bytes
    assert held.heaviest.kv_token == 64_512
    # on eight GPUs of 85 GB: 101,470,601,216 + 1.0 GB of libraries + 4,194,304 of rope
    # + a step of 8192 x 2 x (4 x 16384 + 3 x 53248 / 8) = 1,400,897,536
    held = memory.memory_fit(model, Layout(8), ASKED, GPU80, 8192)
    assert "weights do not fit" in held.problem
    assert held.short == 101_470_601_216 + 1_000_000_000 + 4_194_304 + 1_400_897_536 - 85_000_000_000


def test_qwen3_30b_a3b(shape):
    model = shape("Qwen3-30B-A3B")
    # embedding, head: 151936 x 2048 = 311,164,928 each
    # attention: q and o 2 x 2048 x 4096, k and v 2 x 2048 x 512 = 18,874,368; norms 2 x 2048 + 2 x 128 = 4,352
    # experts: 128 x 3 x 2048 x 768 = 603,979,776, router 128 x 2048 = 262,144
    assert model.parameters == 2 * 311_164_928 + 48 * (18_874_368 + 4_352 + 603_979_776 + 262_144) + 2_048
    assert model.parameters == 30_532_122_624
    # for a token: 8 of the 128 experts, no embedding
    assert model.active == 311_164_928 + 48 * (18_874_368 + 4_352 + 8 * 4_718_592 + 262_144) + 2_048 == 3_041_867_776
    assert model.chosen == 8 and model.experts == 128
    # tp 4, experts cut like any other layer, or whole ones in four groups: as many bytes
    router = 2 * 48 * 262_144
    assert weights(model, Layout(4))["experts"] == 2 * 48 * 603_979_776 // 4 + router
    assert weights(model, Layout(4, ep=4))["experts"] == 2 * 48 * 603_979_776 // 4 + router
    # two groups of 64 experts, each cut over two ranks
    assert weights(model, Layout(4, ep=2))["experts"] == 2 * 48 * 603_979_776 // 4 + router
    # dp 4 with an expert group over all: attention whole on each, a quarter of the experts
    held = weights(model, Layout(1, dp=4, ep=4))
    assert held["attention"] == 2 * 48 * 18_874_368
    assert held["experts"] == 2 * 48 * 603_979_776 // 4 + router
    # offloaded: the router stays, and there is room for four buffers of 96 MiB
    (stage,) = memory.stages(model, Layout(1, offload=128), ASKED.context)
    assert (stage.weights["experts"], stage.host) == (router, 2 * 48 * 603_979_776)
    assert (stage.resident, stage.slots) == (0, 4 * 96 * 2**20)
    # 96 of 128 are resident, 24 of the 32 of a rank where four share them out; all are on the host
    for layout in (Layout(1, offload=32), Layout(4, ep=4, offload=8), Layout(4, ep=2, offload=16)):
        (stage,) = memory.stages(model, layout, ASKED.context)
        assert stage.host == 2 * 48 * 603_979_776 // layout.tp
        assert stage.resident == stage.host * 3 / 4 == stage.weights["experts"] - router
    # KV: 48 x 2 x 4 x 128 x 2 bytes; at tp 8 one head on each rank
    assert memory.stages(model, Layout(1), ASKED.context)[0].kv_token == 98_304
    assert memory.stages(model, Layout(8), ASKED.context)[0].kv_token == 24_576


@pytest.mark.long
def test_deepseek_v3(shape):
    model = shape("DeepSeek-V3")
    # embedding, head: 129280 x 7168 = 926,679,040 each
    # attention: 7168 x 1536 + 1536 x 128 x 192 + 7168 x 576 + 512 x 128 x 256 + 128 x 128 x 7168 = 187,105,280
    # norms: 2 x 7168 + 1536 + 512 = 16,384
    # dense MLP: 3 x 7168 x 18432 = 396,361,728 in 3 layers
    # experts: 3 x 7168 x 2048 = 44,040,192; 256 and a shared one in 58 layers; router 256 x 7168 + 256 = 1,835,264
    ends = 2 * 926_679_040 + 7_168
    assert model.parameters == (
        ends + 61 * (187_105_280 + 16_384) + 3 * 396_361_728 + 58 * (257 * 44_040_192 + 1_835_264)
    )
    assert model.parameters == 671_026_419_200
    # 37.6 billion with the embedding, as the paper's 37 billion counts
    assert model.active == pytest.approx(36.6e9, rel=0.002)
    # GPUs keep weights of fp8 with an f32 scale for 128 inputs of an output; embedding, head, router and norms in bf16,
    # the router's correction in f32
    linear = 1 + 4 / 128
    held = weights(model, Layout(1))
    assert held["embedding"] == held["head"] == 2 * 926_679_040
    plain = 512 * 128 * 256  # a latent's up-projection is kept in bf16, as it is absorbed
    assert held["attention"] == pytest.approx(61 * ((187_105_280 - plain) * linear + plain * 2), rel=1e-9)
    assert held["MLP"] == pytest.approx((3 * 396_361_728 + 58 * 44_040_192) * linear, rel=1e-9)
    assert held["experts"] == pytest.approx(58 * 256 * 44_040_192 * linear + 2 * 58 * (1_835_264 + 256), rel=1e-9)
    # so do experts that are on the host as well, 192 of 256 here
    (stage,) = memory.stages(model, Layout(1, offload=64), ASKED.context)
    assert stage.resident == pytest.approx(58 * 192 * 44_040_192 * linear, rel=1e-9)
    # the cache holds the latent, 512 + 64 elements of 2 bytes in 61 layers, whole on every rank
    for tp in (1, 8):
        assert memory.stages(model, Layout(tp), ASKED.context)[0].kv_token == 61 * 576 * 2
    # tp 8 cuts heads, not the two matrices into the latents: 7168 x (1536 + 576) stay whole
    whole = 7168 * (1536 + 576)
    assert weights(model, Layout(8))["attention"] == pytest.approx(
        61 * (((187_105_280 - whole - plain) / 8 + whole) * linear + plain * 2 / 8), rel=1e-9
    )
    # a rank of tp 8 holds 87.9 GB: eight GPUs of 150 GB hold it, eight of 85 GB lack 2.9 + libraries and a step
    assert memory.memory_fit(model, Layout(8), ASKED, GPU141, 8192).problem == ""
    lacks = memory.memory_fit(model, Layout(8), ASKED, GPU80, 8192)
    assert "weights do not fit" in lacks.problem
    assert lacks.heaviest.loaded == pytest.approx(87.88e9, rel=1e-3)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in CONFIGS if "vision_config" not in CONFIGS[name]])
def test_nothing_is_lost_in_the_cutting(shape, name):
    """The ranks of a layout hold the model once, but for what is replicated and padded: at most 2 % more."""
    model = shape(name, quantization_config=None)
    for layout in (Layout(2), Layout(4), Layout(1, 2), Layout(2, 2)):
        total = layout.tp * sum(stage.loaded for stage in memory.stages(model, layout, ASKED.context))
        assert 2 * model.parameters <= total <= 1.02 * 2 * model.parameters + 2 * layout.tp * 61 * 16_384


def test_other_families(tmp_path):
    base = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    # qwen2: 4 x 64 x 64 + 3 x 64 in biases of q, k, v; MLP 3 x 64 x 128; norms 2 x 64; 2 x 6400 and 64 at the ends
    qwen = read(write(tmp_path / "a", base | {"model_type": "qwen2", "intermediate_size": 128}))
    assert qwen.parameters == 2 * (4 * 4096 + 192 + 3 * 8192 + 128) + 2 * 6400 + 64
    # mixtral: 8 experts of 3 x 64 x 128 in place of the MLP, and a router
    more = {"model_type": "mixtral", "intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert read(write(tmp_path / "b", base | more)).parameters == (
        2 * (4 * 4096 + 8 * 24576 + 512 + 128) + 2 * 6400 + 64
    )
    # tied: one embedding
    tied = {"model_type": "mistral", "intermediate_size": 128, "tie_word_embeddings": True}
    assert read(write(tmp_path / "c", base | tied)).parameters == (2 * (4 * 4096 + 3 * 8192 + 128) + 6400 + 64)


@pytest.mark.long
def test_lengths_as_the_ranks_count_them(shape):
    assert shape("Llama-3.1-8B").max_positions == 131072
    assert shape("DeepSeek-V3").max_positions == 163840
    stretched = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert shape("Llama-3.1-8B", **stretched).max_positions == 262144


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model type 'mamba' is not supported; supported are "),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"num_hidden_layers": "many"}, "config.json: num_hidden_layers is 'many', not a positive integer"),
        ({"vocab_size": 0}, "config.json: vocab_size is 0, not a positive integer"),
        ({"torch_dtype": "int8"}, "config.json: dtype int8 is not supported; supported are float32, bfloat16, float16"),
        ({"hidden_act": "sine"}, "activation 'sine' is not supported"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantised weights (aqlm) are not supported"),
    ],
)
def test_configs_that_serving_refuses(shape, changes, message):
    with pytest.raises(FatalError) as stop:
        shape("Llama-3.1-8B", **changes)
    assert message in str(stop.value)
    assert stop.value.code == MODEL


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(FatalError, match="no config.json"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(FatalError, match="config.json.*object"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FatalError, match="config.json.*Expecting"):
        read(tmp_path)


def test_headers_are_compared(tmp_path):
    from ....checkpoints import make_checkpoint

    path = make_checkpoint(tmp_path / "one", "llama", shards=2, tokenizer=False)
    found = headers.by_class(path)
    model = read(path)
    assert sum(found.values()) == 4 * model.parameters
    assert found["embedding"] == found["head"] == 512 * 48 * 4
    assert re.search("weight.*hold 0.00", headers.compare(model, found))
    found["MLP"] *= 2
    assert "read, or a config.json" in headers.compare(model, found)
    first = next(path.glob("model-00001*"))
    data = first.read_bytes()
    first.write_bytes(data[:-100])
    with pytest.raises(FatalError, match=f"{first.name}.*truncated.*{len(data)} bytes"):
        headers.by_class(path)
    first.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(FatalError, match="LFS pointer"):
        headers.by_class(path)
    first.unlink()
    with pytest.raises(FatalError, match=f"{INDEX}.*{first.name}.*missing"):
        headers.by_class(path)
    for file in path.glob("*.safetensors"):
        file.unlink()
    assert not headers.by_class(path)  # config.json often comes with the index
    (path / INDEX).write_text("{}")
    with pytest.raises(FatalError, match="garbled.*weight_map"):
        headers.by_class(path)
    single = make_checkpoint(tmp_path / "two", "qwen3", tokenizer=False)
    assert sum(headers.by_class(single).values()) == 4 * read(single).parameters
    (single / "model.safetensors").unlink()
    assert re.search("config.json alone", headers.compare(model, headers.by_class(single)))


@pytest.mark.parametrize("name, at_least", [("gpt-oss-20b", (1.92, 1.99)), ("gemma-3-27b", (3.3, 5.7))])
def test_windows_make_room(shape, monkeypatch, name, at_least):
    """Layers with a window keep its tokens and few more: of 8192, and of 131072, beside all that they would keep."""
    model, found = shape(name), []
    for context in (8192, 131072):
        asked = Workload(context=context, concurrency=64, length=context // 2)
        with monkeypatch.context() as without:
            without.setattr(memory.cache_groups, "effective_window", lambda window, longest: 0)
            before = memory.memory_fit(model, Layout(1), asked, GPU141, 8192)
        after = memory.memory_fit(model, Layout(1), asked, GPU141, 8192)
        assert before.groups == memory.cache_groups.ONE_GROUP and len(after.groups) == 2
        assert after.free == before.free and not after.problem
        found.append(after.kv_capacity / before.kv_capacity)
        assert after.tokens(context) == after.kv_capacity >= after.kv_tokens
    assert all(ratio >= least for ratio, least in zip(found, at_least, strict=True)), found


def test_stages_with_windows_agree(shape):
    """Five full layers of ten on each of two stages; a rank's blocks take the lanes of its own layers."""
    parts = memory.stages(shape("gemma-3-27b"), Layout(1, pp=2), 131072)
    groups = memory.groups_of(parts)
    assert [stage.windows for stage in parts] == [{1024: 26, 0: 5}] * 2 and [g.window for g in groups] == [0, 1024]
    layer = 2 * 16 * 128 * 2  # keys and values of 16 heads of 128, two bytes each
    assert [stage.kv_layer for stage in parts] == [layer] * 2
    assert parts[0].block(groups) == memory.cache_groups.lanes(groups, parts[0].windows) * layer * 16
