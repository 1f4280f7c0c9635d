"""Gathering of a sharded model: a model's parameters come while its modules run."""

import types
import weakref

from deepspeed.utils.forwarding import answers_from, forwarded
from deepspeed.zero.gathers import linear
from deepspeed.zero.gathers.module_hooks import ModuleHooks
from deepspeed.zero.parameters.sharded_parameter import _acquire, _release, is_sharded


# The cache: gathered parameters that nobody holds, and the memory kept for gathering.
@answers_from(
    {
        "get_param_coordinator": "param_coordinator",
        "empty_partition_cache": "core.gatherer.empty_cache()",
        "partition_all_parameters": "core.gatherer.empty_cache()",
        "release_backward_leftovers": "core.gatherer.empty_cache()",
    }
)
class ModelGathering:
    """Gathers a sharded model's parameters while its modules run. ``engine.optimizer`` itself without an optimizer.

    ``core`` is the native engine that holds the shards. ``granularity``: modules whose sub-modules have fewer elements
    on average are gathered as one unit; 0: never. ``mem_efficient_linear``: see ``zero.linear``.
    """

    def __init__(self, module, core, dp_process_group=None, granularity=0, mem_efficient_linear=True):
        self.module = module
        self.core = core
        self.dp_process_group = dp_process_group
        # The learned order of modules, as callers know it: it is a hint and always valid.
        self.param_coordinator = types.SimpleNamespace(
            is_invalid_trace=lambda: False,
            is_complete_trace=lambda: True,
            is_record_trace=lambda: False,
            _invalidate_trace=lambda: None,
            reset_step=lambda: None,
        )
        keeps_weight = mem_efficient_linear and not core.gatherer.has_all
        self.linear = linear.scope() if keeps_weight else None
        self.hooks = ModuleHooks(core, granularity, self.linear, core.gatherer.max_live // 2)
        self.backward_hooks = []
        self._held = {}  # what pre_sub_module_* has gathered: id of the module -> lists of parameters
        self.mem_efficient_linear = mem_efficient_linear
        # A dropped engine takes its hooks off, too.
        weakref.finalize(self, self.hooks.remove).atexit = False
        if keeps_weight:
            for param in sharded_parameters_of(module):
                param.ds_access.efficient_linear = True
        self.setup_zero_stage3_hooks()

    # Handles of the hooks on modules; a caller may remove them and empty the list.
    forward_hooks = forwarded("hooks.forward_hooks")

    def end_linear(self):
        """Modules of a call that raised, and of a recomputation that torch ended early, are left."""
        if self.linear is not None:
            self.linear.end()

    def setup_zero_stage3_hooks(self):
        for module in self.module.modules():
            module.__dict__.pop("_ds_hook_unit", None)
            # ``(id, parameter)`` of what other modules own and this one uses. A method that copies and pickles with it.
            external = module.__dict__.setdefault("_external_params", {})
            module.ds_external_parameters = types.MethodType(dict.items, external)
        self.hooks.install(self.module)

    def _register_deepspeed_module(self, module, count=[0]):  # noqa: B006 (the published signature; it is not used)
        """Hooks on a module tree again, after a caller has removed them."""
        if module is self.module:
            self.setup_zero_stage3_hooks()
        else:
            self.hooks._install(module)

    _register_hooks_recursively = _register_deepspeed_module

    # ---- for callers that run modules without their hooks ------------------------------------------------------------
    def pre_sub_module_forward_function(self, sub_module):
        """Gathers what the hooks would gather before the forward of ``sub_module``, until the function after it."""
        params, _ = self.hooks.unit_of(sub_module)
        _acquire(params)
        self._held.setdefault(id(sub_module), []).append(params)

    def post_sub_module_forward_function(self, sub_module):
        """Releases what the function before the forward has gathered; what autograd has saved stays valid."""
        held = self._held.get(id(sub_module))
        if not held:
            raise RuntimeError(
                f"nothing is gathered for this {type(sub_module).__name__}: call the pre_sub_module function first"
            )
        _release(held.pop())

    # The same before and after the backward of a module.
    pre_sub_module_backward_function = pre_sub_module_forward_function
    post_sub_module_backward_function = post_sub_module_forward_function

    def mark_persistent_parameters(self, param_threshold, model_threshold):
        """Parameters below ``param_threshold`` elements stay gathered, up to ``model_threshold`` elements in all; the
        others do not. Returns those that stay. Every rank calls it."""
        total, stay, go = 0, [], []
        for param in sharded_parameters_of(self.module):
            fits = param.ds_numel < param_threshold and total + param.ds_numel <= model_threshold
            total += param.ds_numel if fits else 0
            if fits != param.ds_persist:
                (stay if fits else go).append(param)
        _acquire(stay)
        for param in stay + go:
            param.ds_handle.persistent = not param.ds_persist
        _release(go)
        self.hooks.remove(self.module)
        self.setup_zero_stage3_hooks()  # a persistent parameter belongs to no unit
        return [param for param in sharded_parameters_of(self.module) if param.ds_persist]

    def destroy(self):
        self.hooks.remove(self.module)
        self.end_linear()
        for module in self.module.modules():
            module.__dict__.pop("ds_external_parameters", None)


def sharded_parameters_of(module):
    """All stage 3 parameters of a module, each once."""
    return [p for p in dict.fromkeys(module.parameters()) if is_sharded(p)]
