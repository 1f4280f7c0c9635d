"""Hooks that gather the parameters of a module while it runs. What they do is in csrc/zero/gathers/param_gatherer.h."""

import copyreg
import inspect

import torch

from deepspeed import _native
from deepspeed._compat import forward_hooks_take_kwargs
from deepspeed.utils.z3_leaf_module import z3_leaf_module
from deepspeed.zero.engine_links import EngineLink
from deepspeed.zero.nested import tensors_within
from deepspeed.zero.parameters.param_ranks import numel_of
from deepspeed.zero.parameters.sharded_parameter import is_sharded

_HOOK_OPTIONS = {"with_kwargs": True} if forward_hooks_take_kwargs() else {}


def _no_hook(*args, **kwargs):
    pass


def _pickled_hook(hook):
    return _hook_without_engine, ()


def _hook_without_engine():
    return _no_hook


# A pickled module has no engine: its hooks do nothing.
copyreg.pickle(_native._C.EnterHook, _pickled_hook)
copyreg.pickle(_native._C.LeaveHook, _pickled_hook)


def _refuse_constant_inputs(module, args, kwargs=None):
    """Refuses a leaf module without an input that wants a gradient: a backward through it must come out at one of its
    inputs."""
    if not torch.is_grad_enabled() or not any(param.requires_grad for param in module.parameters()):
        return
    if kwargs is None and len(args) < len(inspect.signature(module.forward).parameters):
        return  # this torch shows hooks no keyword arguments: there may be some
    if not any(tensor.requires_grad for tensor in tensors_within((args, kwargs))):
        raise RuntimeError(
            "A module cannot be set as a leaf module when it does not have any input tensors that require gradients "
            f"and has parameters that require gradients. This is a {type(module).__name__}: take it off the leaf "
            "modules (unset_z3_leaf_modules, zero_optimization.leaf_module), call requires_grad_() on one of its "
            "inputs, or run it under torch.no_grad()"
        )


def unit_parameters(module, granularity=0):
    """``(parameters, whether the module's children belong to it)``."""
    whole = z3_leaf_module(module) or _is_fine_grained(module, granularity)
    params = list(dict.fromkeys(module.parameters(recurse=whole)))
    params += [p for p in module.__dict__.get("_external_params", {}).values() if p not in set(params)]
    return [p for p in params if is_sharded(p)], whole


def _is_fine_grained(module, granularity):
    """Whether modules inside are so small that gathering them one by one costs more than it saves."""
    if granularity <= 0 or not any(True for _ in module.children()):
        return False
    inside = [m for m in module.modules() if m is not module]
    numel = sum(map(numel_of, module.parameters()))
    return numel / len(inside) < granularity


class ModuleHooks:
    """Installs and removes the hooks of a model tree."""

    def __init__(self, core, granularity=0, linear=None):
        self.core, self.linear = core, linear
        self.granularity = granularity
        self.forward_hooks = []

    def install(self, root):
        """Hooks on ``root`` for the whole call, and on every module with parameters that come and go."""
        self._install(root)
        self._first(root, _native._C.EnterHook(self.core, -1, self.linear))
        # After the root's own unit, which the end of the whole call would forget.
        self._hook(root.register_forward_hook, _native._C.LeaveHook(self.core, -1, self.linear))

    def _install(self, module):
        params, whole = unit_parameters(module, self.granularity)
        if any(not p.ds_persist for p in params):
            unit = self.core.gatherer.add_unit(type(module).__name__, [p.ds_handle for p in params])
            module.__dict__["_ds_hook_unit"] = EngineLink(self.core, unit)
            self._first(module, _native._C.EnterHook(self.core, unit, self.linear))
            self._hook(module.register_forward_hook, _native._C.LeaveHook(self.core, unit, self.linear))
        if z3_leaf_module(module):
            self._first(module, _refuse_constant_inputs)
        if whole:
            return
        for child in module.children():
            if child.__dict__.get("_ds_hook_unit") is None:
                self._install(child)

    def _first(self, module, hook):
        """Before the hooks that the module has: those may compute with its weights, as spectral_norm does."""
        self._hook(module.register_forward_pre_hook, hook)
        module._forward_pre_hooks.move_to_end(self.forward_hooks[-1].id, last=False)

    def _hook(self, register, hook):
        self.forward_hooks.append(register(hook, **_HOOK_OPTIONS))

    def remove(self, root=None):
        for handle in self.forward_hooks:
            handle.remove()
        self.forward_hooks.clear()
        for module in root.modules() if isinstance(root, torch.nn.Module) else ():
            module.__dict__.pop("_ds_hook_unit", None)
