"""Ties an optimizer of ours (``ops.native_optimizer``) to the flat buffers of an engine core.

The optimizer object stays what users know: ``param_groups`` that schedulers write to, ``state`` with the states of
each parameter, ``state_dict`` and ``load_state_dict``. Only its step runs on the flat buffers, in one fused pass.
"""

import torch

from deepspeed.log import logger
from deepspeed.ops.by_name import is_native


def can_fuse(optimizer, masters):
    """Whether the native engine can run the step of ``optimizer`` over these masters."""
    return is_native(optimizer) and all(master.dtype == torch.float32 for master in masters)


class FusedState:
    """The link between one optimizer and one core.

    ``params`` are the optimizer's own parameters in group order: one for each piece that this rank owns. ``step`` makes
    a step of the engine; the optimizer's own ``step()`` calls it.
    """

    def __init__(self, core, optimizer, params, step):
        self.core = core
        self.optimizer = optimizer
        self.params = params
        self.step = step
        optimizer.check_engine()
        self.core.set_rules([optimizer.rule_of(group) for group in optimizer.param_groups])
        if optimizer.stochastic_rounding:
            logger.warning(
                f"{type(optimizer).__name__}: stochastic_rounding has no effect in this engine, which keeps fp32 "
                "masters: nothing is lost there, and the model's 16-bit weights are the masters rounded to nearest."
            )
        self._install()

    def _views(self):
        kept = set(self.core.strategy_states())  # they are the engine's, not the optimizer's
        names, steps = [name for name in self.core.slot_names() if name not in kept], self.core.steps()
        slots = [self.core.slots(number) for number in range(len(names))]
        for place, (param, (index, _, _)) in enumerate(zip(self.params, self.core.pieces())):
            own = {name: slot[place] for name, slot in zip(names, slots) if slot[place] is not None}
            yield param, {"step": steps[index], **own}

    def _install(self):
        for param, views in self._views():
            self.optimizer.state[param] = views

    def groups(self):
        """Rule and hyperparameters of each parameter group, as they are now."""
        optimizer = self.optimizer
        return [(optimizer.rule_of(group), optimizer.rule_args(group)) for group in optimizer.param_groups]

    def read(self, place, state):
        """``state``, of parameter number ``place``, with copies of what lies in files and has no memory."""
        slots = {name: number for number, name in enumerate(self.core.slot_names())}
        return {
            name: self.core.piece_tensor("slot", slots[name], place) if name in slots and value.is_meta else value
            for name, value in state.items()
        }

    def adopt(self):
        """Takes what ``load_state_dict`` put into ``optimizer.state`` into the flat buffers."""
        slots = {name: number for number, name in enumerate(self.core.slot_names())}
        for place, (param, views) in enumerate(self._views()):
            loaded = self.optimizer.state.get(param, {})
            for name, view in views.items():
                if name in loaded and name != "step" and loaded[name].numel() != view.numel():
                    raise ValueError(
                        f"optimizer state '{name}' has shape {tuple(loaded[name].shape)} where the parameter has "
                        f"{tuple(view.shape)}: the checkpoint is of another model or of other parameter groups"
                    )
                if name == "step":
                    view.fill_(float(loaded.get(name, 0)))
                    continue
                with self.core.piece("slot", slots[name], place, "write") as own:
                    if name in loaded:
                        own.copy_(loaded[name].reshape(view.shape))
                    else:
                        own.zero_()
            self.optimizer.state[param] = views
