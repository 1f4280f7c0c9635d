"""Stacked experts and the router of models whose tokens choose experts, against loops."""

import inspect

import pytest
import torch
from torch.nn import functional as F

from deepspeed.moe.ep_experts import GroupedExperts, _run_experts_grouped_mm
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from gradients import gradients
from refusals import refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [0, 3])
def test_stacked_experts_equal_a_loop(dtype, padding):
    torch.manual_seed(1)
    experts = GroupedExperts(6, 10, 4).to(dtype)
    experts.init_weights(0.5)
    counts, results = torch.tensor([3, 0, 4, 2]), []
    x = torch.randn(9 + padding, 6, dtype=dtype, requires_grad=True)
    for grouped in (True, False):
        experts.use_grouped_mm = grouped
        out = experts(x, counts)
        assert out.shape == x.shape and not out[9:].any()
        results.append([out.detach(), *gradients(out.square().sum(), [x, *experts.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    plain = _run_experts_grouped_mm(experts.w1, experts.w2, None, x[:9], counts)
    torch.testing.assert_close(plain[:3], F.silu(x[:3] @ experts.w1[0].t()) @ experts.w2[0].t(), rtol=1e-5, atol=1e-5)
    experts.use_grouped_mm = True
    refused(ValueError, "4 experts and 5 rows: num_tokens_per_expert has 4 numbers, 9 in all", experts, x[:5], counts)


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("group_score_func", ["max", "top2_sum"])
@pytest.mark.parametrize("norm", [False, True])
def test_the_router_equals_a_loop(score_func, group_score_func, norm):
    torch.manual_seed(2)
    router = TokenChoiceTopKRouter(5, 8, 4, 2, 3, score_func, norm, 2.5, True, group_score_func)
    x, bias = torch.randn(12, 5), torch.randn(8) * 0.3
    scores, experts, counts = router(x, bias)
    logits = x @ router.gate.weight.t() + router.gate.bias
    all_scores = torch.sigmoid(logits) if score_func == "sigmoid" else torch.softmax(logits, 1)
    for t in range(len(x)):
        choice = (all_scores[t] + bias).tolist()
        groups = [sorted(choice[2 * g : 2 * g + 2]) for g in range(4)]
        value = [group[-1] if group_score_func == "max" else sum(group) for group in groups]
        open_groups = sorted(range(4), key=lambda g: -value[g])[:2]
        ranked = sorted((e for g in open_groups for e in (2 * g, 2 * g + 1)), key=lambda e: -choice[e])[:3]
        assert experts[t].tolist() == ranked
        want = all_scores[t][ranked]
        torch.testing.assert_close(scores[t], (want / want.sum() if norm else want) * 2.5)
    assert counts.tolist() == [int((experts == e).sum()) for e in range(8)]
    assert all(len(part) == len(x) or len(part) == 8 for part in router(x))


@pytest.mark.parametrize(
    "given, text",
    [
        ({"score_func": "tanh"}, "score_func='tanh'"),
        ({"top_k": 9}, "top_k=9"),
        ({"num_limited_groups": None}, "num_limited_groups must be set"),
        ({"num_expert_groups": 3}, r"num_experts \(8\) must be divisible by num_expert_groups \(3\)"),
        ({"num_limited_groups": 1}, "leave too few for top_k=3"),
        ({"num_expert_groups": 8, "num_limited_groups": 4}, "at least two experts"),
        ({"group_score_func": "min"}, "group_score_func='min'"),
    ],
)
def test_what_does_not_fit(given, text):
    plain = {
        "dim": 5, "num_experts": 8, "num_expert_groups": 4, "num_limited_groups": 2, "top_k": 3,
        "score_func": "softmax", "route_norm": True, "route_scale": 1.0, "gate_bias": False,
    }  # fmt: skip
    refused(ValueError, text, TokenChoiceTopKRouter, **{**plain, **given})


def test_published_signatures():
    assert str(inspect.signature(GroupedExperts)) == (
        "(dim, hidden_dim, num_experts, use_grouped_mm=True, disable_triton_grouped_mm=False)"
    )
    assert str(inspect.signature(GroupedExperts.forward)) == "(self, x, num_tokens_per_expert)"
    assert str(inspect.signature(TokenChoiceTopKRouter)) == (
        "(dim, num_experts, num_expert_groups, num_limited_groups, top_k, score_func, route_norm, route_scale, "
        "gate_bias, group_score_func='top2_sum')"
    )
    assert str(inspect.signature(TokenChoiceTopKRouter.forward)) == "(self, x, expert_bias=None)"
