"""Gates: who goes where, with which weight; what an expert keeps; the published functions' results."""

import inspect
import math
from unittest import mock

import pytest
import torch

from deepspeed import _native
from deepspeed.moe import sharded_moe
from deepspeed.moe.device_plan import DevicePlan
from deepspeed.moe.gating import route_top1, route_topk
from deepspeed.moe.routes import capacity_of
from deepspeed.moe.sharded_moe import MOELayer, TopKGate, top1gating, top2gating, topkgating
from refusals import refused

LOGITS = torch.tensor([[0.11, 0.2, 0.1, 0.3], [0.3, 0.4, 0.11, 0.1], [0.11, 0.1, 0.6, 0.5], [0.1, 0.11, 0.7, 0.8]])


def places(result):
    return result[2].nonzero().tolist()


def test_k_experts_keep_the_most_likely_or_the_first():
    assert places(topkgating(LOGITS, 2, 1, min_capacity=1)) == [
        [0, 1, 0], [1, 0, 0], [1, 1, 1], [2, 2, 0], [2, 3, 0], [3, 2, 1], [3, 3, 1],
    ]  # fmt: skip
    assert places(topkgating(LOGITS, 2, 1, min_capacity=1, drop_policy="position")) == [
        [0, 1, 0], [0, 3, 0], [1, 0, 0], [1, 1, 1], [2, 2, 0], [2, 3, 1], [3, 2, 1],
    ]  # fmt: skip
    refused(ValueError, "Invalid drop_policy: luck", topkgating, LOGITS, 2, 1, 1, drop_policy="luck")


def test_weights_of_kept_choices_add_up_to_one():
    for result in (topkgating(LOGITS, 3, 1, 1), top2gating(LOGITS, 1, 1, top2_2nd_expert_sampling=False)):
        kept = result[2].any(dim=(1)).any(dim=1) if result[2].dim() == 3 else None
        torch.testing.assert_close(result[1].sum((1, 2))[kept], torch.ones(int(kept.sum())))
    first = top1gating(LOGITS, 4, 1, use_rts=False)
    torch.testing.assert_close(first[1].sum((1, 2)), torch.softmax(LOGITS, 1).max(1)[0])


def test_counts_are_those_before_dropping():
    logits = torch.zeros(10, 3)
    logits[:, 1] = 1.0
    loss, combine, dispatch, counts = top1gating(logits, 0.6, 1)
    assert counts.tolist() == [0, 10, 0] and counts.dtype == torch.int64
    assert combine.shape == dispatch.shape == (10, 3, 2) and dispatch.dtype == torch.bool and int(dispatch.sum()) == 2
    torch.testing.assert_close(loss, torch.softmax(logits, 1)[:, 1].mean() * 3)


def test_the_auxiliary_loss_is_the_published_one():
    logits = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    probs = torch.softmax(logits, 1)
    for k in (1, 2, 3):
        chosen = logits.topk(k, 1)[1]
        share = torch.zeros(40, 5).scatter(1, chosen if k > 2 else chosen[:, :1], 1.0).mean(0)
        want = (probs.mean(0) * share).sum() * 5 / (k if k > 2 else 1)
        got = {1: top1gating, 2: top2gating, 3: lambda *a: topkgating(a[0], 3, *a[1:])}[k](logits, 1, 1)
        torch.testing.assert_close(got[0], want)
    torch.testing.assert_close(top1gating(torch.eye(4) * 50, 1, 1)[0], torch.tensor(1.0))  # uniform: the minimum


def test_gradients_of_a_gate():
    logits = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).float()
    plain, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.softmax(plain, 1)
    chosen = plain.topk(3, 1)[1]
    picked = weights.gather(1, chosen)
    loss = weights.mean(0) @ torch.zeros(7, 4).scatter(1, chosen, 1.0).mean(0) * 4 / 3
    ((picked / picked.sum(1, keepdim=True)).square().sum() + loss).backward()
    routes = route_topk(ours, 3, 1, 1, drop=False)
    (routes.weights().square().sum() + routes.l_aux).backward()
    torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize(
    "tokens, experts, factor, least, want",
    [(100, 10, 1.1, 1, 11), (10, 4, 1.0, 4, 4), (10, 4, 1.0, 0, 3), (9, 4, 1.25, 1, 3), (0, 4, 2.0, 0, 0)],
)
def test_capacity_is_exact(tokens, experts, factor, least, want):
    assert capacity_of(tokens, experts, factor, least) == want
    assert int(sharded_moe._capacity(torch.zeros(tokens, experts), torch.tensor(factor), torch.tensor(least))) == want


def test_kept_tokens_are_drawn_uniformly_in_training():
    logits = torch.zeros(20, 2)
    logits[:, 0] = 1.0
    times = torch.zeros(20)
    for seed in range(600):
        torch.manual_seed(seed)
        times += (route_top1(logits, 0.5, 1).locations()[:, 0] >= 0).float()
    assert times.sum() == 600 * 5
    assert times.min() > 150 * 0.7 and times.max() < 150 * 1.3  # 150 +- 4 standard deviations of 10.6
    first = route_top1(logits, 0.5, 1, random=False).locations()[:, 0] >= 0
    assert first.nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("k, policy", [(1, "RSample"), (1, "Jitter"), (2, "RSample"), (2, None), (3, "Jitter")])
def test_noise_belongs_to_training(k, policy):
    gate = TopKGate(6, 5, k, 0.5, 0.5, 1, noisy_gate_policy=policy)
    x = torch.randn(30, 6)

    def ways():
        return [gate.route(x).weights().tolist() for _ in range(4)]

    assert any(one != other for one, other in zip(ways(), ways(), strict=True))
    gate.eval()
    assert ways() == [ways()[0]] * 4


def test_factors_of_training_and_evaluation():
    gate = TopKGate(6, 4, 1, 1.0, 2.0, 1)
    assert gate.route(torch.randn(8, 6)).capacity == 2 and gate.eval().route(torch.randn(8, 6)).capacity == 4
    loss, combine, dispatch, counts = gate(torch.randn(8, 6))
    assert combine.shape == (8, 4, 4)


@pytest.mark.parametrize("choices_first", [False, True])
@pytest.mark.parametrize("by_priority", [False, True])
@pytest.mark.parametrize("tokens, experts, k, capacity", [(1, 1, 1, 1), (17, 5, 2, 3), (64, 7, 3, 40), (33, 4, 4, 1)])
def test_plans_of_devices_are_those_of_the_host(tokens, experts, k, capacity, by_priority, choices_first):
    random = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=random).topk(k, 1)[1].to(torch.int32)
    chosen[::5] = -1
    priority = torch.randint(0, 4, (tokens, k), generator=random).float() if by_priority else None
    given = (chosen, experts, capacity, choices_first, priority)
    ours, host = DevicePlan(*given), _native._C.RoutePlan(*given)
    assert ours.wanted.tolist() == host.wanted and ours.kept.tolist() == host.kept
    assert torch.equal(ours.location(), host.location())
    for padded in (capacity, capacity + 2):
        assert torch.equal(ours.slots(padded), host.slots(padded))
        assert torch.equal(ours.sources(padded), host.sources(padded))


def test_unused_tokens_go_nowhere():
    used = torch.tensor([1.0, 0.0, 1.0, 0.0])
    for k in (1, 2, 3):
        routes = TopKGate(6, 4, k, 4, 4, 1).eval().route(torch.randn(4, 6), used)
        assert int(routes.exp_counts.sum()) == 2 * k
        assert (routes.weights().sum(1) > 0).tolist() == [True, False, True, False]
    assert top1gating(LOGITS, 4, 1, used_token=used)[3].sum() == 2


def test_the_gate_computes_in_fp32():
    gate = TopKGate(64, 8, 1, 4, 4, 1).bfloat16().eval()
    x = torch.randn(50, 64).bfloat16()
    want = torch.softmax(x.float() @ gate.wg.weight.float().t(), 1)
    torch.testing.assert_close(gate.route(x).probs, want, rtol=1e-5, atol=1e-6)


def test_no_tokens_at_all():
    routes = TopKGate(6, 4).route(torch.zeros(0, 6))
    assert float(routes.l_aux) == 0 and routes.exp_counts.tolist() == [0] * 4


def test_logits_that_are_no_numbers_name_the_token():
    logits = LOGITS.clone()
    logits[2, 1] = math.nan
    refused(ValueError, "the logits of token 2 are not numbers", top1gating, logits, 1, 1)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_sparse_routes_say_the_same_as_masks(k):
    gating = {1: top1gating, 2: top2gating, 3: lambda *a, **n: topkgating(a[0], 3, *a[1:], **n)}[k]
    quiet = {1: {"use_rts": False}, 2: {"top2_2nd_expert_sampling": False}, 3: {}}[k]
    logits, x = torch.randn(12, 4), torch.randn(12, 5)
    dense, sparse = gating(logits, 0.5, 1, **quiet), gating(logits, 0.5, 1, sparse_routes=True, **quiet)
    assert len(sparse) == 7 and [len(part) for part in sparse[3:6]] == [k] * 3
    slots = sharded_moe._route_slots(sparse[3], sparse[4], sparse[2], sparse[1])
    rows = sharded_moe._sparse_encode(x, slots, sparse[2], sparse[1])
    torch.testing.assert_close(rows, torch.einsum("sec,sm->ecm", dense[2].float(), x))
    back = sharded_moe._sparse_decode(rows * 2, slots, sparse[5], len(x))
    torch.testing.assert_close(back, torch.einsum("sec,ecm->sm", dense[1], rows * 2))


def test_published_signatures():
    def of(function):
        return str(inspect.signature(function))

    assert of(top1gating) == (
        "(logits, capacity_factor, min_capacity, used_token=None, noisy_gate_policy=None, drop_tokens=True, "
        "use_rts=True, ep_group=None, sparse_routes=False, use_tutel=False)"
    )
    assert of(top2gating) == (
        "(logits, capacity_factor, min_capacity, drop_tokens=True, ep_group=None, top2_2nd_expert_sampling=True, "
        "sparse_routes=False)"
    )
    assert of(topkgating) == (
        "(logits, k, capacity_factor, min_capacity, drop_tokens=True, ep_group=None, drop_policy='probs', "
        "sparse_routes=False)"
    )
    assert of(sharded_moe._route_slots) == "(indices, locations, num_experts, capacity)"
    assert of(sharded_moe._sparse_encode) == "(reshaped_input, slots, num_experts, capacity)"
    assert of(sharded_moe._sparse_decode) == "(expert_output, slots, gates, num_tokens)"
    assert of(sharded_moe._AllToAll.forward) == "(ctx, group, input)"
    assert sharded_moe.TUTEL_INSTALLED is False and issubclass(MOELayer, torch.nn.Module)


def test_a_group_of_one_rank_exchanges_nothing(monkeypatch):
    refuse = mock.Mock(side_effect=AssertionError("a collective of one rank"))
    monkeypatch.setattr("deepspeed.comm.all_reduce", refuse)
    monkeypatch.setattr("deepspeed.comm.all_to_all_single", refuse)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda group=None: 1)
    one, keep_all = object(), {"drop_tokens": False}
    assert topkgating(LOGITS, 2, 1, 1, ep_group=one, **keep_all)[1].shape[2] == 3
    top1gating(LOGITS, 1, 1, ep_group=one, **keep_all)
    top2gating(LOGITS, 1, 1, ep_group=one, top2_2nd_expert_sampling=False, **keep_all)
    torch.manual_seed(0)
    for drop_tokens in (False, True):
        layer = MOELayer(TopKGate(8, 4, k=2, drop_tokens=drop_tokens), Identity(), "one", 1, 4)
        layer._set_ep_group(one)
        tokens = torch.randn(6, 8)
        layer(tokens)
        layer.gate(tokens)


class Identity(torch.nn.Module):
    def forward(self, rows, *which):
        return rows
