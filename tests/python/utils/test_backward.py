"""Questions to a running backward pass, and hooks on outputs."""

import torch

from deepspeed.runtime.utils import count_used_parameters_in_backward, register_output_backward_hooks
from refusals import refused


def test_count_used_parameters():
    used, unused, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    counts = []
    loss = (used * 2 + frozen).sum()
    loss.register_hook(lambda grad: counts.append(count_used_parameters_in_backward([used, unused, frozen])))
    loss.backward(retain_graph=True)
    loss.backward()
    assert counts == [1, 1]
    refused(RuntimeError, "call it from a hook", count_used_parameters_in_backward, [used])


def outputs():
    x = torch.ones(3, requires_grad=True)
    return x, {"a": x * 2, "b": [x * 3, (torch.ones(1), "text")]}


def test_once_per_backward_and_every_gradient():
    x, out = outputs()
    calls, grads = [], []

    def per_tensor(grad):
        grads.append(grad.sum().item())
        return grad * 10

    hooks = register_output_backward_hooks(out, lambda: calls.append(1), per_tensor)
    loss = (out["a"] + out["b"][0]).sum()
    loss.backward(retain_graph=True)
    assert calls == [1] and grads == [3.0, 3.0] and x.grad.tolist() == [50.0] * 3
    loss.backward(retain_graph=True)
    assert calls == [1, 1], "once for each pass"
    hooks.remove()
    loss.backward()
    assert calls == [1, 1] and x.grad.tolist() == [105.0] * 3


def test_gradients_stay_without_a_function_for_them():
    x, out = outputs()
    calls = []
    register_output_backward_hooks(out["a"], lambda: calls.append(1))
    out["a"].sum().backward()
    assert calls == [1] and x.grad.tolist() == [2.0] * 3


def test_a_backward_that_failed_does_not_hide_the_next():
    x, out = outputs()
    calls, fail = [], [True]

    def stop(grad):
        if fail[0]:
            raise ValueError("half-way")

    x.register_hook(stop)
    register_output_backward_hooks(out["a"], lambda: calls.append(1))
    loss = out["a"].sum()
    refused(ValueError, "half-way", loss.backward, retain_graph=True)
    fail[0] = False
    loss.backward()
    assert calls == [1, 1]
