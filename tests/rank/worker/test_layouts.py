"""A model whose layers keep different caches, served by the engine."""

from types import SimpleNamespace

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.comm.watchdog import LocalWatchdog
from phalanx.kernels.attention.attention import AttentionParams
from phalanx.rank import protocol
from phalanx.rank.model import architectures
from phalanx.rank.model.architectures import llama
from phalanx.rank.model.cache_spec import PagedKV
from phalanx.rank.model.layers.attention import PagedAttention
from phalanx.rank.model.layers.linear import QKVParallel, RowParallel
from phalanx.rank.options import Options
from phalanx.rank.worker.engine import Engine, RankContext

from ...checkpoints import make_checkpoint

LAYERS = [(6, 8, 0), (2, 16, 0), (6, 16, 5)]  # key heads, head size, window; 12 query heads; 8 dimensions are rotated


class Attention(llama.Attention):
    def __init__(self, args, mesh, index, local):
        super(llama.Attention, self).__init__()
        kv_heads, dim, window = LAYERS[index]
        self.qkv_proj = QKVParallel(args.hidden_size, 12, kv_heads, dim, mesh)
        self.o_proj = RowParallel(12 * dim, args.hidden_size, mesh)
        self.attention = PagedAttention(local, AttentionParams(dim**-0.5, window))


class Layer(llama.Layer):
    ATTENTION = Attention


class Model(llama.Model):
    LAYER = Layer


def sample(runner, step, row, tokens, computed=0):
    """The greedy token after these, of which the first `computed` are in the cache of a row that decodes."""
    new = []
    if not computed:
        blocks = protocol.pack_u32(range(row * 8, row * 8 + 8))
        greedy = protocol.SamplingParams(max_tokens=1, temperature=0.0)
        new = [protocol.NewSequence(row, protocol.pack_u32(tokens), len(tokens), 0, blocks, greedy)]
    counts = protocol.pack_u32([len(tokens)] if len(tokens) - computed > 1 else [])
    future = runner.start(protocol.Plan(step=step, rows=protocol.pack_u16([row]), counts=counts, new=new))
    assert future.wait(60)
    return future.output().ids


def serve(world, path, tp):
    place = RankContext(world, ["here"] * world.size, mesh.build(world, tp, 1), torch.device("cpu"), LocalWatchdog())
    options = Options(model=str(path), load_format="dummy", max_num_seqs=2, max_model_len=128, mem=1)
    engine = Engine(options, place)
    limits = engine.load()
    tokens = [5, 7, 11, 13, 17, 19, 23]
    found = []
    for step in range(9):  # a prompt, then one token after the other
        found.append(protocol.unpack_u32(sample(engine.runner, step, 0, tokens, len(tokens) - 1 if step else 0))[0])
        whole = protocol.unpack_u32(sample(engine.runner, step + 100, 1, tokens))[0]
        assert found[-1] == whole, "computed in one step"
        tokens.append(found[-1])
    specs = engine.model.cache_specs()
    shapes = [[tuple(x.shape) for x in layer] for layer in engine.runner.caches]
    engine.runner.finish()
    engine.unload()
    return limits, specs, shapes, found


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_may_keep_different_caches(tmp_path, monkeypatch, tp):
    monkeypatch.setattr(architectures, "find", lambda _: SimpleNamespace(Args=llama.Args, Model=Model))
    path = make_checkpoint(tmp_path, num_hidden_layers=3)
    results = threads.run(lambda world: serve(world, path, tp), tp)
    assert len({tuple(found) for *_, found in results}) == 1 and len(set(results[0][-1])) > 1
    for limits, specs, shapes, _ in results:
        assert specs == [PagedKV(kv_heads // tp, dim, dim, window) for kv_heads, dim, window in LAYERS]
        per_token = sum(2 * 4 * kv_heads // tp * dim for kv_heads, dim, _ in LAYERS)
        assert limits.blocks == (1 << 20) // (16 * per_token)
        assert shapes == [[(limits.blocks, 16, kv_heads // tp, dim)] * 2 for kv_heads, dim, _ in LAYERS]
