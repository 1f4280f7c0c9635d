"""A backward in two halves gives what one gives, whatever the graph looks like."""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed import _native
from deepspeed.activation_checkpointing import checkpointing
from gradients import gradients

WIDTH = 5


class Double(torch.autograd.Function):
    """A user's function of an activation and a weight; counts its backwards."""

    runs = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        Double.runs += 1
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.free = nn.Parameter(torch.randn(WIDTH))
        if kind == "frozen":
            for one in (*self.one.parameters(), self.three.weight):
                one.requires_grad_(False)

    def block(self, x):
        return torch.tanh(self.two(torch.tanh(self.one(x))))

    def forward(self, x):
        return KINDS[self.kind](self, x)


def whole_block(net, x):
    return net.three(net.block(x))


def twice(net, x):
    x = net.one(torch.tanh(net.one(x))) + (net.one.weight * 0.1).sum()
    return net.three(torch.tanh(x)) @ (net.one.weight * net.three.weight)


def function(net, x):
    shared = net.two.weight * 2  # below the function, and below one of autograd's
    return torch.tanh(Double.apply(torch.tanh(net.one(x)), shared)) @ shared + net.three(x)


def hook(net, x):
    hidden = net.one(x)
    hidden.register_hook(lambda grad: grad * 3)
    return net.two(torch.tanh(hidden))


KINDS = {
    "plain": whole_block,
    "twice": twice,
    "frozen": whole_block,
    "function": function,
    "hook": hook,
    "reentrant": lambda net, x: net.three(checkpointing.checkpoint(net.block, x)),
    "recomputed": lambda net, x: net.three(torch_checkpoint(net.block, x, use_reentrant=False)),
    "ours recomputed": lambda net, x: net.three(checkpointing.non_reentrant_checkpoint(net.block, x)),
    "several": lambda net, x: (net.one(x), (net.two(x).sum() + net.free).exp(), net.free * 2, x * 3),
    "input": lambda net, x: (x, net.one(x)),
}


def outcome(model, x, halves):
    model = copy.deepcopy(model)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    outputs = model(x)
    outputs = [one for one in (outputs if isinstance(outputs, tuple) else (outputs,)) if one.requires_grad]
    grads = [torch.cos(torch.arange(one.numel()).float()).view_as(one) for one in outputs]
    fires = collections.Counter()
    for name, one in model.named_parameters():
        if one.requires_grad:
            one.register_hook(lambda grad, name=name: fires.update([name]))
    Double.runs = 0
    early = None
    if halves:
        split = _native._C.SplitBackward(outputs, grads, [x] if x.requires_grad else [])
        split.run_inputs()
        early = {name for name, one in model.named_parameters() if one.grad is not None}
        kept = x.grad.clone() if x.grad is not None else None
        split.run_weights()
        assert kept is None or torch.equal(kept, x.grad)
    else:
        torch.autograd.backward(outputs, grads)
    return {name: one.grad for name, one in model.named_parameters()}, x.grad, fires, Double.runs, early


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_whole_backward(kind, wants):
    if kind == "reentrant" and not wants:
        pytest.skip("a re-entrant checkpoint hangs its gradients on those of its inputs")
    torch.manual_seed(1)
    model, x = Model(kind), torch.randn(4, WIDTH)
    x.requires_grad_(wants)
    grads, input_grad, *rest, _ = outcome(model, x, False)
    found, found_input, *found_rest, early = outcome(model, x, True)
    assert (input_grad is not None) == (found_input is not None) == wants
    if wants:
        assert torch.allclose(found_input, input_grad, rtol=1e-6)
    for name, grad in grads.items():
        assert grad is found[name] is None or torch.allclose(found[name], grad, rtol=1e-6, atol=1e-6), name
    assert found_rest == rest  # each weight fires once, and a user's function runs once
    # Nobody's time goes into weights in the first half.
    early_ones = {"function": [{"two.weight"}], "plain": [set()]}.get(kind, [early]) if wants else [set()]
    assert early in early_ones and (kind != "hook" or {"two.weight", "one.weight"} - early)


@pytest.mark.parametrize("checkpoint, runs", [(checkpointing.split_checkpoint, 2), (checkpointing.checkpoint, 2)])
def test_recomputes_once(checkpoint, runs):
    torch.manual_seed(1)
    one, two, x = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
    seen = []

    def segment(y):
        seen.append(1)
        return torch.tanh(two(torch.tanh(one(y))))

    leaves = [one.weight, two.weight, x]
    wanted = gradients(segment(x).sum(), leaves)
    one.weight.grad = two.weight.grad = x.grad = None
    seen.clear()
    out = checkpoint(segment, x * 1)
    split = _native._C.SplitBackward([out], [torch.ones_like(out)], [x])
    split.run_inputs()
    splits = checkpoint is checkpointing.split_checkpoint
    assert (one.weight.grad is None) == splits and split.nothing_left == (not splits)
    split.run_weights()
    assert len(seen) == runs
    assert all(torch.equal(grad, leaf.grad) for grad, leaf in zip(wanted, leaves))
