"""The layer in one process: its parts and names, any module as expert, groups of parameters, what is refused."""

import copy
import inspect

import pytest
import torch

from deepspeed.moe import sharded_moe
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from gradients import gradients
from refusals import refused


def mlp(width=8, inner=16, last=None):
    return torch.nn.Sequential(torch.nn.Linear(width, inner), torch.nn.GELU(), torch.nn.Linear(inner, last or width))


def test_published_constructor_and_names():
    assert str(inspect.signature(MoE)) == (
        "(hidden_size, expert, num_experts=1, ep_size=1, k=1, capacity_factor=1.0, eval_capacity_factor=1.0, "
        "min_capacity=4, use_residual=False, noisy_gate_policy=None, drop_tokens=True, use_rts=True, use_tutel=False, "
        "enable_expert_tensor_parallelism=False, top2_2nd_expert_sampling=True, balance='aux', aux_scope='rank', "
        "z_loss_coeff=0.0)"
    )
    assert str(inspect.signature(MoE.forward)) == "(self, hidden_states, used_token=None)"
    assert str(inspect.signature(MoE.set_deepspeed_parallelism)) == "(self, use_data_before_expert_parallel_=False)"
    layer = MoE(8, mlp(), num_experts=[2], use_residual=True)
    assert (layer.num_experts, layer.num_local_experts, layer.ep_size) == (2, 2, 1)
    assert sorted(dict(layer.named_parameters())) == [
        "coefficient.bias", "coefficient.weight",
        "deepspeed_moe.experts.deepspeed_experts.0.0.bias", "deepspeed_moe.experts.deepspeed_experts.0.0.weight",
        "deepspeed_moe.experts.deepspeed_experts.0.2.bias", "deepspeed_moe.experts.deepspeed_experts.0.2.weight",
        "deepspeed_moe.experts.deepspeed_experts.1.0.bias", "deepspeed_moe.experts.deepspeed_experts.1.0.weight",
        "deepspeed_moe.experts.deepspeed_experts.1.2.bias", "deepspeed_moe.experts.deepspeed_experts.1.2.weight",
        "deepspeed_moe.gate.wg.weight", "mlp.0.bias", "mlp.0.weight", "mlp.2.bias", "mlp.2.weight",
    ]  # fmt: skip
    output, loss, counts = layer(torch.randn(3, 5, 8))
    assert output.shape == (3, 5, 8) and loss.dim() == 0 and int(counts.sum()) == 15


class Odd(torch.nn.Module):
    """Experts that cannot be grouped: a norm, a branch on values, a parameter outside of a linear layer, a tuple as
    result."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = self.norm(x)
        return self.linear(x.abs() if x.sum() > 1e9 else x) * self.scale, None


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate = torch.nn.Linear(8, 12, bias=False), torch.nn.Linear(8, 12, bias=False)
        self.down = torch.nn.Linear(12, 8)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make, grouped", [(mlp, True), (Gated, True), (Odd, False)])
def test_rows_run_through_their_experts(make, grouped, dtype):
    torch.manual_seed(3)
    experts = Experts(make(), 4, "ep_size_1").to(dtype)
    assert (experts._steps is not None) is grouped
    for number, param in enumerate(experts.parameters()):
        torch.nn.init.normal_(param, std=0.3 + 0.01 * number)
    rows, x = [3, 0, 5, 1], torch.randn(9, 8, dtype=dtype, requires_grad=True)
    y = experts(x, rows)
    leaves = [x, *experts.parameters()]
    got = [y, *gradients(y.square().sum(), leaves)]
    parts = [experts.deepspeed_experts[e](part) for e, part in enumerate(x.split(rows))]
    want = torch.cat([part[0] if isinstance(part, tuple) else part for part in parts])
    bound = {"rtol": 5e-2, "atol": 0.2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, [want, *gradients(want.square().sum(), leaves)], **bound)
    assert all(not p.grad.any() for p in experts.deepspeed_experts[1].parameters())  # no rows: zero, not none


def test_layers_can_be_copied_and_pickled(tmp_path):
    layer = MoE(8, Gated(), 4, k=2, drop_tokens=False).eval()
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", **({"weights_only": False} if torch.__version__ >= "2" else {}))
    x = torch.randn(5, 8)
    for other in (copy.deepcopy(layer), loaded):
        assert torch.equal(other(x)[0], layer(x)[0]) and other.deepspeed_moe.experts._steps is not None


def test_frozen_weights_and_hooks_on_experts():
    experts = Experts(mlp(), 3, "ep_size_1")
    experts.deepspeed_experts[1][0].weight.requires_grad_(False)
    experts(torch.randn(6, 8, requires_grad=True), [2, 2, 2]).sum().backward()
    assert [p.grad is None for p in experts.deepspeed_experts[1].parameters()] == [True, False, False, False]
    seen = []
    experts.deepspeed_experts[2][0].register_forward_hook(lambda module, given, result: seen.append(len(result)))
    experts(torch.randn(6, 8), [1, 2, 3])
    assert seen == [3]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_keeping_all_equals_capacity_for_all(k):
    torch.manual_seed(k)
    keep = MoE(8, mlp(), 4, k=k, drop_tokens=False).eval()
    some = MoE(8, mlp(), 4, k=k, eval_capacity_factor=4.0).eval()
    some.load_state_dict(keep.state_dict())
    x = torch.randn(11, 8, requires_grad=True)
    results = []
    for layer in (keep, some):
        out, loss, _ = layer(x)
        results.append([out, *gradients(out.square().sum() + loss, [x, *layer.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_half_precision_in_and_out():
    out, loss, _ = MoE(8, mlp(), 4, k=2, drop_tokens=False).bfloat16()(torch.randn(5, 8).bfloat16())
    assert out.dtype == torch.bfloat16 and loss.dtype == torch.float32
    (out.float().sum() + loss).backward()


def test_autocast_runs_experts_in_its_dtype():
    layer, seen = MoE(8, mlp(), 4, k=2, drop_tokens=False), []
    layer.deepspeed_moe.experts.register_forward_hook(lambda module, given, result: seen.append(result.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, loss, _ = layer(torch.randn(5, 8))
    (out.float().sum() + loss).backward()
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32


@pytest.mark.parametrize("drop", [False, True])
def test_recomputation_keeps_routes(drop):
    torch.manual_seed(0)
    layer = MoE(8, mlp(), 4, k=1, capacity_factor=0.5, min_capacity=1, noisy_gate_policy="RSample", drop_tokens=drop)
    x = torch.randn(16, 8, requires_grad=True)
    results = []
    for recompute in (False, True):
        torch.manual_seed(5)
        out = torch.utils.checkpoint.checkpoint(lambda y: layer(y)[0], x) if recompute else layer(x)[0]
        torch.rand(3)
        results.append(gradients(out.square().sum(), [x, *layer.parameters()]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("drop", [False, True])
def test_a_loss_that_nobody_hands_on(drop):
    layer, x = MoE(8, mlp(), 4, k=2, drop_tokens=drop, top2_2nd_expert_sampling=False), torch.randn(6, 8)
    out, loss, _ = layer(x)
    want = gradients(out.square().sum() + 0.3 * loss, [*layer.parameters()])
    layer.deepspeed_moe.loss_scale = lambda: 0.3
    torch.testing.assert_close(gradients(layer(x)[0].square().sum(), [*layer.parameters()]), want)


def test_the_padded_exchange_can_be_replaced(monkeypatch):
    calls = []

    class Seen(sharded_moe._AllToAll):
        @staticmethod
        def apply(group, rows):
            calls.append(tuple(rows.shape))
            return rows

    monkeypatch.setattr(sharded_moe, "_AllToAll", Seen)
    MoE(8, mlp(), 4, min_capacity=3)(torch.randn(8, 8))
    assert calls == [(4, 3, 8), (1, 4, 3, 8)]


def test_a_gate_of_somebody_elses():
    class Half(torch.nn.Module):
        def forward(self, tokens, used=None):
            combine = torch.zeros(len(tokens), 2, len(tokens))
            combine[range(len(tokens)), [t % 2 for t in range(len(tokens))], range(len(tokens))] = 0.5
            return torch.tensor(3.0), combine, combine.bool(), torch.tensor([2, 2])

    experts = Experts(mlp(), 2)
    layer = MOELayer(Half(), experts, "ep_size_1", 1, 2)
    x = torch.randn(4, 8)
    torch.testing.assert_close(layer(x), torch.stack([0.5 * experts.deepspeed_experts[t % 2](x[t]) for t in range(4)]))
    assert float(layer.l_aux) == 3 and layer.exp_counts.tolist() == [2, 2]


def test_experts_parameters_and_groups():
    model = torch.nn.ModuleDict({"a": MoE(8, mlp(), 2), "b": torch.nn.Linear(8, 8)})
    assert has_moe_layers(model) == (True, 2) and has_moe_layers(model["b"]) == (False, 0)
    experts = [p for n, p in model.named_parameters() if "experts" in n]
    shared, split = split_params_into_shared_and_expert_params(model.parameters())
    assert [id(p) for p in split] == [id(p) for p in experts] and all(map(is_moe_param, experts))
    assert not any(map(is_moe_param, shared)) and experts[0].group_name == "ep_size_1"
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "lr": 0.5})
    assert [sorted(group) for group in groups] == [["lr", "params"], ["lr", "moe", "name", "params"]]
    assert groups[1]["name"] == "ep_size_1" and is_moe_param_group(groups[1]) and not is_moe_param_group(groups[0])
    assert len(groups[0]["params"]) == len(shared) and len(groups[1]["params"]) == len(experts)
    small = split_params_into_different_moe_groups_for_optimizer(
        ({"params": list(model.parameters()), "name": "all"},), max_group_size=150
    )
    assert [sum(p.numel() for p in group["params"]) for group in small[1:]] == [144, 136, 144, 136]
    assert len(configure_moe_param_groups(list(model.parameters()))) == 2
    refused(
        ValueError,
        "Unknown param group type of <class 'set'>",
        split_params_into_different_moe_groups_for_optimizer,
        set(),
    )
    model["a"](torch.randn(4, 8))[0].sum().backward()
    shared_grads, expert_grads = split_params_grads_into_shared_and_expert_params(list(model.parameters()))
    assert len(shared_grads) == 1 and len(expert_grads) == len(experts)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"num_experts": 3, "ep_size": 2}, r"of experts \(3\) should be divisible by expert parallel size \(2\)"),
        ({"num_experts": 2, "k": 3}, "k=3: a token goes to at least one and at most all num_experts=2 experts"),
        ({"num_experts": [2, 4]}, "one number for one layer"),
        ({"num_experts": 2, "noisy_gate_policy": "Wind"}, "Unsupported noisy_gate_policy: Wind"),
    ],
)
@pytest.mark.parametrize("kind", [ValueError, AssertionError])
def test_sizes_that_do_not_fit(given, text, kind):
    refused(kind, text, MoE, 8, mlp(), **given)


def test_what_goes_wrong_names_the_layer():
    layer = MoE(8, mlp(last=7), 2, drop_tokens=False)
    layer.deepspeed_moe.set_name("blocks.3.moe")
    refused(ValueError, r"MoE layer 'blocks.3.moe': expert 0 .* \[4, 7\] of \[4, 8\]", layer, torch.randn(4, 8))
    layer = MoE(8, mlp(), 2)
    layer.deepspeed_moe.set_name("blocks.3.moe")
    x = torch.randn(4, 8)
    x[1, 2] = float("nan")
    refused(ValueError, "MoE layer 'blocks.3.moe': rank 0: the logits of token 1 are not numbers", layer, x)
    refused(
        ValueError,
        "ep_size=2, and no groups: deepspeed.initialize makes them",
        MoE(8, mlp(), 2, ep_size=2),
        torch.randn(4, 8),
    )
