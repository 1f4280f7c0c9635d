"""``torch.compile`` of a model whose parameters come and go.

Each unit of gathering is compiled by itself. Its hooks stay outside of the compiled code; those of the modules in it,
which are for calls outside of the unit, do nothing while torch traces.
"""

import functools

import torch

from deepspeed import _native
from deepspeed._compat import is_compiling

_HOOKS = (_native._C.EnterHook, _native._C.LeaveHook)


class _CompiledForward:
    """A forward, compiled. A copy or a pickle of it is the forward itself."""

    def __init__(self, forward, options):
        functools.update_wrapper(self, forward)
        self.forward, self.run = forward, torch.compile(forward, **options)

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)

    def __reduce__(self):
        return _same, (self.forward,)


class _EagerHook:
    """A hook that runs where nothing is compiled."""

    def __init__(self, hook):
        self.hook = hook

    def __call__(self, *args, **kwargs):
        return None if is_compiling() else self.hook(*args, **kwargs)

    def __reduce__(self):
        return _same, (self.hook,)


def _same(value):
    return value


def _runs_alone(module):
    """Whether no module inside has to gather parameters while ``module`` runs."""
    return not any("_ds_hook_unit" in one.__dict__ for one in module.modules() if one is not module)


def units_of(root, gathering):
    """The modules of ``root`` that are compiled: those that gather all of their parameters when they are called. Where
    parameters never leave, the whole model is one."""
    if gathering.core.gatherer.has_all:
        return [root]
    found, open_modules = [], [root]
    while open_modules:
        module = open_modules.pop()
        is_unit = "_ds_hook_unit" in module.__dict__
        if is_unit and (module in gathering.hooks.blocks or _runs_alone(module)):
            found.append(module)
        else:
            open_modules.extend(module.children())
    return found


def compile_units(root, gathering, **options):
    """Compiles the units of ``root`` in place. ``options``: arguments of ``torch.compile``."""
    if not gathering.core.gatherer.has_all and not gathering.hooks.by_blocks:
        gathering.hooks.by_blocks = True
        gathering.hooks.remove(root)
        gathering.setup_zero_stage3_hooks()
    for unit in dict.fromkeys(units_of(root, gathering)):
        for inner in unit.modules():
            if inner is unit:
                continue
            for hooks in (inner._forward_pre_hooks, inner._forward_hooks):
                for key, hook in hooks.items():
                    if isinstance(hook, _HOOKS):
                        hooks[key] = _EagerHook(hook)
        unit.__dict__["forward"] = _CompiledForward(unit.forward, options)
