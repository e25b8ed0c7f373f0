"""Routers against transformers' own, and choices that stay valid."""

import pytest
import torch
from phalanx.kernels.moe import router
from phalanx.kernels.moe.router import RouterParams, route, route_reference, supports_groups
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ..programs import V2_ROUTER, V3_ROUTER
from .warp import run_warp


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


def test_gpt_oss():
    """A bias on the logits, and a softmax over those that are chosen."""
    config = AutoConfig.for_model("gpt_oss", hidden_size=24, num_local_experts=10, num_experts_per_tok=3)
    router, x = GptOssTopKRouter(config), torch.randn(9, 24)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.bias)
    _, weights, ids = router(x)
    check(x, router.weight, router.bias, RouterParams(3, biased=True), ids, weights)


def test_no_token():
    ids, weights = route(torch.empty(0, 8), torch.randn(4, 8), None, RouterParams(2))
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize("groups, top_groups", [(1, 1), (8, 4), (4, 1)])
@pytest.mark.parametrize("normalise", [False, True])
def test_deepseek_v3(groups, top_groups, normalise):
    """Sigmoids, a bias for the choice alone, and the groups whose best two are the best."""
    config = AutoConfig.for_model(
        "deepseek_v3", hidden_size=24, n_routed_experts=32, num_experts_per_tok=6, n_group=groups,
        topk_group=top_groups, norm_topk_prob=normalise, routed_scaling_factor=2.5,
    )  # fmt: skip
    router, x = DeepseekV3TopkRouter(config), torch.randn(40, 24)
    torch.nn.init.normal_(router.weight, 0, 0.1)
    torch.nn.init.normal_(router.e_score_correction_bias, 0, 0.2)
    _, weights, ids = router(x)
    params = RouterParams(
        6, "sigmoid", corrected=True, normalise=normalise, scale=2.5, groups=groups, top_groups=top_groups
    )
    check(x, router.weight, router.e_score_correction_bias, params, ids, weights)


@pytest.mark.parametrize("groups, top_groups, top_k", [(8, 3, 6), (4, 1, 3), (1, 1, 6)])
def test_deepseek_v2(groups, top_groups, top_k):
    """A softmax, and the groups whose best expert is the best."""
    config = AutoConfig.for_model(
        "deepseek_v2", hidden_size=24, num_attention_heads=2, n_routed_experts=32, num_experts_per_tok=top_k,
        n_group=groups, topk_group=top_groups, topk_method="group_limited_greedy", routed_scaling_factor=16.0,
    )  # fmt: skip
    router, x = DeepseekV2TopkRouter(config), torch.randn(40, 24)
    torch.nn.init.normal_(router.weight, 0, 0.3)
    _, weights, ids = router(x)
    params = RouterParams(top_k, normalise=False, scale=16.0, groups=groups, top_groups=top_groups, group_top=1)
    check(x, router.weight, None, params, ids, weights)


def test_which_groups_the_kernel_takes():
    sigmoid, softmax = (RouterParams(6, scoring, groups=8, top_groups=3) for scoring in ("sigmoid", "softmax"))
    assert supports_groups(sigmoid) and supports_groups(RouterParams(6)) and not supports_groups(softmax)
    assert supports_groups(softmax._replace(group_top=1)) and not supports_groups(sigmoid._replace(group_top=3))
    assert not supports_groups(sigmoid._replace(groups=64))


@pytest.mark.parametrize("experts, params", [
    (256, V3_ROUTER), (160, V2_ROUTER), (24, V3_ROUTER._replace(top_k=4)), (60, RouterParams(7)),
    (1000, V3_ROUTER._replace(top_k=32, normalise=False)), (40, V2_ROUTER._replace(top_groups=8)),
])  # fmt: skip
def test_what_a_warp_chooses(experts, params, tmp_path):
    """choose_experts of router.cu on a CPU, as 32 lanes in lockstep."""
    logits, bias = torch.randn(20, experts), torch.randn(experts) / 3 if params.corrected else None
    logits[1] = float("nan")
    logits[2, ::3] = float("nan")
    ids, weights = torch.zeros(20, params.top_k, dtype=torch.int32), torch.zeros(20, params.top_k)
    run_warp(router.sizes(1, experts, 8, params, bias is not None), logits, bias, ids, weights, params.scale, tmp_path)
    assert ((ids >= 0) & (ids < experts)).all() and all(len(set(row)) == params.top_k for row in ids.tolist())
    eye, good = torch.eye(experts), [0, *range(3, 20)]
    want_ids, want = route_reference(logits[good], eye, bias, params)
    assert torch.equal(ids[good], want_ids)
    torch.testing.assert_close(weights[good], want)


def test_blocks_of_a_router():
    """Each token and expert has one; a step with no tokens launches none."""
    assert router.blocks(0, 128) == (1, (16, 0, 1))
    assert router.blocks(1, 60) == (1, (8, 1, 1))
    assert router.blocks(3, 128) == (4, (16, 1, 1))
    assert router.blocks(64, 60) == (8, (4, 8, 1))
    assert router.blocks(65, 257) == (8, (17, 9, 1))


@pytest.mark.parametrize("tokens", [9, 100])  # C++'s, and torch's
def test_weights_of_a_bf16_model_are_not_rounded(tokens):
    """Matrix and tokens have the model's dtype, as transformers' have; scores and weights are f32 from there on."""
    x, weight = torch.randn(tokens, 64).bfloat16(), torch.randn(12, 64).bfloat16()
    scores = (x.double() @ weight.double().T).softmax(-1)
    want, ids = scores.topk(4, -1)
    check(x, weight, None, RouterParams(4), ids, (want / want.sum(-1, keepdim=True)).float())
