"""Helpers for scripts. Names are imported on first use: ``import deepspeed`` pays for none of them."""

import sys
from types import ModuleType

from deepspeed.registry import lazy_package

_WHERE = {
    "LoggerFactory": "deepspeed.log",
    "logger": "deepspeed.log",
    "log_dist": "deepspeed.log",
    "log_dist_once": "deepspeed.log",
    "set_log_level_from_string": "deepspeed.log",
    "warning_once": "deepspeed.log",
    "OnDevice": "deepspeed.utils.init_on_device",
    "RepeatingLoader": "deepspeed.utils.repeating_loader",
    "get_caller_func": "deepspeed.comm.caller",
    "get_numactl_cmd": "deepspeed.host.numa",
    "instrument_w_nvtx": "deepspeed.utils.nvtx",
    "is_initialized": "deepspeed.comm",
    "apply_z3_leaf_module_config": "deepspeed.utils.z3_leaf_module",
    "get_z3_leaf_modules": "deepspeed.utils.z3_leaf_module",
    "set_z3_leaf_module": "deepspeed.utils.z3_leaf_module",
    "set_z3_leaf_modules": "deepspeed.utils.z3_leaf_module",
    "set_z3_leaf_modules_by_name": "deepspeed.utils.z3_leaf_module",
    "set_z3_leaf_modules_by_suffix": "deepspeed.utils.z3_leaf_module",
    "unset_z3_leaf_modules": "deepspeed.utils.z3_leaf_module",
    "z3_leaf_module": "deepspeed.utils.z3_leaf_module",
    "z3_leaf_parameter": "deepspeed.utils.z3_leaf_module",
    "safe_get_full_fp32_param": "deepspeed.utils.param_access",
    "safe_get_full_grad": "deepspeed.utils.param_access",
    "safe_get_full_optimizer_state": "deepspeed.utils.param_access",
    "safe_get_local_fp32_param": "deepspeed.utils.param_access",
    "safe_get_local_grad": "deepspeed.utils.param_access",
    "safe_get_local_optimizer_state": "deepspeed.utils.param_access",
    "safe_set_full_fp32_param": "deepspeed.utils.param_access",
    "safe_set_full_grad": "deepspeed.utils.param_access",
    "safe_set_full_optimizer_state": "deepspeed.utils.param_access",
    "safe_set_local_fp32_param": "deepspeed.utils.param_access",
    "safe_set_local_grad": "deepspeed.utils.param_access",
    "safe_set_local_optimizer_state": "deepspeed.utils.param_access",
    "safe_update_full_grad_vectorized": "deepspeed.utils.param_access",
    "fragment_address": "deepspeed.utils.tensor_fragment",
    "get_full_hp_grad": "deepspeed.utils.tensor_fragment",
    "get_full_hp_param": "deepspeed.utils.tensor_fragment",
    "get_hp_fragment_mapping": "deepspeed.utils.tensor_fragment",
    "map_to_flat_opt_states": "deepspeed.utils.tensor_fragment",
    "set_full_hp_grad": "deepspeed.utils.tensor_fragment",
    "set_full_hp_param": "deepspeed.utils.tensor_fragment",
    "tensor_fragment": "deepspeed.utils.tensor_fragment",
    "lazy_init_hp_params_optimizer_state": "deepspeed.utils.mixed_precision_linkage",
    "link_hp_params": "deepspeed.utils.mixed_precision_linkage",
}


class _Package(ModuleType):
    """``deepspeed.utils.z3_leaf_module`` and ``tensor_fragment`` name a file and an object in it. Scripts expect the
    object, but the import system binds the file to the name when a script imports from it."""

    def __setattr__(self, name, value):
        own = name in _WHERE and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if own else value)


sys.modules[__name__].__class__ = _Package

__all__ = [name for name in _WHERE]

__getattr__, __dir__ = lazy_package(__name__, _WHERE)
