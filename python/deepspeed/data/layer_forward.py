"""The forward of a layer of an unchanged model. A plan chooses its tokens, or whether it runs at all.

Parameters and modules keep their names: only the attribute ``forward`` of the layer is another function.
"""

import functools

import torch

from deepspeed.zero.engine_links import EngineLink


class LayerForward:
    """Replaces ``layer.forward``. ``number`` is the number of the layer among the converted ones, once a plan has
    ``taken`` it.

    Without a plan (before there is an engine, or in a copy) and outside of training it calls the layer's own forward.
    """

    KEY = None  # in the layer's ``__dict__``
    OUTERMOST = False  # it decides whether the layer runs at all, so it is called before the others

    def __init__(self, layer):
        functools.update_wrapper(self, layer.forward, updated=())
        self.layer, self.own, self.link = layer, layer.forward, None
        if isinstance(self.own, LayerForward) and self.own.OUTERMOST:
            outermost = self.own
            self.own, outermost.own = outermost.own, self
        else:
            layer.forward = self
        layer.__dict__[self.KEY] = self

    @property
    def number(self):
        return self.link.index

    def taken(self, plan, number):
        """Gives the layer its plan and its number. With the plan None the layer runs its own forward."""
        self.link = EngineLink(plan, number) if plan is not None else None

    def __call__(self, *args, **kwargs):
        plan = self.link.target if self.link is not None else None
        if plan is None or not self.layer.training:
            return self.own(*args, **kwargs)
        return plan.run(self, args, kwargs)

    def with_hidden(self, made, given, change, words):
        """The layer's output ``made``, in which ``change(hidden states)`` replaces the hidden states. They are the
        output, or the first item of a tuple. TypeError if they do not have the shape of ``given``; ``words`` are the
        feature, the argument and the rule of its text."""
        first, *rest = made if isinstance(made, (tuple, list)) else (made,)
        if not torch.is_tensor(first) or first.shape != given.shape:
            found = tuple(first.shape) if torch.is_tensor(first) else type(first).__name__
            feature, argument, rule = words
            raise TypeError(
                f"{feature}: {type(self.layer).__name__} returns {found} for {argument} of shape "
                f"{tuple(given.shape)}: {rule}, alone or first in a tuple"
            )
        first = change(first)
        return type(made)([first, *rest]) if isinstance(made, (tuple, list)) else first

    @classmethod
    def of(cls, module):
        """``{name of the layer: its forward}`` of all converted layers of ``module``, in order."""
        found = ((name, layer.__dict__.get(cls.KEY)) for name, layer in module.named_modules())
        return {name: forward for name, forward in found if forward is not None}

    @classmethod
    def released(cls, module):
        """Takes the plan from all converted layers of ``module``, and returns ``of(module)``."""
        found = cls.of(module)
        for forward in found.values():
            forward.taken(None, None)
        return found

    @classmethod
    def convert(cls, module, kind, what):
        """Converts each layer of the class ``kind`` (or a tuple of classes) that is not converted yet. ValueError if
        the module has no such layer. ``what``: the name of the calling function."""
        layers = [layer for layer in module.modules() if isinstance(layer, kind)]
        if not layers:
            kinds = kind if isinstance(kind, tuple) else (kind,)
            inside = sorted({type(layer).__name__ for layer in module.modules()})
            raise ValueError(
                f"{what}: the model has no layer of the class {' or '.join(one.__name__ for one in kinds)}. Its "
                f"modules have the classes {', '.join(inside)}"
            )
        for layer in layers:
            if cls.KEY not in layer.__dict__:
                cls(layer)


def unwrapped(model):
    """The module of an engine. A module that is no engine is returned as it is."""
    return model.module if hasattr(model, "random_ltd_initialize") else model
