"""Checkpointed segments against the same segments without checkpointing: bit for bit."""

import collections
import contextlib
import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import deepspeed
from deepspeed.activation_checkpointing.checkpointing import CheckpointFunction, checkpoint, non_reentrant_checkpoint
from deepspeed.activation_checkpointing.settings import thread
from gradients import gradients
from refusals import refused
from segments import assert_same, both, plainly


class Layer(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first = torch.nn.Linear(width, 4 * width)
        self.second = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + F.dropout(self.second(F.dropout(F.gelu(self.first(x)), 0.3, training=True)), 0.1, training=True)


def train(run, layers, x, use=lambda layer, x, run: run(layer, x)):
    """Loss, gradients and the next random number of one step, from a fixed seed."""
    layers = copy.deepcopy(layers)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    torch.manual_seed(3)
    hidden = x
    for layer in layers:
        hidden = use(layer, hidden, run)
    loss = hidden.square().sum()
    middle = torch.rand(2)
    loss.backward()
    after = torch.rand(2)
    grads = [p.grad for p in layers.parameters()] + ([x.grad] if x.requires_grad else [])
    return [loss, *grads, middle, after]


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return torch.nn.ModuleList(Layer() for _ in range(3))


@pytest.fixture
def x():
    return torch.randn(5, 16, requires_grad=True)


@pytest.mark.parametrize("needs_grad", [True, False])
@both
def test_gradients_and_random_numbers_are_those_of_the_plain_model(run, needs_grad, layers):
    x = torch.randn(5, 16, requires_grad=needs_grad)
    assert_same(train(run, layers, x), train(plainly, layers, x))


@both
def test_without_restored_random_numbers_dropout_differs(run, layers, x):
    reentrant = run is checkpoint

    def careless(layer, hidden, _):
        return checkpoint(layer, hidden, use_reentrant=reentrant, preserve_rng_state=False)

    got, expected = train(run, layers, x, careless), train(plainly, layers, x)
    assert torch.equal(got[0], expected[0]) and not torch.equal(got[1], expected[1])


@both
def test_token_ids_as_only_input_train_the_embedding(run):
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(7, 4)
    ids = torch.tensor([1, 2, 2])
    run(embedding, ids).square().sum().backward()
    got, embedding.weight.grad = embedding.weight.grad, None
    embedding(ids).square().sum().backward()
    assert torch.equal(got, embedding.weight.grad)


def test_a_frozen_segment_without_inputs_that_require_grad():
    frozen = torch.nn.Linear(3, 3).requires_grad_(False)
    head = torch.nn.Linear(3, 1)
    head(checkpoint(frozen, torch.randn(2, 3))).sum().backward()
    assert head.weight.grad is not None and frozen.weight.grad is None


Pair = collections.namedtuple("Pair", "left right")


def mixed(x, scale, pack, table=None, *, label):
    """Tensors in a named tuple and a dict, other objects, no tensor at all, and an integer tensor."""
    y = x * scale + pack.left * pack.right
    if table is not None:
        y = y + table["bias"][0]
    return y, {"label": label, "half": [y / 2, None]}, Pair(y.argmax(), 5), None, (label, 2.5)


@both
def test_arguments_and_results_of_any_structure(run):
    def results(call):
        torch.manual_seed(1)
        x, left, bias = (torch.randn(4, requires_grad=True) for _ in range(3))
        pack = Pair(left, torch.randn(4))
        if call is plainly:
            out = mixed(x, 2.0, pack, {"bias": [bias]}, label="a")
        else:
            out = checkpoint(mixed, x, 2.0, pack, {"bias": [bias]}, label="a", use_reentrant=call is checkpoint)
        (out[0].sum() + out[1]["half"][0].square().sum()).backward()
        return out, [x.grad, left.grad, bias.grad]

    (got, got_grads), (expected, expected_grads) = results(run), results(plainly)
    assert_same(got_grads, expected_grads)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1]["half"][0], expected[1]["half"][0])
    assert got[1]["label"] == "a" and got[1]["half"][1] is None
    assert isinstance(got[2], Pair) and torch.equal(got[2].left, expected[2].left) and got[2].right == 5
    assert got[3] is None and got[4] == ("a", 2.5)


@pytest.mark.parametrize("result", [None, 2, (None, 2.5), (None, True, torch.ones(3)), [1, 2]])
@both
def test_results_keep_type_and_order(run, result):
    weight = torch.ones(3, requires_grad=True)
    first, second = run(lambda w: (w * 2, result), weight)
    assert type(second) is type(result)
    if not isinstance(result, tuple) or len(result) < 3:
        assert second == result
    else:
        assert second[:2] == result[:2] and torch.equal(second[2], result[2])
    first.sum().backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0] and run(lambda w: "text", weight) == "text"


@both
def test_an_input_that_is_an_output_and_one_used_twice(run):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    same, product = run(lambda a, b: (a, a * b), x, x)
    (same * 3 + product).sum().backward()
    assert x.grad.tolist() == [3.0 + 2.0, 3.0 + 4.0]


@both
def test_results_that_were_there_before_stay_what_they_are(run):
    constant, buffer, weight = torch.ones(3), torch.arange(6.0)[:3], torch.nn.Parameter(torch.full((3,), 2.0))
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    for _ in range(2):
        x.grad = weight.grad = None
        out, *others = run(lambda v: (v * 5, constant, buffer, weight), x)
        sum((out, *others)).sum().backward()
        assert x.grad.tolist() == [5.0] * 3 and weight.grad.tolist() == [1.0] * 3
        assert not constant.requires_grad and not buffer.requires_grad and weight.is_leaf


@both
def test_results_can_be_changed_in_place(run):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    first, second = run(lambda v: (v * 2, v * 3), x)
    first += second
    first.mul_(2).sum().backward()
    assert x.grad.tolist() == [10.0, 10.0]


@both
def test_nested_segments(run, layers, x):

    def outer(layer, hidden, call):
        def body(value):
            return call(layer, call(layer, value)) * 2  # used twice: sums of more terms depend on their order

        return call(lambda value: call(body, value).tanh(), hidden)

    assert_same(train(run, layers, x, outer), train(plainly, layers, x, outer))


def test_segments_of_both_kinds_in_each_other(layers, x):

    def use(order):
        def go(layer, hidden, call):
            if call is plainly:
                return layer(layer(hidden))
            return order[0](lambda value: order[1](layer, order[1](layer, value)), hidden)

        return go

    expected = train(plainly, layers, x, use(None))
    assert_same(train(checkpoint, layers, x, use((checkpoint, non_reentrant_checkpoint))), expected)
    assert_same(train(checkpoint, layers, x, use((non_reentrant_checkpoint, checkpoint))), expected)


@both
def test_backward_twice_over_a_retained_graph(run, layers, x):
    loss = run(layers[0], x).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in layers[0].parameters()]
    loss.backward()
    assert_same([p.grad for p in layers[0].parameters()], [2 * grad for grad in once])


def test_gradients_of_chosen_inputs(layers, x):
    refused(RuntimeError, "non_reentrant_checkpoint", torch.autograd.grad, checkpoint(layers[0], x).sum(), x)
    torch.manual_seed(1)
    (got,) = torch.autograd.grad(non_reentrant_checkpoint(layers[0], x).sum(), x)
    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(layers[0](x).sum(), x)
    assert torch.equal(got, expected)


def test_second_derivatives():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (first,) = torch.autograd.grad(non_reentrant_checkpoint(lambda v: v**3, x).sum(), x, create_graph=True)
    first.sum().backward()
    assert x.grad.tolist() == [6.0, 12.0]
    refused(RuntimeError, "non_reentrant_checkpoint", checkpoint(lambda v: v**3, x).sum().backward, create_graph=True)


@both
def test_a_segment_that_runs_a_backward_of_its_own(run):
    def energy(x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(inner.pow(3).sum(), inner)
        return x * slope

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    run(energy, x).sum().backward()
    assert x.grad.tolist() == [3.0, 12.0]


@both
def test_autocast_is_restored(run):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)

    def grads(call):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(lambda value: layer(layer(value)), x)
            again = layer(x)  # the weight cast inside of the segment must not be used here: it has no graph
        return [out, *gradients(out.float().sum() + again.float().sum(), [layer.weight, x])]

    got, expected = grads(run), grads(plainly)
    assert got[0].dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)  # the order in which gradients are added differs


@both
def test_an_exception_leaves_nothing_behind(run, layers, x):
    calls = []

    def fails(where):
        def body(x):
            calls.append(1)
            y = layers[0](x)
            if len(calls) == where:
                torch.rand(3)
                raise KeyError("inside")
            return y

        return body

    refused(KeyError, "", run, fails(1), x)
    calls.clear()
    out = run(fails(2), x)
    state = torch.get_rng_state()
    with pytest.raises((KeyError, RuntimeError), match="inside"):  # torch 1.13 wraps what a hook raises
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled() and thread.recomputing == 0
    assert torch.is_autocast_cache_enabled()
    assert_same(train(run, layers, x), train(plainly, layers, x))


def test_a_function_that_changes_is_named():
    calls = []

    def fickle(x):
        calls.append(1)
        return (x * x).sin() if len(calls) == 1 else x * 2

    x = torch.ones(3, requires_grad=True)
    refused(RuntimeError, "fickle.*did not do the same", non_reentrant_checkpoint(fickle, x).sum().backward)
    calls.clear()
    refused(
        RuntimeError,
        "returned 1 tensors in forward and 2",
        checkpoint(lambda x: (x,) if not calls.append(1) and len(calls) == 1 else (x, x * 2), x)[0].sum().backward,
    )

    def wider(x):
        calls.append(1)
        return (x.reshape(1, -1) if len(calls) == 1 else x).sin().sum()

    calls.clear()
    refused(RuntimeError, r"\[1, 3\].*\[3\]", non_reentrant_checkpoint(wider, x).backward)
    calls.clear()
    checkpoint(wider, x, use_reentrant=False, determinism_check="none").backward()


@both
def test_an_input_changed_in_place_is_an_error_not_a_wrong_gradient(run):
    x = torch.ones(3, requires_grad=True) * 1
    y = run(lambda v: v * v, x)
    x.add_(1)
    refused(RuntimeError, "modified by an inplace operation", y.sum().backward)


@both
def test_without_gradients_it_is_a_plain_call(run):
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not run(lambda v: v * 2, x).requires_grad


def test_keywords_of_torch():
    seen = []

    @contextlib.contextmanager
    def note(text):
        seen.append(text)
        yield
        seen.append(f"end {text}")

    x = torch.ones(3, requires_grad=True)
    for reentrant in (True, False):
        seen.clear()
        contexts = {"use_reentrant": reentrant, "context_fn": lambda: (note("forward"), note("again"))}
        checkpoint(lambda v: v.sin(), x, **contexts).sum().backward()
        assert seen == ["forward", "end forward", "again", "end again"]
    refused(ValueError, "debug", checkpoint, torch.sin, x, debug=True)
    refused(ValueError, "determinism_check", checkpoint, torch.sin, x, determinism_check="loud")


def test_the_node_can_be_used_directly():
    x = torch.ones(3, requires_grad=True)
    outputs = []
    (y,) = CheckpointFunction.apply(lambda v, factor, flag: (v * factor, flag), outputs, x, 3, "flag")
    assert outputs[1] == "flag" and len(outputs) == 2
    y.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0, 3.0]


@both
def test_memory_grows_with_the_inputs_of_the_layers_only(run):
    """Saved bytes of N layers: N inputs and nothing else (contract 03, idea 6)."""
    width, rows = 32, 8

    def saved_bytes(call, count):
        torch.manual_seed(0)
        stack = torch.nn.ModuleList(Layer(width) for _ in range(count))
        storages = {}
        own = {p.data_ptr() for p in stack.parameters()}

        def pack(tensor):
            if tensor.data_ptr() not in own:
                storages[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        hidden = torch.randn(rows, width, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            kept = [hidden]
            for layer in stack:
                hidden = call(layer, hidden)
                kept.append(hidden)
        return sum(storages.values())

    for count in (1, 4, 8):
        assert saved_bytes(run, count) == count * rows * width * 4
    assert saved_bytes(plainly, 4) > 4 * 3 * rows * width * 4


@both
def test_the_activations_of_a_segment_are_freed(run, layers, x):
    alive = []

    def body(x):
        middle = layers[0](x)
        alive.append(weakref.ref(middle))
        return middle * 2

    out = run(body, x)
    assert alive[0]() is None
    out.sum().backward()
    assert all(one() is None for one in alive)


@both
def test_nothing_waits_for_the_garbage_collector(run):
    """A reference cycle through a segment would hold its memory for many steps."""
    gc.collect()
    gc.disable()
    try:
        weight, x = torch.ones(3, requires_grad=True), torch.ones(3) * 2

        def body(v):
            return v * weight

        input_, function = weakref.ref(x), weakref.ref(body)
        out = run(body, x)
        out.sum().backward()
        del out, body, x
        assert input_() is None and function() is None
    finally:
        gc.enable()


def test_names_of_scripts():
    from deepspeed.runtime.activation_checkpointing import checkpointing as facade

    assert deepspeed.checkpointing.checkpoint is checkpoint is facade.checkpoint
    assert facade._cpu_offload_engine is None
    assert "checkpointing" in dir(deepspeed)
    with pytest.raises(AttributeError):
        facade.no_such_name  # noqa: B018
