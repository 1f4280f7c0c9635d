"""Fills an optimizer of any ZeRO stage from a ``SavedState`` of any other.

Each rank reads the ranges that it owns, from wherever they lie, and nothing else.
"""

import torch

from deepspeed.zero.param_ranks import saved_part
from deepspeed.zero.wrapped_optimizer import in_memory_order

# Of csrc/zero/strategies: a run without them leaves them in the file.
STRATEGY_STATES = ("zenflow_gradient", "zenflow_weight")


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
            here = tuple(saved_part(param)[1])
            if name in shapes and tuple(shapes[name]) != here:
                raise ValueError(
                    f"{self.saved.origin()} does not fit the model: parameter '{name}' was saved with shape "
                    f"{tuple(shapes[name])}, the model has {here}. Build the model as it was saved"
                )

    def _owned(self):
        """``(number, index, offset, numel)`` of the pieces that this rank owns."""
        return [(number, *piece) for number, piece in enumerate(self.core.pieces())]

    @torch.no_grad()
    def _fill(self, target, index, offset, pieces, what):
        param, name = self.params[index], self.names[index]
        begin = saved_part(param)[0]
        if hasattr(param, "ds_handle") or param.is_contiguous():
            filled = self.saved.read_into(target, pieces, begin + offset)
        else:  # pieces are in the order of memory, files in that of rows
            whole = torch.zeros(param.shape, dtype=target.dtype, device=target.device)
            filled = min(self.saved.read_into(whole, pieces, begin), target.numel())
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
        for number, index, offset, numel in self._owned():
            if numel and found[index]:
                with self.core.piece("master", 0, number, "write") as master:
                    self._fill(master, index, offset, found[index], "the fp32 weight")
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
        slots = [self.core.slots(number) for number in range(len(kinds))]  # which there are
        found = {}
        for place, index, offset, numel in self._owned():
            if index not in found:
                found[index] = self._pieces_of(index, [k for k, slot in zip(kinds, slots) if slot[place] is not None])
            for position, (kind, slot) in enumerate(zip(kinds, slots)):
                if slot[place] is None or not numel:
                    continue
                with self.core.piece("slot", position, place, "write") as own:
                    if found[index][kind]:
                        self._fill(own, index, offset, found[index][kind], f"state '{kind}'")
                    else:
                        own.zero_()
        steps = torch.zeros(len(self.params), dtype=torch.float32)
        for index, name in enumerate(self.names):
            if name in self.saved.shapes():
                steps[index] = float(self.saved.step(name) or 0)
        self.core.steps().copy_(steps)

    def _pieces_of(self, index, kinds):
        name = self.names[index]
        found = {kind: self.saved.pieces(name, kind) for kind in kinds}
        have = [kind for kind in self.saved.state_names() if self.saved.pieces(name, kind)]
        # What a strategy of the step keeps beside the optimizer's states may be of one of the two runs alone.
        apart = {*self.core.strategy_states(), *STRATEGY_STATES}
        if have and set(have) - apart != set(kinds) - apart and _numel(self.params[index]):
            raise ValueError(
                f"{self.saved.origin()} has the states {', '.join(have)} of parameter '{name}', and "
                f"{type(self.optimizer).__name__} keeps {', '.join(kinds)}: it is of another optimizer. Use that "
                "one, or load it with load_optimizer_states=False"
            )
        return found

    def _client_states(self):
        state = self.optimizer.state
        shapes, kinds = self.saved.shapes(), self.saved.state_names()
        for number, index, offset, numel in self._owned():
            name, master = self.names[index], self.stepping.masters[number]
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
                if self.stepping.in_files is not None:
                    self.stepping.in_files.rest([master])
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
