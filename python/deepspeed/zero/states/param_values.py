"""Values, states and gradients of one parameter, asked of the stage 3 optimizer instead of the parameter.

The functions of ``deepspeed.utils.tensor_fragment`` do the same and say more about it.
"""

from deepspeed.utils import param_access
from deepspeed.zero.states.named_states import groups_of_params


class ParamValues:
    """Mixed into the stage 3 optimizer. "full": whole tensors, every rank calls; "local": this rank's slice. Both are
    copies."""

    def _access(self, how, param, key, *value):
        """The function of ``param_access`` for the fp32 value (``key`` None), the gradient ("grad") or a state."""
        self._linked(param)
        kinds = {None: ("fp32_param",), "grad": ("grad",)}
        kind, *keys = kinds.get(key, ("optimizer_state", key))
        return getattr(param_access, f"safe_{how}_{kind}")(param, *value, *keys)

    def get_full_hp_param(self, param, optim_state_key=None):
        return self._access("get_full", param, optim_state_key)

    def set_full_hp_param(self, value, param, optim_state_key=None):
        self._access("set_full", param, optim_state_key, value)

    def get_fp32_grad_for_param(self, param):
        return self._access("get_full", param, "grad")

    def set_fp32_grad_for_param(self, value, param):
        self._access("set_full", param, "grad", value)

    def get_local_fp32_param(self, param, optim_state_key=None):
        return self._access("get_local", param, optim_state_key)

    def set_local_hp_param(self, value, param, optim_state_key=None):
        self._access("set_local", param, optim_state_key, value)

    def get_local_fp32_grad_for_param(self, param):
        return self._access("get_local", param, "grad")

    def set_local_grad_for_param(self, value, param):
        self._access("set_local", param, "grad", value)

    def update_fp32_grad_for_param_vectorized(self, update_func, param_list):
        for param in param_list:
            self._linked(param)
        param_access.safe_update_full_grad_vectorized(param_list, update_func)

    def get_hp_param_device(self, param, optim_state_key=None):
        """The device of this rank's slice of the fp32 values, or of a state."""
        self._linked(param)
        if self.states.away:
            kind = "hp_params" if optim_state_key is None else "optim_states"
            return next(iter(self.states.devices(kind)))
        local = self.get_local_fp32_param(param, optim_state_key)
        return self.core_device if local is None else local.device

    def get_fp32_grad_partitions(self):
        """dict: parameter group -> dict: parameter number -> this rank's slice of the reduced gradient: fp32, flat, of
        one size on all ranks, padded with zeros as all slices are. Copies.

        Parameters without a gradient are left out, on all ranks alike.
        """
        grads, used, found = self.core.grads(copies=True), self.core.used(), {}
        device = next((grad.device for grad in grads if grad is not None), self.core_device)
        for param, group in enumerate(groups_of_params(self.bit16_groups)):
            if used[param]:
                found.setdefault(group, {})[param] = self.core.padded_slices(grads, [param]).to(device)
        return found
