"""Engines of one process whose models meet in one graph: a generator and its judge, a model that is fed its own output.

[Note: factors] An engine multiplies the gradients of a script's own backward by a factor where they arrive at its
parameters (csrc/zero/gradients/backward_session.h). The loss scale of fp16 comes in at a graph hook behind each output.
Where another tensor of the graph went into the model, a second graph hook divides by it again, so that the rest of the
graph, with other engines in it, has the gradient of the loss as the user wrote it. ``engine.backward`` multiplies the
loss itself (16-bit gradients of a small loss would vanish on their way to the graph hook), so all other engines learn
by how much, and take it into account.
"""

import weakref

import torch

from deepspeed.zero.nested import replace, tensors_in

_engines = weakref.WeakSet()


def enter(engine):
    """``engine`` may meet others from now on, until it ends."""
    _engines.add(engine)


def others_of(engine):
    """The other engines that have a core."""
    return [other for other in list(_engines) if other is not engine and other.core is not None]


def tell_others(engine, factor):
    """To all but ``engine``: the next backward starts with ``factor`` times the gradient of the loss."""
    if len(_engines) > 1:
        for other in others_of(engine):
            other._window.outside_factor = factor


def with_graph_hooks(core, inputs, kwargs):
    """The arguments of a forward, each tensor that other parts of a graph have computed behind a graph hook."""
    if not any(tensor.requires_grad for tensor in tensors_in((inputs, kwargs))):
        return inputs, kwargs

    def wanted(item):  # a graph hook would not keep the class of another kind of tensor
        return type(item) in (torch.Tensor, torch.nn.Parameter) and item.requires_grad

    return replace(inputs, wanted, core.hook_input), replace(kwargs, wanted, core.hook_input)
