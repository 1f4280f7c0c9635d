"""Access to masters, gradients and states where nothing is sharded: ZeRO stage 0, in fp32 and in 16 bit."""

from deepspeed.zero.sharded_optimizer import ParamLink


class WholeParams:
    """The owner behind the links of parameters that every rank trains whole; see utils.param_access.

    ``params``: those of the optimizer's groups, end to end, as ``core`` was built from; ``stepping``: their Stepping.
    """

    def __init__(self, core, stepping, params):
        self.core = core
        self.stepping = stepping
        self.params = list(params)
        self._masters = {index: master for (index, _, _), master in zip(core.pieces(), stepping.masters)}
        for index, param in enumerate(self.params):
            param._ds_link = ParamLink(self, index)

    @property
    def loss_scale(self):
        return self.stepping.loss_scale

    def _state(self, index, name):
        found = self.stepping.optimizer.state.get(self._masters[index], {}).get(name)
        whole = getattr(found, "shape", None) == self._masters[index].shape and found.dim() > 0
        return found if whole else None

    def _piece_states(self, index, name):
        state = self._state(index, name)
        return [] if state is None else [(0, state.numel(), state)]

    def full_tensor(self, index, kind):
        """A copy of the whole ``kind``, or None; no communication."""
        if kind == "fp32":
            return self.core.full("master", 0, index)
        if kind == "grad":
            grad = self.core.full("grad", 0, index)
            return grad if grad is None or self.loss_scale == 1.0 else grad / self.loss_scale
        state = self._state(index, kind)
        return None if state is None else state.detach().clone().reshape(self.params[index].shape)

    def set_full_tensor(self, index, kind, value):
        if kind == "fp32":
            self.core.set_full("master", 0, index, value)
        elif kind == "grad":
            self.core.set_full("grad", 0, index, value.float() * self.loss_scale)
        else:
            self.core.wait_for_states()
            state = self._state(index, kind)
            state.copy_(value.reshape(state.shape))

    def unlink(self):
        """The engine is going."""
        for param in self.params:
            if getattr(getattr(param, "_ds_link", None), "owner", None) is self:
                del param._ds_link
