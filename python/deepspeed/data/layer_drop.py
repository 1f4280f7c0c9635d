"""Progressive layer dropping: steps leave out random layers, and more of them as the training goes on.

The choice of layers depends only on the seed, the step and the micro-step, so all ranks and every recomputation leave
out the same layers.
"""

import math

import torch

from deepspeed import _native
from deepspeed.data.layer_forward import LayerForward, unwrapped
from deepspeed.log import log_dist
from deepspeed.utils.random_state import RandomState


class ProgressiveLayerDrop:
    """The probability with which a layer is kept: ``(1 - theta) * exp(-gamma * step) + theta``, which is 1 at step 0.

    theta: the limit of the probability, from 0 to 1. gamma: the rate at which it gets there, per step of the optimizer.
    The source is Zhang and He 2020, "Accelerating Training of Transformer-Based Language Models with Progressive Layer
    Dropping" (arXiv 2010.13369).
    """

    def __init__(self, theta=0.5, gamma=0.001):
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0
        log_dist(f"Enabled progressive layer dropping (theta = {self.theta})", ranks=[0])

    def get_state(self):
        """The keywords for the forward of a model that drops layers by itself."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self):
        """The probability at the last step that ``update_state`` was called with."""
        return self.current_theta

    def update_state(self, global_step):
        """Computes the probability for step ``global_step``, counted from 0."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta


_RETURNS = (
    "progressive layer dropping",
    "an input",
    "the output of a layer that may be left out must have the shape of its first argument",
)


class DroppableForward(LayerForward):
    """A layer that may be left out. If it is, its first argument is its output."""

    KEY = "_droppable"
    OUTERMOST = True

    @staticmethod
    def _hidden(args, kwargs):
        return args[0] if args else next(iter(kwargs.values()))

    def kept(self, probability, args, kwargs):
        """The output of a layer that runs. Its difference to the input is divided by the probability of running, so
        that the mean over steps is that of a layer that is never left out."""
        made = self.own(*args, **kwargs)
        if probability == 1.0:
            return made
        hidden = self._hidden(args, kwargs)
        return self.with_hidden(
            made, hidden, lambda first: torch.lerp(hidden.to(first.dtype), first, 1.0 / probability), _RETURNS
        )

    def passed(self, form, args, kwargs):
        """The output of a layer that is left out: its input, in the ``form`` of its outputs."""
        hidden = self._hidden(args, kwargs)
        if form is None:
            return hidden
        kind, count = form
        return kind([hidden, *[None] * (count - 1)])

    def form(self, args, kwargs):
        """Finds the form of the layer's outputs by a call without gradients."""
        with torch.no_grad(), RandomState().replay():
            return form_of(self.own(*args, **kwargs))


def form_of(made):
    """``(class, length)`` of a tuple or list; None for a tensor."""
    return (type(made), len(made)) if isinstance(made, (tuple, list)) else None


class LayerDropping:
    """The layers that one engine leaves out. ``forwards``: the converted layers by name."""

    def __init__(self, forwards, seed):
        self.seed, self.forwards = seed & (2**64 - 1), forwards
        self.probability, self.dropped = 1.0, frozenset()
        self._forms = {}  # of outputs, by the class of the layer
        for number, forward in enumerate(forwards.values()):
            forward.taken(self, number)

    def place(self, step, micro_step, probability):
        """Chooses the layers for the next forward, which belongs to this step and micro-step."""
        numbers = _native._C.layer_numbers(self.seed, step, micro_step, len(self.forwards))
        self.probability = probability
        self.dropped = frozenset(layer for layer, number in enumerate(numbers) if number >= probability)

    def run(self, forward, args, kwargs):
        kind = type(forward.layer)
        if forward.number not in self.dropped:
            made = forward.kept(self.probability, args, kwargs)
            self._forms[kind] = form_of(made)
            return made
        if kind not in self._forms:  # the first step of a resumed run may leave out a layer
            self._forms[kind] = forward.form(args, kwargs)
        return forward.passed(self._forms[kind], args, kwargs)


def convert_to_pld(model, layer_class):
    """Lets the engine leave out layers of the class ``layer_class``, by the section ``progressive_layer_drop``. Use it
    for models whose forward does not take the keywords of progressive layer dropping.

    model: an engine, or a module that is passed to ``deepspeed.initialize`` later. It is returned. ValueError if the
    model has no such layer, or if the configuration does not enable progressive layer dropping.
    """
    DroppableForward.convert(unwrapped(model), layer_class, "convert_to_pld")
    if unwrapped(model) is not model:
        model._layer_dropping.take()
    return model
