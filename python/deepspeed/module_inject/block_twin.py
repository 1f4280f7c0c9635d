"""A copy of a block of layers that runs on a small probe: linear layers return chosen numbers, the rest computes."""

import copy

import torch
from torch import nn


class NotAnalysed(Exception):
    """A block does not run on the probe."""


def is_linear(module):
    """Whether a module multiplies by a matrix and adds a bias: ``torch.nn.Linear`` or the ``Conv1D`` of GPT-2."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


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

    def forward(self, x):
        return self.run(self, x)


def twin_of(block):
    """A copy of a block on the CPU in fp32 with random parameters, whose linear layers and embeddings are stand-ins."""
    stands = {id(one): _Stand(one) for one in block.modules() if is_linear(one) or isinstance(one, nn.Embedding)}
    held = {id(param): _random(param) for param in block.parameters()}
    hooks = [(one, one._forward_pre_hooks, one._forward_hooks) for one in block.modules()]
    for one, _, _ in hooks:
        one._forward_pre_hooks, one._forward_hooks = type(one._forward_pre_hooks)(), type(one._forward_hooks)()
    try:
        twin = copy.deepcopy(block, {**stands, **held})
    except Exception as error:
        raise NotAnalysed(f"it cannot be copied: {error}") from error
    finally:
        for one, before, after in hooks:
            one._forward_pre_hooks, one._forward_hooks = before, after
    for buffer in twin.buffers():
        buffer.data = buffer.data.cpu().float() if buffer.is_floating_point() else buffer.data.cpu()
    return twin.eval()


def _random(param):
    shape = getattr(param, "ds_shape", param.shape)
    stands = len(shape) == 2 and max(shape) > 512  # of a linear layer: nobody reads it
    values = torch.empty(shape, device="meta") if stands else torch.rand(shape) + 0.5
    return nn.Parameter(values, requires_grad=param.requires_grad or param.is_floating_point())


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
            self.made = twin(*self.given[0], **self.given[1])

    def _layer(self, stand, x):
        name = self.names[id(stand)]
        if name in self.inputs:
            self.twice.add(name)
        self.inputs[name] = x
        self.outputs[name] = self.respond(name, stand, x)
        return self.outputs[name]


def _leaf(place, tensor):
    found = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)
    return found.clone().requires_grad_(found.is_floating_point())


def random_result(name, stand, x):
    shape = x.shape if stand.in_features is None else x.shape[:-1]
    return torch.randn(*shape, stand.out_features).requires_grad_()


class WholeRun(Run):
    """The first run, with the parameters that it had."""

    def __init__(self, twin, given):
        super().__init__(twin, given, random_result)
        self.params = {name: one.detach() for name, one in twin.named_parameters()}
        self.samples = next((one.shape[0] for _, one in tensors_in(given) if one.dim() > 1), 1)
