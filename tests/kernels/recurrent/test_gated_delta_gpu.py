"""The gated delta net on a GPU: Triton's kernels against torch on a CPU."""

import pytest
import torch

from .steps import (
    BESIDE_DRAFTS,
    PROMPTS,
    PUBLISHED,
    SIZES,
    Layer,
    check_chunks,
    check_norm,
    check_steps,
    check_ungroup,
    make_rows,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = [(torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)]


@pytest.mark.parametrize("sizes", [*SIZES, PUBLISHED])
@pytest.mark.parametrize("dtype, bound", KINDS)
def test_decode_steps(sizes, dtype, bound):
    for taps, query_len, entries in ((2, 1, 1), (3, 1, 4), (4, 1, 1), (4, 4, 4), (2, 3, 5)):
        check_steps(sizes, taps, dtype, bound, "cuda", query_len, entries)


@pytest.mark.parametrize("sizes", [*SIZES, PUBLISHED])
@pytest.mark.parametrize("dtype, bound", KINDS)
def test_steps_with_decays_of_channels(sizes, dtype, bound):
    for query_len, entries, floor in ((1, 1, 0.0), (4, 4, -5.0)):
        check_steps(sizes, 4, dtype, bound, "cuda", query_len, entries, channels=True, floor=floor)


@pytest.mark.parametrize("sizes", [*SIZES, PUBLISHED])
@pytest.mark.parametrize("dtype, bound", KINDS)
def test_what_is_around_steps(sizes, dtype, bound):
    check_ungroup(sizes, dtype, "cuda")
    check_norm(sizes, dtype, bound, "cuda")


CHUNK_KINDS = [(torch.float32, 2e-4), (torch.bfloat16, 3e-2), (torch.float16, 6e-3)]


@pytest.mark.parametrize("sizes", [*SIZES, PUBLISHED])
@pytest.mark.parametrize("dtype, bound", CHUNK_KINDS)
def test_chunks(sizes, dtype, bound):
    for lens, taps in ((PROMPTS, 4), (([300], [300]), 2), (([64, 1000], [128, 1000]), 3)):
        torch.manual_seed(0)
        check_chunks(Layer(sizes, make_rows(*lens), taps, dtype), bound, "cuda")
    check_chunks(Layer(sizes, make_rows(*BESIDE_DRAFTS, query_len=4), 4, dtype), bound, "cuda")


@pytest.mark.parametrize("sizes", [*SIZES, PUBLISHED])
@pytest.mark.parametrize("dtype, bound", CHUNK_KINDS)
def test_chunks_with_decays_of_channels(sizes, dtype, bound):
    for lens, floor in ((PROMPTS, 0.0), (([300], [300]), -5.0)):
        torch.manual_seed(0)
        check_chunks(Layer(sizes, make_rows(*lens), 4, dtype, channels=True, floor=floor), bound, "cuda")
    check_chunks(Layer(sizes, make_rows(*BESIDE_DRAFTS, query_len=4), 4, dtype, channels=True), bound, "cuda")


@pytest.mark.parametrize("channels", [False, True])
def test_equal_keys_in_a_row(channels):
    """The system within a chunk is then as far from the unit matrix as it can be."""
    torch.manual_seed(0)
    layer = Layer(PUBLISHED, make_rows([128], [128]), channels=channels)
    layer.x[:] = layer.x[0]
    check_chunks(layer, 2e-4, "cuda")


def test_a_step_with_prompts_beside_decoding_sequences():
    torch.manual_seed(0)
    layer = Layer(PUBLISHED, make_rows([1, 1, 100, 65], [7, 1, 300, 65]), dtype=torch.bfloat16)
    there = layer.on("cuda")
    for got, wanted in zip(there.run(), layer.run(), strict=True):  # a ring may keep entries that no token has written
        torch.testing.assert_close(got.cpu().float(), wanted.float(), atol=3e-2, rtol=3e-2, equal_nan=True)


def test_a_captured_step_goes_on_with_what_is_there():
    """A graph reads rows and lengths anew; a sequence that begins in a used row begins with zeros."""
    torch.manual_seed(0)
    layer = Layer(PUBLISHED, make_rows([1, 1], [9, 2], [1, 0]), dtype=torch.bfloat16)
    there = layer.on("cuda")
    there.batch.rows.fill_(-1)
    there.steps()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, *_ = there.steps()
    for rows, lengths in (([1, 0], [9, 2]), ([0, 1], [1, 10])):
        for batch in (layer.batch, there.batch):
            batch.rows.copy_(torch.tensor(rows))
            batch.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        want, convolution, state = layer.run()
        torch.testing.assert_close(out.cpu().float(), want.float(), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(there.state.cpu(), state, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(there.convolution.cpu(), convolution)
