"""Hyper-connections compared with transformers' modules of DeepSeek-V4."""

import pytest
import torch
import transformers
from phalanx.rank.model.layers.hyper_connections import (
    HyperConnection,
    HyperHead,
    HyperNormed,
    HyperSizes,
    HyperStream,
)
from phalanx.rank.model.layers.norm import RMSNorm
from torch.nn import Parameter

theirs = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

STREAMS, HIDDEN, TOKENS = 4, 24, 5
SIZES = HyperSizes(STREAMS, HIDDEN, 7, 1e-3, 1e-6)


@pytest.fixture(autouse=True)
def no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def config():
    given = dict(hidden_size=HIDDEN, hc_mult=STREAMS, hc_sinkhorn_iters=7, hc_eps=1e-3)
    return transformers.AutoConfig.for_model("deepseek_v4", **given)


def filled(module):
    for one in module.parameters():
        one.normal_(0, 0.7)
    return module


def ours_of(module, fn, base, scale):
    """With the weights of transformers' module."""
    module.fn, module.base, module.factors.scale = (Parameter(x.data.clone()) for x in (fn, base, scale))
    return module


def connection_of(module):
    return ours_of(HyperConnection(SIZES), module.fn, module.base, module.scale)


def unit_norm():
    norm = RMSNorm(HIDDEN, 1e-6)
    norm.weight = Parameter(torch.ones(HIDDEN))
    return norm


def sublayer(x):
    return x.roll(1, -1).tanh()


def test_two_sublayers_and_the_head(config):
    modules = [filled(theirs.DeepseekV4HyperConnection(config)) for _ in range(2)]
    last = filled(theirs.DeepseekV4HyperHead(config))
    value, norm = torch.randn(TOKENS, STREAMS * HIDDEN), unit_norm()
    streams, stream = value.view(1, TOKENS, STREAMS, HIDDEN), HyperStream(value.clone())
    for module in modules:
        output, mixing, collapsed = module(streams)
        streams = output[..., None] * sublayer(norm.norm(collapsed))[:, :, None] + mixing.mT @ streams
        stream.add(sublayer(HyperNormed(connection_of(module), norm, stream).tensor()))
    assert torch.allclose(stream.read().view(TOKENS, STREAMS, HIDDEN), streams[0], atol=1e-5)
    head = ours_of(HyperHead(SIZES), last.hc_fn, last.hc_base, last.hc_scale)
    assert torch.allclose(head(stream.read()), last(streams)[0], atol=1e-5)


def test_the_mixing_matrix_keeps_the_sum_of_the_streams(config):
    connection = connection_of(filled(theirs.DeepseekV4HyperConnection(config)))
    connection.sizes = SIZES._replace(iterations=40, eps=1e-6)
    _, mixing = connection(torch.randn(TOKENS, STREAMS * HIDDEN))
    assert torch.allclose(mixing.streams.sum(1), torch.ones(TOKENS, STREAMS), atol=1e-2)
    assert torch.allclose(mixing.streams.sum(2), torch.ones(TOKENS, STREAMS), atol=1e-2)


def test_rows_that_are_kept_go_on_alone(config):
    connection = connection_of(filled(theirs.DeepseekV4HyperConnection(config)))
    value, rows = torch.randn(TOKENS, STREAMS * HIDDEN), torch.tensor([3, 1])
    whole, kept = (HyperStream(value.clone()) for _ in range(2))
    whole.add(sublayer(HyperNormed(connection, unit_norm(), whole).tensor()))
    h = HyperNormed(connection, unit_norm(), kept)
    h.keep(rows)
    kept.add(sublayer(h.tensor()))
    assert len(kept) == len(rows)
    assert torch.allclose(kept.read(), whole.read()[rows], atol=1e-6)
