"""A table and layers in host memory on a GPU: pinned, read there or copied aside, in CUDA graphs too; logits as with
all on the device, also once the model has slept."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.segmented_graph import SegmentedGraph
from phalanx.rank.model.load import load
from phalanx.rank.worker import kv_cache
from phalanx.rank.worker.host_copy import HostCopy, storages

from ...checkpoints import make_checkpoint
from ...devices import require_gpu
from .harness import make_batch, moved, tokens

require_gpu()

TABLE = 512 * 256 * 2  # bytes of the embedding
ALL, SOME = 1 << 30, 2_500_000  # of all layers as well, and of one to five by the format
BLOCK = 16


@pytest.mark.parametrize("isq", ["none", "q8_0", "q4k"])
@pytest.mark.parametrize("layers", [TABLE, SOME, ALL])
def test_steps_and_graphs(tmp_path, isq, layers):
    """A prompt of two microbatches; then decode steps, eager and replayed, each of which copies anew."""
    path = make_checkpoint(
        tmp_path / "tiny", hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, num_hidden_layers=6, dtype="bfloat16", tokenizer=False,
    )  # fmt: skip

    def one(comm):
        grid, found = mesh.build(comm, 1, 1), []
        for size in (0, layers):
            model = load(path, grid, "cuda", "bf16", isq=isq, layers=size)
            caches = kv_cache.allocate(model.cache_specs(), 32, BLOCK, model.dtype, torch.device("cuda"))
            tables = [list(range(16)), list(range(16, 32))]
            ids = [tokens(20, 1), tokens(9, 2)]
            prompt = [moved(make_batch([(ids[i], 0, tables[i])], BLOCK, caches), "cuda") for i in range(2)]
            step = moved(make_batch([([7], 20, tables[0]), ([8], 9, tables[1])], BLOCK, caches), "cuda")
            outputs = [model(prompt).clone(), model([step]).clone()]
            with torch.cuda.stream(torch.cuda.Stream()):
                model([step])
                torch.cuda.current_stream().synchronize()
                segmented = SegmentedGraph(torch.cuda.graph_pool_handle())
                hidden = segmented.capture(lambda model=model, step=step: model([step]))
                for _ in range(3):
                    segmented.replay(2)
                    torch.cuda.current_stream().synchronize()
                    outputs.append(hidden.clone())
            assert len(segmented) == 1
            torch.cuda.synchronize()
            slept = HostCopy(storages(model, torch.device("cuda")))
            slept.give_device_memory()
            slept.restore()
            outputs.append(model([step]).clone())
            if size:
                offload = model.layer_offload
                assert offload is not None and model.model.embed_tokens.weight.is_pinned()
                assert offload.copies_layers == bool(offload._copies) == (size > TABLE)
                assert all(x.host.is_pinned() for xs in offload._copies for x in xs)
            found.append(outputs)
        return found

    with torch.no_grad():
        ((expected, found),) = threads.run(one, 1)
    assert all(map(torch.equal, found, expected))
