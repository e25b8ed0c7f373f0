"""Reading weights: what each rank reads, and what a user is told about a broken checkpoint."""

import json
import logging
import os
import platform
import re

import pytest
import torch
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.rank.model import load_memory
from phalanx.rank.model.cache_spec import PagedKV
from phalanx.rank.model.load import load
from phalanx.rank.model.shard import even, key_heads, stage_layers
from phalanx.rank.model.weights import safetensors as weights
from phalanx.rank.safetensors_header import read_index
from safetensors.torch import load_file, save_file

from ...checkpoints import make_checkpoint, make_config, make_weights


def load_on(path, tp=1, pp=1, **options):
    """The models of all ranks."""
    return threads.run(lambda comm: load(path, mesh.build(comm, tp, pp), **options), tp * pp)


def stop(path, **options):
    with pytest.raises(errors.FatalError) as stopped:
        load_on(path, **options)
    assert stopped.value.code == errors.MODEL
    return str(stopped.value)


@pytest.fixture
def small(tmp_path):
    return make_checkpoint(tmp_path, num_hidden_layers=2, tokenizer=False)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_spans():
    assert [(s.start, s.stop, s.width) for s in (even(10, r, 4) for r in range(4))] == [
        (0, 3, 3), (3, 6, 3), (6, 9, 3), (9, 10, 3),
    ]  # fmt: skip
    assert [(s.start, s.stop) for s in (even(5, r, 4) for r in range(4))] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [key_heads(2, r, 6).start for r in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [list(stage_layers(7, s, 3)) for s in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(stage_layers(8, s, 3)) for s in range(3)] == [3, 3, 2]


def test_what_a_model_tells(small):
    (model,) = load_on(small)
    assert (model.hidden_size, model.vocab_size, model.max_model_len) == (48, 512, 512)
    assert (model.dtype, model.cache_specs()) == (torch.float32, [PagedKV(6, 8, 8)] * 2)
    total = sum(t.nbytes for t in load_file(small / "model.safetensors").values())
    assert model.weight_bytes == total
    models = load_on(small, tp=2, pp=2)  # rank 0 is on the last stage
    assert [m.cache_specs() for m in models] == [[PagedKV(3, 8, 8)]] * 4
    assert [(m.lm_head.vocab.start, m.lm_head.vocab.stop) for m in models[:2]] == [(0, 256), (256, 512)]
    assert list(models[0].model.layers) == ["1"]
    assert list(models[2].model.layers) == ["0"]
    assert models[0].model.embed_tokens is None and models[2].lm_head is None
    norms = 48 * 4 * 5  # the two norms of each layer and the last: on both ranks of a tensor group
    assert sum(m.weight_bytes for m in models) == total + norms


@pytest.mark.parametrize("tp, pp", [(1, 1), (3, 1), (2, 2)])
def test_each_rank_reads_its_slices_only(small, monkeypatch, tp, pp):
    read = []

    def window(*arguments, real=weights.window):
        seen = real(*arguments)
        read.append(seen.nbytes)
        return seen

    monkeypatch.setattr(weights, "window", window)
    total = sum(t.nbytes for t in load_file(small / "model.safetensors").values())
    models = load_on(small, tp=tp, pp=pp)
    wanted = sum(4 * part.numel for model in models for part in model.slices())
    assert sum(read) == wanted < 1.1 * total


def test_tied_weights_are_held_once(tmp_path):
    path = make_checkpoint(tmp_path, tie_word_embeddings=True, num_hidden_layers=2, tokenizer=False)
    (model,) = load_on(path)
    assert model.lm_head.matrix is model.model.embed_tokens.weight
    last, first = load_on(path, pp=2)
    assert torch.equal(last.lm_head.matrix, first.model.embed_tokens.weight)


def test_large_matrices_are_packed_in_place_of_the_plain_ones(tmp_path, monkeypatch):
    from phalanx.kernels.cpp import ops
    from phalanx.kernels.gemm import linear

    monkeypatch.setattr(linear, "PACK_FROM", 1000)
    monkeypatch.setattr(ops, "available", lambda: False)  # which take weights as they are
    for tied in (False, True):
        path = make_checkpoint(tmp_path / str(tied), tie_word_embeddings=tied, num_hidden_layers=2, tokenizer=False)
        (model,) = load_on(path)
        assert model.lm_head.matrix.is_mkldnn and model.model.layers["1"].mlp.down_proj.matrix.is_mkldnn
        assert not model.model.embed_tokens.weight.is_mkldnn and not model.model.norm.weight.is_mkldnn
        total = sum(t.nbytes for t in load_file(path / "model.safetensors").values())
        assert model.weight_bytes == total + tied * 512 * 48 * 4  # a tied head has its own, packed


def test_progress_counts_this_ranks_bytes(small):
    calls = []
    (model,) = load_on(small, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (model.weight_bytes, model.weight_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls) and len(calls) > 10


def test_dtype_is_logged_once_for_all_ranks(small, caplog):
    with caplog.at_level(logging.INFO, "phalanx"):
        load_on(small, tp=2, pp=2)
    (said,) = caplog.messages
    assert said.count("f32") == 2


def test_max_model_len_caps_and_is_capped(small, caplog):
    (model,) = load_on(small, max_model_len=100)
    assert model.max_model_len == 100 and len(model.rope.kinds[0].table) == 100
    (model,) = load_on(small, max_model_len=1000)
    assert model.max_model_len == 512
    assert "most 512 tokens; 1000" in caplog.text


def test_a_missing_tensor(small):
    rewrite(small, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert re.search(f"{small}.*tensor.*model.layers.1.mlp.up_proj.weight", stop(small))


def test_a_wrong_shape(small):
    rewrite(small, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(40, 48)}))
    assert re.search(f"{small}/model.safetensors.*model.layers.0.self_attn.k_proj.weight.*40 x 48", stop(small, tp=2))


def test_a_dtype_that_cannot_be_read(small):
    rewrite(small, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    assert re.search(f"{small}/model.safetensors.*model.norm.weight.*I8.*BF16", stop(small))


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_a_truncated_file(small, keep):
    file = small / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert re.search(f"{file}.*truncated", stop(small))


KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


@pytest.mark.skipif(KERNEL < (5, 14), reason="the kernel ends the process")
@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_becomes_shorter_while_it_is_read(small, mapped):
    (model,) = load_on(small)
    parts = list(model.slices())
    checkpoint = weights.Checkpoint(small, read_index(small))
    file = small / "model.safetensors"
    if mapped:
        checkpoint.fill(parts[0], parts[0].target)
    os.truncate(file, 4096)
    with pytest.raises(errors.FatalError) as stopped:
        for part in parts:
            checkpoint.fill(part, part.target)
    assert str(stopped.value).startswith(f"{file}: model.") and stopped.value.code == errors.MODEL
    assert "file system fails" in str(stopped.value)


def test_a_kernel_that_cannot_fetch_pages(small, monkeypatch):
    (model,) = load_on(small)
    monkeypatch.setattr(weights, "POPULATE_READ", 9999)
    (again,) = load_on(small)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_file_that_is_gone_when_it_is_read(small):
    (model,) = load_on(small)
    checkpoint = weights.Checkpoint(small, read_index(small))
    (small / "model.safetensors").unlink()
    with pytest.raises(errors.FatalError, match="model.embed_tokens.weight.*No such file"):
        part = next(model.slices())
        checkpoint.fill(part, part.target)


def test_a_git_lfs_pointer(small):
    (small / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "LFS pointer; fetch" in stop(small)


def test_no_weights_at_all(small):
    (small / "model.safetensors").unlink()
    assert re.search(f"{small}.*neither.*model.safetensors", stop(small))
    (small / "pytorch_model.bin").write_bytes(b"")
    assert re.search("pytorch_model.bin.*pickled", stop(small))


def test_broken_shards(tmp_path):
    path = make_checkpoint(tmp_path, num_hidden_layers=2, shards=3, tokenizer=False)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    second = path / "model-00002-of-00003.safetensors"

    wrong = dict(good["weight_map"], **{"model.norm.weight": second.name})
    if good["weight_map"]["model.norm.weight"] == second.name:
        wrong["model.norm.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps({"weight_map": wrong}))
    assert re.search(f"{path}/{wrong['model.norm.weight']}.*model.norm.weight.*{index.name}", stop(path))
    index.write_text(json.dumps(good))
    contents = second.read_bytes()
    second.write_bytes(contents[:-1])
    assert re.search(f"{second}.*truncated", stop(path))
    second.unlink()
    assert re.search(f"{index.name}.*{second.name}.*missing", stop(path))
    index.write_text("{}")
    assert "weight_map" in stop(path)
    index.write_text("{")
    assert stop(path).startswith(f"{index} is garbled: ")


def test_extra_tensors(small, caplog):
    harmless = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for i in range(2)}
    rewrite(small, lambda tensors: tensors.update(harmless))
    load_on(small, pp=2)
    assert not caplog.records
    rewrite(small, lambda tensors: tensors.update({"visual.patch.weight": torch.zeros(4), "visual.b": torch.zeros(1)}))
    load_on(small, tp=2)
    (record,) = caplog.records
    assert "2 tensors" in record.message


@pytest.mark.parametrize("change, message", [
    ({"intermediate_size": None}, "has no intermediate_size"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', expected float"),
    ({"attention_bias": 3}, "attention_bias is 3, expected bool"),
    ({"hidden_act": "mish"}, "activation 'mish' is not supported; supported are silu, swish, gelu"),
    ({"rope_parameters": {"rope_type": "axial"}},
     "rope type 'axial' is not supported; supported are default, linear, dynamic, llama3, yarn, longrope"),
    ({"rope_parameters": {"rope_type": "none"}},
     "rope type 'none' is not supported; supported are default, linear, dynamic, llama3, yarn, longrope, su"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' needs 'short_factor'"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope type 'llama3' needs 'low_freq_factor'"),
    ({"head_dim": 7}, "rope needs an even number of dimensions, but it gets 7 of a head's 7"),
])  # fmt: skip
def test_configs_that_an_architecture_refuses(small, change, message):
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | change))
    assert message in stop(small)


WINDOWED = {"use_sliding_window": True, "sliding_window": 7}
SLIDES = ["sliding_attention"]


def test_layer_types_for_fewer_layers_than_there_are(tmp_path):
    """Every rank tells, also the one whose stage has the layers that are named."""
    path = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2, tokenizer=False, layer_types=SLIDES, **WINDOWED)
    for pp in (1, 2):
        assert re.search("layer_types.*1 entries", stop(path, pp=pp))


@pytest.mark.parametrize("change", [{"use_sliding_window": False}, {"sliding_window": None}, {"layer_types": []}])
def test_layer_types_that_are_not_read(tmp_path, change):
    config = {"num_hidden_layers": 2, "layer_types": SLIDES} | WINDOWED | change
    load_on(make_checkpoint(tmp_path, "qwen3", tokenizer=False, **config))


def test_degrees_that_do_not_fit(small):
    for tp, pp, message in ((4, 1, "--tp 4 does not fit"), (1, 3, "--pp 3 is more pipeline stages")):
        with pytest.raises(errors.FatalError, match=message) as stopped:
            load_on(small, tp=tp, pp=pp)
        assert stopped.value.code == errors.USAGE


def test_weights_that_do_not_fit(small, monkeypatch):
    (model,) = load_on(small)
    load_on(small, room=model.weight_bytes)
    gb = model.weight_bytes / 1e9
    with pytest.raises(errors.FatalError) as stopped:
        load_on(small, room=model.weight_bytes - 1)
    assert stopped.value.code == errors.MEMORY
    assert re.search(f"take {gb:.2f}.*{gb:.2f} GB.*narrower", str(stopped.value))

    with pytest.raises(errors.FatalError, match="GPU 0.00.*ranks") as stopped:
        load_on(small, device="cuda", room=0)
    assert stopped.value.code == errors.MEMORY


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words"),
    RuntimeError("[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
])  # fmt: skip
def test_memory_that_runs_out_while_loading(small, monkeypatch, error):
    def zeros(*_, **__):
        raise error

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(errors.FatalError) as stopped:
        load_on(small)
    assert stopped.value.code == errors.MEMORY
    assert f"memory ran out ({errors.first_line(error)[:-1]}):" in str(stopped.value)


@pytest.mark.parametrize("error", [
    errors.FatalError("no", errors.MODEL), torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
])  # fmt: skip
def test_no_rank_goes_on_where_another_one_cannot(error):
    def rank(world):
        def work():
            if world.rank:
                raise error
            return 1

        with pytest.raises(Exception) as stopped:
            load_memory.together(world, work)
        return stopped.value

    other, its = threads.run(rank, 2)
    assert isinstance(other, load_memory.OthersRefuse) and its is error


def test_dummy_weights_need_no_weight_file(small):
    (small / "model.safetensors").unlink()
    (model,) = load_on(small, load_format="dummy")
    weight = model.model.layers["0"].mlp.down_proj.matrix
    assert abs(float(weight.std()) * 100**0.5 - 1) < 0.1
    assert len({tuple(row) for row in weight.tolist()}) == 48
    assert torch.equal(model.model.norm.weight, torch.ones(48))


def test_the_helper_makes_the_same_bytes(tmp_path):
    a, b = (make_checkpoint(tmp_path / name, "qwen3", seed=3) for name in "ab")
    for file in sorted(a.iterdir()):
        assert file.read_bytes() == (b / file.name).read_bytes()
    different = make_weights(make_config("qwen3"), seed=4, gain=1.0)
    assert not torch.equal(load_file(a / "model.safetensors")["model.norm.weight"], different["model.norm.weight"])


def test_the_helpers_tokenizer_loads(tmp_path):
    from tokenizers import Tokenizer

    path = make_checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    text = "<|im_start|>user\nGrüße 你好 🙂 the processors<|im_end|>"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 1 and encoded.ids[-1] == 2 and max(encoded.ids) < 512
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
