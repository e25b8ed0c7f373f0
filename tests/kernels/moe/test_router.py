"""Routers against transformers' own, and choices that stay valid."""

import pytest
import torch
from phalanx.kernels.moe.router import RouterParams, route
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter


def check(x, weight, bias, params, ids, weights):
    got_ids, got_weights = route(x, weight, bias, params)
    assert (got_ids.dtype, got_weights.dtype) == (torch.int32, torch.float32)
    order, want = got_ids.long().argsort(-1), ids.argsort(-1)
    assert torch.equal(got_ids.long().gather(1, order), ids.gather(1, want))
    torch.testing.assert_close(got_weights.gather(1, order), weights.gather(1, want), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("experts, k", [(12, 3), (128, 8), (5, 5)])
@pytest.mark.parametrize("normalise", [False, True])
def test_softmax(experts, k, normalise):
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=24, num_experts=experts, num_experts_per_tok=k, norm_topk_prob=normalise
    )
    router, x = Qwen3MoeTopKRouter(config), torch.randn(9, 24)
    torch.nn.init.normal_(router.weight)
    _, weights, ids = router(x)
    check(x, router.weight, None, RouterParams(k, normalise=normalise), ids, weights)


def test_mixtral():
    config = AutoConfig.for_model("mixtral", hidden_size=24, num_local_experts=6, num_experts_per_tok=2)
    router, x = MixtralTopKRouter(config), torch.randn(9, 24)
    torch.nn.init.normal_(router.weight)
    _, weights, ids = router(x)
    check(x, router.weight, None, RouterParams(2), ids, weights)


def test_no_token():
    ids, weights = route(torch.empty(0, 8), torch.randn(4, 8), None, RouterParams(2))
    assert ids.shape == weights.shape == (0, 2)
