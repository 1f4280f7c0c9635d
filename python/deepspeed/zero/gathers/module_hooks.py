"""Hooks that gather the parameters of a module while it runs. What they do is in csrc/zero/gathers/param_gatherer.h."""

import collections
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


def unit_parameters(module, granularity, whole):
    """``(parameters, whether the module's children belong to it)``; ``whole``: they do."""
    whole = whole or z3_leaf_module(module) or _is_fine_grained(module, granularity)
    params = list(dict.fromkeys(module.parameters(recurse=whole)))
    params += [p for p in module.__dict__.get("_external_params", {}).values() if p not in set(params)]
    return [p for p in params if is_sharded(p)], whole


def _is_called(module):
    """Whether the module has a forward of its own: a ModuleList, for example, has none, and its hooks would not run."""
    return type(module).forward is not torch.nn.Module.forward


def _is_fine_grained(module, granularity):
    """Whether modules inside are so small that gathering them one by one costs more than it saves."""
    if granularity <= 0 or not _is_called(module) or not any(True for _ in module.children()):
        return False
    inside = [m for m in module.modules() if m is not module]
    numel = sum(map(numel_of, module.parameters()))
    return numel / len(inside) < granularity


_MOST_OF_MODEL = 1 / 3  # of the elements of a model: a larger block is not one of many


def repeated_blocks(root, most):
    """The blocks of a model: modules with sub-modules, of one class, side by side in a ``ModuleList`` or the like. Of
    blocks inside of blocks the outer ones, with at most ``most`` elements and a third of the elements of the model."""
    most = min(most, _MOST_OF_MODEL * sum(map(numel_of, root.parameters())))
    found, open_modules = [], [root]
    while open_modules:
        module = open_modules.pop()
        side_by_side = not _is_called(module) or isinstance(module, torch.nn.Sequential)
        classes = collections.Counter(map(type, module.children())) if side_by_side else {}
        for child in module.children():
            parts = any(True for _ in child.children()) and _is_called(child)
            if parts and classes.get(type(child), 0) > 1 and sum(map(numel_of, child.parameters())) <= most:
                found.append(child)
            else:
                open_modules.append(child)
    return found


class ModuleHooks:
    """Installs and removes the hooks of a model tree. ``most``: elements of a block that is gathered as one unit."""

    def __init__(self, core, granularity=0, linear=None, most=0):
        self.core, self.linear, self.most = core, linear, most
        self.granularity, self.blocks = granularity, set()
        self.by_blocks = core.gatherer.looks_ahead
        self.forward_hooks = []

    def install(self, root):
        """Hooks on ``root`` for the whole call, and on every module with parameters that come and go. Where gathering
        takes waiting for other ranks or for other memory, or blocks are compiled, a block of the model comes and goes
        as one."""
        if self.by_blocks and self.granularity == 0:
            self.blocks = set(repeated_blocks(root, self.most))
        self._install(root)
        self._first(root, _native._C.EnterHook(self.core, -1, self.linear))
        # After the root's own unit, which the end of the whole call would forget.
        self._hook(root.register_forward_hook, _native._C.LeaveHook(self.core, -1, self.linear))

    def unit_of(self, module):
        """``(parameters, whether the module's children belong to it)``."""
        return unit_parameters(module, self.granularity, module in self.blocks)

    def _install(self, module, block=-1):
        """``block``: the unit of the block that the module is a part of. Its own unit is for calls outside of that."""
        params, whole = self.unit_of(module)
        is_block, unit = module in self.blocks, block
        if any(not p.ds_persist for p in params):
            unit = self.core.gatherer.add_unit(type(module).__name__, [p.ds_handle for p in params], block)
            module.__dict__["_ds_hook_unit"] = EngineLink(self.core, unit)
            self._first(module, _native._C.EnterHook(self.core, unit, self.linear))
            self._hook(module.register_forward_hook, _native._C.LeaveHook(self.core, unit, self.linear))
        if z3_leaf_module(module):
            self._first(module, _refuse_constant_inputs)
        if whole and not is_block:
            return
        for child in module.children():
            if child.__dict__.get("_ds_hook_unit") is None:
                self._install(child, unit if is_block else block)

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
