"""Weights that the user writes into the model after ``deepspeed.initialize``; csrc/zero/step/user_writes.h finds
them."""

import torch

from deepspeed import _native
from deepspeed.engine.members import Part, engine_parts
from deepspeed.zero.parameters.sharded_parameter import is_sharded


@engine_parts.add("_user_weights", order=-1)
class UserWeights(Part):
    """A part of the engine."""

    def start(self):
        numbers = {id(p): n for n, p in enumerate(p for group in self.engine.trained_groups for p in group)}
        self._trained = set(numbers)
        # One row for each attribute of a module that is a trained parameter: (its dict, name, parameter, number).
        self._rows = [
            (module._parameters, name, param, numbers[id(param)])
            for module in self.engine.module.modules()
            for name, param in module._parameters.items()
            if id(param) in numbers
        ]

    def bring_home(self):
        """Before a forward and a step: new values of ``param.data`` and new parameters of modules become the
        values of the parameters that are trained. Raises RuntimeError for another shape or dtype."""
        core = self.engine.core
        if core is None:
            return
        for number in _native._C.bring_home(core, self._rows):
            self._take(core, *self._rows[number])

    @torch.no_grad()
    def _take(self, core, params, name, param, number):
        new = params[name]
        if id(new) in self._trained:
            return  # weights that the user has tied
        if is_sharded(param):
            raise RuntimeError(
                f"parameter '{param.ds_handle.name}' was replaced by another tensor of shape {tuple(new.shape)} after "
                "deepspeed.initialize: at ZeRO stage 3 every rank holds a slice of the old one. Write into it inside "
                "deepspeed.zero.GatheredParameters(..., modifier_rank=0), or load with assign=False"
            )
        _native._C.take_value(core, number, new.detach())
        param.requires_grad_(new.requires_grad)
        params[name] = param

    def before_micro_step(self, boundary):
        if boundary:
            self.bring_home()

    def before_save(self):
        """Masters take what was written into the weights. Every rank calls it."""
        if self.engine.core is not None:
            self.bring_home()
            _native._C.adopt_writes(self.engine.core)
