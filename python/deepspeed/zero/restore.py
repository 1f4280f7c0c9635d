"""Fills an optimizer of any ZeRO stage from a ``SavedState`` of any other.

Each rank reads the ranges that it owns, from wherever they lie, and nothing else.
"""

import torch

from deepspeed.registry import Registry
from deepspeed.zero.wrapped_optimizer import in_memory_order

# What reads saved states of a form, whose files and keys the room above knows.
SAVED_FORMS = Registry("form of saved optimizer states")
SAVED_FORMS.register("flat", "deepspeed.checkpoint.layouts.saved_shards:FlatState")
SAVED_FORMS.register("sliced", "deepspeed.checkpoint.layouts.saved_shards:SlicedState")
SAVED_FORMS.register("own slices", "deepspeed.checkpoint.layouts.saved_shards:OwnShard")
SAVED_FORMS.register("plain", "deepspeed.checkpoint.layouts.saved_shards:PlainState")


class Restore:
    """One restoration. ``stepping`` is the optimizer's ``Stepping``; ``params`` are its parameters as the model has
    them, end to end over the groups, and ``saved`` is the checkpoint."""

    def __init__(self, stepping, params, saved):
        self.core = stepping.core
        self.stepping = stepping
        self.optimizer = stepping.optimizer
        self.params = params
        self.saved = saved
        self.names = [_saved_name(name, saved) for name in stepping.names]
        self.core.wait_for_states()  # a checkpoint may be copying them

    def check(self):
        """Raises ValueError for the first parameter that has another shape in the checkpoint."""
        shapes = self.saved.shapes()
        for name, param in zip(self.names, self.params):
            here = tuple(getattr(param, "ds_shape", param.shape))
            if name in shapes and tuple(shapes[name]) != here:
                raise ValueError(
                    f"{self.saved.origin()} does not fit the model: parameter '{name}' was saved with shape "
                    f"{tuple(shapes[name])}, the model has {here}. Build the model as it was saved"
                )

    def _owned(self):
        """``(index, offset, numel, master)`` of what this rank owns."""
        for (index, offset, numel), master in zip(self.core.pieces(), self.stepping.masters, strict=True):
            yield index, offset, numel, master

    @torch.no_grad()
    def _fill(self, target, index, offset, pieces, what):
        param, name = self.params[index], self.names[index]
        if hasattr(param, "ds_handle") or param.is_contiguous():
            filled = self.saved.read_into(target, pieces, offset)
        else:  # pieces are in the order of memory, files in that of rows
            whole = torch.zeros(param.shape, dtype=target.dtype, device=target.device)
            filled = min(self.saved.read_into(whole, pieces, 0), target.numel())
            if target.shape == param.shape:
                target.copy_(whole)
            else:
                target.copy_(in_memory_order(whole, param)[offset : offset + target.numel()].reshape(target.shape))
        if filled != target.numel():
            raise ValueError(
                f"{self.saved.origin()}: {what} of parameter '{name}' has {filled} of the {target.numel()} elements "
                f"from {offset} on; shards are missing, or it is of another model"
            )

    # ---- fp32 weights ----------------------------------------------------------------------------------------------
    def masters(self):
        """Masters take the saved fp32 weights; where there are none they keep what they have. Returns the names of the
        parameters that had none. Weights of the model follow with ``core.publish()``."""
        without = []
        found = [self.saved.pieces(name, "fp32") for name in self.names]
        for name, param, pieces in zip(self.names, self.params, found):
            if not pieces and _numel(param):
                without.append(name)
        for index, offset, numel, master in self._owned():
            if numel and found[index]:
                self._fill(master.data, index, offset, found[index], "the fp32 weight")
        return without

    # ---- states ----------------------------------------------------------------------------------------------------
    def states(self):
        """Moments, steps and hyperparameters. Raises ValueError where the checkpoint's optimizer has other groups, or
        other states."""
        self._groups()
        if self.stepping.fused is not None:
            self._native_states()
        else:
            self._client_states()

    def _groups(self):
        own, saved = self.optimizer.param_groups, self.saved.param_groups()
        if len(own) != len(saved):
            raise ValueError(
                f"{self.saved.origin()} has {len(saved)} parameter groups, this run's optimizer has {len(own)}: make "
                "the same groups, or load it with load_optimizer_states=False"
            )
        for group, values in zip(own, saved):
            group.update({key: value for key, value in values.items() if key not in ("names", "params")})

    def _native_states(self):
        kinds = self.core.slot_names()
        slots = [self.core.slots(number) for number in range(len(kinds))]
        found = {}
        for place, (index, offset, numel, _) in enumerate(self._owned()):
            if index not in found:
                found[index] = self._pieces_of(index, [k for k, slot in zip(kinds, slots) if slot[place] is not None])
            for kind, slot in zip(kinds, slots):
                if slot[place] is None or not numel:
                    continue
                if found[index][kind]:
                    self._fill(slot[place], index, offset, found[index][kind], f"state '{kind}'")
                else:
                    slot[place].zero_()
        steps = torch.zeros(len(self.params), dtype=torch.float32)
        for index, name in enumerate(self.names):
            if name in self.saved.shapes():
                steps[index] = float(self.saved.step(name) or 0)
        self.core.steps().copy_(steps)

    def _pieces_of(self, index, kinds):
        name = self.names[index]
        found = {kind: self.saved.pieces(name, kind) for kind in kinds}
        have = [kind for kind in self.saved.state_names() if self.saved.pieces(name, kind)]
        if have and set(have) != set(kinds) and _numel(self.params[index]):
            raise ValueError(
                f"{self.saved.origin()} has the states {', '.join(have)} of parameter '{name}', and "
                f"{type(self.optimizer).__name__} keeps {', '.join(kinds)}: it is of another optimizer. Use that "
                "one, or load it with load_optimizer_states=False"
            )
        return found

    def _client_states(self):
        state = self.optimizer.state
        shapes, kinds = self.saved.shapes(), self.saved.state_names()
        for index, offset, numel, master in self._owned():
            name = self.names[index]
            if name not in shapes:
                state.pop(master, None)
                continue
            own = {key: _own(value) for key, value in self.saved.scalars(name).items()}
            for kind in kinds:
                pieces = self.saved.pieces(name, kind)
                if pieces or not numel:
                    own[kind] = torch.zeros_like(master.detach())
                if pieces and numel:
                    self._fill(own[kind], index, offset, pieces, f"state '{kind}'")
            if own:
                state[master] = own
            else:
                state.pop(master, None)
        if hasattr(
            self.optimizer, "__setstate__"
        ):  # torch's optimizers turn states of older versions into theirs there
            self.optimizer.__setstate__({"state": state, "param_groups": self.optimizer.param_groups})

    # ---- the optimizer as a whole ----------------------------------------------------------------------------------
    def extra(self):
        """The dynamic loss scale, the overflow flag and the clipping norm, as far as they were saved."""
        found = self.saved.extra()
        self.stepping.overflow = bool(found.get("overflow", False))
        self.stepping.clip = found.get("clip_grad", self.stepping.clip)
        restore_scaler(self.stepping.scaler, found)


def restore_scaler(scaler, found):
    """A dynamic scaler goes on where a dynamic one was saved; a static scale is the configuration's."""
    saved = found.get("loss_scaler")
    if scaler is None or saved is None or not scaler.dynamic or not found.get("dynamic_loss_scale"):
        return
    values = saved if isinstance(saved, dict) else vars(saved)
    for key in vars(scaler).keys() & values.keys() - {"dynamic", "dtype"}:
        setattr(scaler, key, values[key])


def _saved_name(name, saved):
    """The name under which the checkpoint has a parameter: of tied ones it may be another."""
    return name if name in saved.shapes() else saved.aliases().get(name, name)


def _numel(param):
    return param.ds_numel if hasattr(param, "ds_numel") else param.numel()


def _own(value):
    if torch.is_tensor(value):
        return value.clone()
    return value.read() if hasattr(value, "read_range") else value
