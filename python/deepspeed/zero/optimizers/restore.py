"""Fills an optimizer of any ZeRO stage from a ``SavedState`` of any other.

Each rank reads the ranges that it owns, from wherever they lie, and nothing else.
"""

import torch

from deepspeed.zero.optimizers.wrapped_optimizer import in_memory_order
from deepspeed.zero.parameters.param_ranks import saved_part

# Of csrc/zero/strategies: a run without them leaves them in the file.
STRATEGY_STATES = ("zenflow_gradient", "zenflow_weight")


class Restore:
    """One restoration. ``stepping`` is the optimizer's ``Stepping``; ``params`` are its parameters as the model has
    them, end to end over the groups, and ``saved`` is the checkpoint. ``options``: for each parameter group the
    hyperparameters that this run's configuration has, which win over the saved ones.

    ``check`` raises whatever can be known before anything is changed; then the other calls change it."""

    def __init__(self, stepping, params, saved, options=None):
        self.core = stepping.core
        self.stepping = stepping
        self.optimizer = stepping.optimizer
        self.params = params
        self.saved = saved
        self.options = options or [{} for _ in self.optimizer.param_groups]
        self.names = [_saved_name(name, saved) for name in stepping.names]
        self.core.wait_for_states()  # a checkpoint may be copying them

    def check(self, masters=False, states=False):
        """Raises ValueError, and what opening the files raises, for what cannot be restored: other shapes, and of the
        ``masters`` and ``states`` those that are incomplete or of another optimizer. Reads no elements."""
        shapes = self.saved.shapes
        for name, param in zip(self.names, self.params):
            here = tuple(saved_part(param)[1])
            if name in shapes and tuple(shapes[name]) != here:
                raise ValueError(
                    f"{self.saved.origin()} does not fit the model: parameter '{name}' was saved with shape "
                    f"{tuple(shapes[name])}, the model has {here}. Build the model as it was saved"
                )
        if masters:
            for _, index, offset, numel in self._owned():
                pieces = self.saved.pieces(self.names[index], "fp32")
                if pieces and numel:
                    self._fill(numel, index, offset, pieces, "the fp32 weight")
        if states:
            self._check_groups()
            self._check_states()

    def without_masters(self):
        """Names of parameters of which the checkpoint has no fp32 weights."""
        pairs = zip(self.names, self.params)
        return [name for name, param in pairs if _numel(param) and not self.saved.pieces(name, "fp32")]

    def _owned(self):
        """``(number, index, offset, numel)`` of the pieces that this rank owns."""
        return [(number, *piece) for number, piece in enumerate(self.core.pieces())]

    def _in_rows(self, index):
        """Whether a parameter lies in memory in the order that it has in files."""
        param = self.params[index]
        return hasattr(param, "ds_handle") or param.is_contiguous()

    @torch.no_grad()
    def _fill(self, target, index, offset, pieces, what):
        """The piece of a parameter from ``offset`` on; of a ``target`` that is a number of elements it is only checked
        that they are there."""
        param, checks = self.params[index], isinstance(target, int)
        begin, numel = saved_part(param)[0], target if checks else target.numel()
        if checks and self._in_rows(index):
            filled = self.saved.check_pieces(pieces, begin + offset, numel)
        elif checks:
            filled = min(self.saved.check_pieces(pieces, begin, param.numel()), numel)
        elif self._in_rows(index):
            filled = self.saved.read_into(target, pieces, begin + offset)
        else:  # pieces are in the order of memory, files in that of rows
            whole = torch.zeros(param.shape, dtype=target.dtype, device=target.device)
            filled = min(self.saved.read_into(whole, pieces, begin), numel)
            own = whole if target.shape == param.shape else in_memory_order(whole, param)[offset : offset + numel]
            target.copy_(own.reshape(target.shape))
        if filled != numel:
            raise ValueError(
                f"{self.saved.origin()}: {what} of parameter '{self.names[index]}' has {filled} of the {numel} "
                f"elements from {offset} on; shards are missing, or it is of another model"
            )

    # ---- fp32 weights ----------------------------------------------------------------------------------------------
    def masters(self):
        """Masters take the saved fp32 weights; where there are none they keep what they have. Weights of the model
        follow with ``core.publish()``."""
        found = [self.saved.pieces(name, "fp32") for name in self.names]
        for number, index, offset, numel in self._owned():
            if numel and found[index]:
                with self.core.piece("master", 0, number, "write") as master:
                    self._fill(master, index, offset, found[index], "the fp32 weight")

    # ---- states ----------------------------------------------------------------------------------------------------
    def states(self):
        """Moments, steps and hyperparameters."""
        self._groups()
        if self.stepping.fused:
            self._native_states()
        else:
            self._client_states()

    def _check_groups(self):
        own, saved = self.optimizer.param_groups, self.saved.param_groups
        if len(own) != len(saved):
            raise ValueError(
                f"{self.saved.origin()} has {len(saved)} parameter groups, this run's optimizer has {len(own)}: make "
                "the same groups, or load it with load_optimizer_states=False"
            )

    def _groups(self):
        for group, values, options in zip(self.optimizer.param_groups, self.saved.param_groups, self.options):
            left = {"names", "params"}
            if self.stepping.fused and "step" not in group:  # FusedAdam has it in its groups, others do not
                left.add("step")
            group.update({key: value for key, value in values.items() if key not in left})
            group.update(options)

    def _saved_states(self):
        """``(number, index, offset, numel, {kind -> saved pieces})`` of the pieces that this rank owns."""
        found, saved, fused = {}, self.saved.state_names(), self.stepping.fused
        slots = {kind: self.core.slots(number) for number, kind in enumerate(self.core.slot_names() if fused else ())}
        for number, index, offset, numel in self._owned():
            if index not in found:
                kinds = saved if self.names[index] in self.saved.shapes else ()
                if fused:  # which there are of this parameter
                    kinds = [kind for kind, own in slots.items() if own[number] is not None]
                found[index] = self._pieces_of(index, kinds)
            yield number, index, offset, numel, found[index]

    def _check_states(self):
        for _, index, offset, numel, found in self._saved_states():
            for kind, pieces in found.items() if numel else ():
                if pieces:
                    self._fill(numel, index, offset, pieces, f"state '{kind}'")

    def _native_states(self):
        kept = self.stepping.kept()
        for number, index, offset, numel, found in self._saved_states():
            for kind, pieces in found.items() if numel else ():
                with self.core.piece(*kept[kind], number, "write") as target:
                    if pieces:
                        self._fill(target, index, offset, pieces, f"state '{kind}'")
                    else:
                        target.zero_()
        steps = torch.zeros(len(self.params), dtype=torch.float32)
        for index, name in enumerate(self.names):
            if name in self.saved.shapes:
                steps[index] = float(self.saved.step(name) or 0)
        self.core.steps().copy_(steps)

    def _pieces_of(self, index, kinds):
        name = self.names[index]
        found = {kind: self.saved.pieces(name, kind) for kind in kinds}
        if not self.stepping.fused:
            return found
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
        state, shapes = self.optimizer.state, self.saved.shapes
        for number, index, offset, numel, found in self._saved_states():
            name, master, own = self.names[index], self.stepping.masters[number], {}
            if name in shapes:
                own = {key: _own(value) for key, value in self.saved.scalars(name).items()}
                for kind, pieces in found.items():
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
        # torch's optimizers turn states of older versions into theirs there.
        if hasattr(self.optimizer, "__setstate__"):
            self.optimizer.__setstate__({"state": state, "param_groups": self.optimizer.param_groups})

    # ---- the optimizer as a whole ----------------------------------------------------------------------------------
    def extra(self):
        """The dynamic loss scale and the overflow flag, as far as they were saved. The clipping norm and the rules of
        the loss scale are the configuration's."""
        found = self.saved.extra
        self.stepping.overflow = bool(found.get("overflow", False))
        restore_scaler(self.stepping.scaler, found)


def restore_scaler(scaler, found):
    """A dynamic scaler goes on where a dynamic one was saved; a static scale is the configuration's."""
    saved = found.get("loss_scaler")
    if scaler is None or saved is None or not scaler.dynamic or not found.get("dynamic_loss_scale"):
        return
    scaler.go_on(saved if isinstance(saved, dict) else vars(saved))


def _saved_name(name, saved):
    """The name under which the checkpoint has a parameter: of tied ones it may be another."""
    return name if name in saved.shapes else saved.aliases.get(name, name)


def _numel(param):
    return param.ds_numel if hasattr(param, "ds_numel") else param.numel()


def _own(value):
    if torch.is_tensor(value):
        return value.clone()
    return value.read() if hasattr(value, "read_range") else value
