"""A copy of a block of layers that runs on a small probe: linear layers return chosen numbers, the rest computes."""

import copy
import functools

import torch
from torch import nn

from deepspeed.moe.layer import MoE

_WHOLE = "ds_keep_whole"  # the attribute of a module that stays as it is
_MANY = 2**22  # elements of a parameter outside of linear layers that get numbers of their own, at most


class NotAnalysed(Exception):
    """A block does not run on the probe."""


def is_linear(module):
    """Whether a module multiplies by a matrix and adds a bias: ``torch.nn.Linear`` or the ``Conv1D`` of GPT-2, and
    nobody has said that it stays whole (``keep_whole``)."""
    if stays_whole(module):
        return False
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward or _computes_linear(type(module))
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def keep_whole(module, stays=True):
    """Says of a module, and of all in it, that none of it is cut: the ranks share it in another way. ``stays`` false
    takes that back."""
    for one in module.modules():
        setattr(one, _WHOLE, stays)


def stays_whole(module):
    """Whether somebody has said so."""
    return getattr(module, _WHOLE, False)


@functools.lru_cache(256)
def _computes_linear(kind):
    """Whether a class derived from ``torch.nn.Linear`` that has a ``forward`` of its own computes the same."""
    for bias in (True, False):
        plain = nn.Linear(3, 4, bias=bias)
        try:
            made = kind.forward(plain, torch.ones(2, 3))
        except Exception:  # it needs more than a linear layer has
            return False
        if not isinstance(made, torch.Tensor) or not torch.allclose(made, plain(torch.ones(2, 3)), atol=1e-5):
            return False
    return True


def is_embedding(module):
    """Whether a module is a table of words that computes as ``torch.nn.Embedding`` does, and does not stay whole."""
    return not stays_whole(module) and isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward


def features(module):
    """``(inputs, outputs)`` of a linear layer, or None and the outputs of an embedding."""
    if isinstance(module, nn.Embedding):
        return None, module.embedding_dim
    rows, columns = getattr(module.weight, "ds_shape", module.weight.shape)
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)


class _Stand(nn.Module):
    """Stands in for a linear layer or an embedding: the width of its results, and no arithmetic."""

    def __init__(self, module):
        super().__init__()
        inside, outside = features(module)
        self.in_features, self.out_features = self.num_embeddings, self.embedding_dim = inside, outside
        self.nf = outside
        self.weight = torch.empty(outside, inside or 1, device="meta")  # for code that asks for its dtype
        self.bias = None
        self.run = None

    def forward(self, x, *others, **options):
        return self.run(self, x)


def twin_of(module):
    """A copy of a module on the CPU in fp32 with random parameters, whose linear layers and embeddings are stand-ins.
    It needs no values: parameters may be sharded, or on the device meta."""
    stands = {id(one): _Stand(one) for one in module.modules() if is_linear(one) or is_embedding(one)}
    own = (one for one in module.modules() if id(one) not in stands)
    kept = {id(param): param for one in own for param in one._parameters.values() if param is not None}
    twin = copy_of(module, {**stands, **{key: _random(param) for key, param in kept.items()}})
    for one in twin.modules():
        one._buffers.update({name: _on_host(buffer) for name, buffer in one._buffers.items() if buffer is not None})
    return twin.eval()


class _NoExperts(nn.Module):
    """Stands in for a ``deepspeed.moe.layer.MoE``, whose ranks exchange rows: its result is its input."""

    def __init__(self, layer):
        super().__init__()
        self.num_experts = layer.num_experts

    def forward(self, hidden_states, used_token=None):
        return hidden_states, hidden_states.new_zeros(()), torch.zeros(self.num_experts, dtype=torch.int64)


def copy_of(module, instead):
    """A copy of a module without its hooks. ``instead``: id of an object -> what the copy has in its place."""
    instead = {**instead, **{id(one): _NoExperts(one) for one in module.modules() if isinstance(one, MoE)}}
    hooks = [(one, one._forward_pre_hooks, one._forward_hooks) for one in module.modules()]
    for one, _, _ in hooks:
        one._forward_pre_hooks, one._forward_hooks = type(one._forward_pre_hooks)(), type(one._forward_hooks)()
    try:
        return copy.deepcopy(module, instead)
    except Exception as error:
        raise NotAnalysed(f"it cannot be copied: {error}") from error
    finally:
        for one, before, after in hooks:
            one._forward_pre_hooks, one._forward_hooks = before, after


def _random(param):
    shape = getattr(param, "ds_shape", param.shape)
    small = torch.Size(shape).numel() <= _MANY
    values = torch.rand(shape) + 0.5 if small else torch.rand(()).expand(shape)  # one number for all elements
    return nn.Parameter(values, requires_grad=param.requires_grad or param.is_floating_point())


def _on_host(buffer):
    dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
    return torch.ones(buffer.shape, dtype=dtype) if buffer.is_meta else buffer.to("cpu", dtype)


def tensors_in(value, place=()):
    """``(place, tensor)`` of the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from tensors_in(one, (*place, index))
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from tensors_in(one, (*place, key))


def with_tensors(value, change, place=()):
    """``value`` with ``change(place, tensor)`` in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return change(place, value)
    if isinstance(value, dict) and type(value) is not dict:
        return value
    if isinstance(value, dict):
        return {key: with_tensors(one, change, (*place, key)) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        made = [with_tensors(one, change, (*place, index)) for index, one in enumerate(value)]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


class Run:
    """One run of a twin. ``inputs`` and ``outputs``: by layer; ``given``: arguments; ``made``: its result."""

    def __init__(self, twin, given, respond):
        self.inputs, self.outputs, self.twice = {}, {}, set()
        self.names = {id(one): name for name, one in twin.named_modules() if isinstance(one, _Stand)}
        self.respond = respond
        for one in twin.modules():
            if isinstance(one, _Stand):
                one.run = self._layer
        self.given = with_tensors(given, _leaf)
        with torch.enable_grad():
            args, kwargs = with_tensors(self.given, lambda _, tensor: tensor.clone())
            self.made = twin(*args, **kwargs)

    def _layer(self, stand, x):
        name = self.names[id(stand)]
        if name in self.inputs:
            self.twice.add(name)
        self.inputs[name] = x
        self.outputs[name] = self.respond(name, stand, x)
        return self.outputs[name].clone()  # the block may change it in place


def _leaf(place, tensor):
    found = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)
    return found.clone().requires_grad_(found.is_floating_point())


class WholeRun(Run):
    """The first run, with the parameters that it had."""

    def __init__(self, twin, given):
        self.numbers, self.drawn = torch.Generator().manual_seed(0), {}
        super().__init__(twin, given, self._random)
        self.params = {name: one.detach() for name, one in twin.named_parameters()}
        self.samples = next((one.shape[0] for _, one in tensors_in(given) if one.dim() > 1), 1)

    def _random(self, name, stand, x):
        """Random results, which do not come from torch's own generator: ``drawn`` is its state at each layer."""
        self.drawn[name] = torch.get_rng_state()
        shape = x.shape if stand.in_features is None else x.shape[:-1]
        return torch.randn(*shape, stand.out_features, generator=self.numbers).requires_grad_()

    def draws_between(self, first, last):
        """Whether random numbers were drawn between two layers, by dropout for example."""
        return not torch.equal(self.drawn[first], self.drawn[last])
