"""Fills an optimizer of any ZeRO stage from a ``SavedState`` of any other.

Each rank reads the ranges that it owns, from wherever they lie, and nothing else.
"""

import torch

from deepspeed.zero.parameters.param_ranks import in_memory_order, lies_in_rows, numel_of, saved_part

# States that strategies add (csrc/zero/step/strategies); a run without them leaves them in the file.
STRATEGY_STATES = ("zenflow_gradient", "zenflow_weight")


class Restore:
    """One restoration. ``stepping`` is the optimizer's ``Stepping``; ``params`` are its parameters as the model has
    them, end to end over the groups, and ``saved`` is the checkpoint. ``options``: for each parameter group the
    hyperparameters that this run's configuration has, which win over the saved ones.

    ``check`` raises whatever can be known before anything is changed; then the other calls change it."""

    def __init__(self, stepping, params, saved, options=None):
        self.core, self.stepping, self.optimizer = stepping.core, stepping, stepping.optimizer
        self.params, self.saved = params, saved
        self.options = options or [{} for _ in self.optimizer.param_groups]
        shapes, aliases = saved.shapes, saved.aliases
        # The names under which the checkpoint has the parameters: of tied ones it may be another.
        self.names = [name if name in shapes else aliases.get(name, name) for name in stepping.names]
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
        own, saved = self.optimizer.param_groups, self.saved.param_groups if states else ()
        if states and len(own) != len(saved):
            raise ValueError(
                f"{self.saved.origin()} has {len(saved)} parameter groups, this run's optimizer has {len(own)}: make "
                "the same groups, or load it with load_optimizer_states=False"
            )
        for _, index, offset, numel, found in self._own_pieces(masters, states):
            for kind, pieces in found.items():
                if numel and pieces:
                    self._fill(numel, index, offset, pieces, kind)

    @torch.no_grad()
    def _fill(self, target, index, offset, pieces, kind):
        """The piece of a parameter from ``offset`` on; of a ``target`` that is a number of elements it is only checked
        that they are there."""
        param, begin = self.params[index], saved_part(self.params[index])[0]
        what = f"{'the fp32 weight' if kind == 'fp32' else f'state {kind}'} of parameter '{self.names[index]}'"
        if lies_in_rows(param):
            self.saved.read_into(target, pieces, begin + offset, what)
        elif isinstance(target, int):
            self.saved.read_into(param.numel(), pieces, begin, what)
        else:  # pieces are in the order of memory, files in that of rows
            whole = torch.empty(param.shape, dtype=target.dtype, device=target.device)
            self.saved.read_into(whole, pieces, begin, what)
            end = offset + target.numel()
            own = whole if target.shape == param.shape else in_memory_order(whole, param)[offset:end]
            target.copy_(own.reshape(target.shape))

    def _own_pieces(self, masters, states):
        """``(number, index, offset, numel, {kind -> saved pieces})`` of the pieces that this rank owns: of fp32 weights
        that were saved, of all states."""
        found, fused, saved, shapes = {}, self.stepping.fused, self.saved.state_names(), self.saved.shapes
        names = self.core.slot_names() if states and fused else ()
        slots = {kind: self.core.slots(number) for number, kind in enumerate(names)}
        for number, (index, offset, numel) in enumerate(self.core.pieces()):
            if index not in found:
                name = self.names[index]
                kinds = saved if states and name in shapes else ()
                if fused:  # which there are of this parameter
                    kinds = [kind for kind, own in slots.items() if own[number] is not None]
                found[index] = {kind: self.saved.pieces(name, kind) for kind in kinds}
                if states and fused:
                    self._check_kinds(index, kinds)
                if masters and (pieces := self.saved.pieces(name, "fp32")):
                    found[index]["fp32"] = pieces
            yield number, index, offset, numel, found[index]

    def _check_kinds(self, index, kinds):
        name = self.names[index]
        have = [kind for kind in self.saved.state_names() if self.saved.pieces(name, kind)]
        # One of the two runs alone may have states of a strategy of the step beside those of the optimizer.
        apart = {*self.core.strategy_states(), *STRATEGY_STATES}
        if have and set(have) - apart != set(kinds) - apart and numel_of(self.params[index]):
            raise ValueError(
                f"{self.saved.origin()} has the states {', '.join(have)} of parameter '{name}', and "
                f"{type(self.optimizer).__name__} keeps {', '.join(kinds)}: it is of another optimizer. Use that "
                "one, or load it with load_optimizer_states=False"
            )

    def masters(self):
        """Masters take the saved fp32 weights; where there are none they keep what they have. Weights of the model
        follow with ``core.publish()``."""
        self._read_native(masters=True)

    def states(self):
        """Moments, steps and hyperparameters."""
        for group, values, options in zip(self.optimizer.param_groups, self.saved.param_groups, self.options):
            left = {"names", "params", *getattr(self.optimizer, "script_keys", ())}
            if self.stepping.fused and "step" not in group:  # FusedAdam has it in its groups, others do not
                left.add("step")
            group.update({key: value for key, value in values.items() if key not in left})
            group.update(options)
        if not self.stepping.fused:
            self._client_states()
            return
        self._read_native(states=True)
        shapes = self.saved.shapes
        steps = [float(self.saved.step(name) or 0) if name in shapes else 0.0 for name in self.names]
        self.core.steps().copy_(torch.tensor(steps, dtype=torch.float32))

    def _read_native(self, masters=False, states=False):
        kept = self.stepping.kept()
        for number, index, offset, numel, found in self._own_pieces(masters, states):
            for kind, pieces in found.items() if numel else ():
                with self.core.piece(*kept[kind], number, "write") as target:
                    if pieces:
                        self._fill(target, index, offset, pieces, kind)
                    else:
                        target.zero_()

    def _client_states(self):
        state, shapes = self.optimizer.state, self.saved.shapes
        for number, index, offset, numel, found in self._own_pieces(False, True):
            name, master, own = self.names[index], self.stepping.masters[number], {}
            if name in shapes:
                own = {key: _own(value) for key, value in self.saved.scalars(name).items()}
                for kind, pieces in found.items():
                    if pieces or not numel:
                        own[kind] = torch.zeros_like(master.detach())
                    if pieces and numel:
                        self._fill(own[kind], index, offset, pieces, kind)
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
        """The overflow flag, and where a dynamic loss scale goes on, as far as they were saved. The clipping norm, the
        rules of the loss scale and a static one are the configuration's."""
        found, scaler = self.saved.extra, self.stepping.scaler
        self.stepping.overflow = bool(found.get("overflow", False))
        saved = found.get("loss_scaler")
        if scaler is not None and saved is not None and scaler.dynamic and found.get("dynamic_loss_scale"):
            scaler.go_on(saved if isinstance(saved, dict) else vars(saved))


def _own(value):
    if torch.is_tensor(value):
        return value.clone()
    return value.read() if hasattr(value, "read_range") else value
