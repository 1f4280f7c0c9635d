"""Activations in host memory. On the CPU, copies are from main memory to main memory: the same code but streams."""

import contextlib
import functools
import gc

import pytest
import torch
import torch.utils.checkpoint

import devices
from deepspeed import checkpointing
from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.hidden_states import (
    CheckpointHiddenStatesOffload,
    get_checkpoint_hidden_states_offloading_ctx_manager,
)
from deepspeed.activation_checkpointing.offload import HostPool, _ActivationOffloadEngine
from gradients import gradients
from refusals import refused
from segments import assert_same, both, plainly

pytestmark = pytest.mark.any_device
HERE = get_accelerator().current_device_name()


def drawn():
    """An input of a layer, without a history."""
    return torch.randn(16, 64, device=HERE, requires_grad=True)


def network(count=5):
    torch.manual_seed(0)
    return [torch.nn.Linear(64, 64, device=HERE) for _ in range(count)], drawn()


def through(layers, x, call, body=lambda layer, v: layer(v).tanh()):
    """``x`` after all layers, each of which is a segment of ``call``."""
    for layer in layers:
        x = call(lambda v, layer=layer: body(layer, v), x)
    return x


def with_dropout(layer, v):
    return torch.nn.functional.dropout(layer(v), 0.1).tanh()


def gradients_of(layers, x, forward):
    return gradients(forward().square().sum(), [x, *(layer.weight for layer in layers)])


def counting(monkeypatch, owner):
    """The shapes that ``owner.to_host`` gets from here on."""
    copies, real = [], owner.to_host
    monkeypatch.setattr(owner, "to_host", lambda *args: copies.append(args[-1].shape) or real(*args))
    return copies


@pytest.fixture
def host_counts_as_device(monkeypatch):
    """Tensors in main memory are moved as if they came from a device."""
    monkeypatch.setattr(
        _ActivationOffloadEngine,
        "worth_moving",
        lambda self, tensor: tensor.numel() * tensor.element_size() >= self.min_offload_bytes,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_there_and_back(dtype):
    engine = _ActivationOffloadEngine()
    for shape in ((3, 5), (), (0, 2)):
        tensor = (torch.rand(shape, device=HERE) * 5).to(dtype)
        host = engine.to_host(tensor)
        assert host.shape == tensor.shape and host.dtype == dtype
        assert not host.numel() or host.data_ptr() != tensor.data_ptr()
        assert torch.equal(engine.to_device(host, tensor.device), tensor)
    strided = torch.arange(12, device=HERE).reshape(3, 4).t()
    assert torch.equal(engine.to_device(engine.to_host(strided), strided.device), strided)


def test_host_buffers_are_used_again_once_nobody_needs_them():
    pool = HostPool(pin=False, capacity=2)
    first = pool.empty(8, torch.float32)
    place, alias = first.data_ptr(), first.detach()
    del first
    gc.collect()
    assert pool.count() == 0  # an alias still reads it
    assert pool.empty(8, torch.float32).data_ptr() != place
    del alias
    gc.collect()
    assert pool.count() == 2
    others = [pool.empty(4, torch.float64) for _ in range(3)]  # as many bytes, another dtype
    assert place in [other.data_ptr() for other in others] and pool.count() == 0
    del others
    gc.collect()
    assert pool.count() == 2  # never more than the capacity
    pool.clear()
    assert pool.count() == 0


@pytest.mark.parametrize("name", ["max_fwd_stash_count", "min_offload_bytes", "keep_last_count"])
def test_arguments_are_checked(name):
    refused(ValueError, name, get_checkpoint_hidden_states_offloading_ctx_manager, **{name: -1})


@pytest.mark.parametrize("keep_last_count, moved", [(0, 5), (1, 4), (3, 2), (9, 0)])
def test_marked_hidden_states_are_moved_and_come_back(keep_last_count, moved, host_counts_as_device, monkeypatch):
    layers, x = network()

    def marked(body, hidden):
        context.mark(hidden)
        return plain(body, hidden)

    def inside():
        with context:
            return through(layers, x, marked)

    plain = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    expected = gradients_of(layers, x, lambda: through(layers, x, plain))
    context = CheckpointHiddenStatesOffload(keep_last_count=keep_last_count)
    copies = counting(monkeypatch, context)
    for _ in range(2):
        copies.clear()
        assert_same(gradients_of(layers, x, inside), expected)
        assert len(copies) == moved
    context.reset()
    out = inside()
    out.sum().backward(retain_graph=True)
    out.sum().backward()  # what came back once can come back again
    assert all(
        one() is None or one().tensor is None for one in context._order.waiting
    )  # and is on the device for backward only


def test_small_and_unmarked_tensors_stay(host_counts_as_device):
    x = drawn()
    for least, used in ((1 << 20, lambda context: context.mark(x).sin() + x.cos()), (1024, lambda context: x.sin())):
        context = CheckpointHiddenStatesOffload(min_offload_bytes=least, keep_last_count=0)
        context.to_host = None  # must not be called
        with context:
            used(context).sum().backward()


@pytest.mark.parametrize("keep_last_count", [0, 1, 2])
def test_a_hidden_state_changed_in_place_is_an_error(keep_last_count, host_counts_as_device):
    context = CheckpointHiddenStatesOffload(keep_last_count=keep_last_count)
    hidden = drawn() * 1
    at_once = keep_last_count == 0
    with context, devices.unordered() if at_once and HERE != "cpu" else contextlib.nullcontext():
        out = context.mark(hidden).sin()
        hidden.add_(1)
        if at_once and HERE == "cpu":  # moved when ``mark`` returns: the change comes too late to matter
            out.sum().backward()
            return
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other = context.mark(drawn() * 1)
            out = out + other.sin()  # pushes the first one out, when one is kept
            out.sum().backward()


@both
def test_segments_mark_their_inputs_by_themselves(run, host_counts_as_device, monkeypatch):
    layers, x = network()
    expected = gradients_of(layers, x, lambda: through(layers, x, plainly))
    context = CheckpointHiddenStatesOffload(keep_last_count=1)
    copies = counting(monkeypatch, context)

    def inside():
        with context:
            return through(layers, x, run)

    assert_same(gradients_of(layers, x, inside), expected)
    assert len(copies) == len(layers) - 1


@both
def test_cpu_checkpointing_moves_every_activation(run, host_counts_as_device, monkeypatch):
    layers, x = network()
    torch.manual_seed(1)
    expected = gradients_of(layers, x, lambda: through(layers, x, plainly, with_dropout))
    checkpointing.configure(None, checkpoint_in_cpu=True)
    copies = []
    real = _ActivationOffloadEngine.to_host
    monkeypatch.setattr(
        _ActivationOffloadEngine, "to_host", lambda self, t, host=None: copies.append(t.shape) or real(self, t, host)
    )
    torch.manual_seed(1)
    assert_same(gradients_of(layers, x, lambda: through(layers, x, run, with_dropout)), expected)
    assert len(copies) == len(layers)


@pytest.mark.skipif(HERE == "cpu", reason="the host is the device, so that what is saved stays there")
@both
@pytest.mark.parametrize("more", [{}, {"partition_activations": True}], ids=["plain", "partitioned"])
def test_nothing_saved_stays_on_the_device(run, more):
    layers, x = network()
    own = {p.data_ptr() for layer in layers for p in layer.parameters()}

    def forward(call):
        return through(layers, x * 1, call, with_dropout)

    torch.manual_seed(1)
    expected = gradients_of(layers, x, lambda: forward(plainly))
    checkpointing.configure(None, checkpoint_in_cpu=True, **more)
    on_device = []

    def pack(tensor):
        if not tensor.is_cpu and tensor.data_ptr() not in own:
            on_device.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward(run)
    assert sum(on_device) == 0
    for _ in range(3):
        torch.manual_seed(1)
        assert_same(gradients_of(layers, x, lambda: forward(run)), expected)
