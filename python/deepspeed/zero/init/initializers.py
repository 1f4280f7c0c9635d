"""Weight initialisation of transformers, which runs over a whole model when ``zero.Init`` has ended:
``from_pretrained`` calls it for what the files did not have, on all ranks alike.

``PreTrainedModel.initialize_weights`` calls ``self.smart_apply(self._initialize_weights, ...)``. Whatever the files had
is marked and not written again, but initialisers still ask for its shape (sinusoidal positions of whisper) and compute
with it (the weight norm of wav2vec 2.0).
"""

import contextlib

import torch

from deepspeed.zero.gathers.gathered import GatheredParameters
from deepspeed.zero.parameters import sharded_parameter as sharding


def follow_initializers(cls):
    """Lets the initialisers of a model class, if it has some, see the shapes of sharded parameters and use them."""
    for base in cls.__mro__:
        if "_initialize_weights" in base.__dict__ and "smart_apply" not in base.__dict__:
            base.smart_apply = _apply


def _apply(module, fn, *args):
    """``fn(sub, *args)`` for every module inside and itself, children first; models inside use their own ``fn``."""
    for child in module.children():
        _apply(child, getattr(child, "_initialize_weights", fn), *args)
    with _shapes_of(module):
        fn(module, *args)
    return module


def _reachable(module):
    """Parameters of a module, of its children, and those that a parametrization computes one of these from."""
    for sub in (module, *module.children()):
        yield from sub.parameters(recurse=False)
        if "parametrizations" in sub._modules:
            yield from sub.parametrizations.parameters()


@contextlib.contextmanager
def _shapes_of(module):
    """Released parameters have their shapes, and operations on them, which all ranks do alike, their values as well;
    rank 0's changes count."""
    released = {param for param in _reachable(module) if isinstance(param, sharding.ReleasedParameter)}
    if not released:
        yield
        return

    @contextlib.contextmanager
    def gather(params):
        params = list(params)
        with GatheredParameters(params, modifier_rank=0):
            yield
        _pose([param for param in params if param in released])

    before, sharding.gather_while_building = sharding.gather_while_building, gather
    _pose(released)
    try:
        yield
    finally:
        sharding.gather_while_building = before
        with torch._C.DisableTorchFunction():
            for param in released:
                if isinstance(param, sharding.ReleasedParameter):
                    param.data = param.data.new_empty(0)


def _pose(params):
    """Gives released parameters their shapes, over one element of memory."""
    with torch._C.DisableTorchFunction():
        for param in params:
            param.data = param.data.new_zeros(()).expand(param.ds_shape)
