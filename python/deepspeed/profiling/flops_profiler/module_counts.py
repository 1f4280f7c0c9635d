"""The cost of each module of a model: hooks of modules tell which of them runs, a mode counts the operators."""

import contextlib

from torch import is_grad_enabled
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from deepspeed._compat import TORCH2, in_backward, uncompiled
from deepspeed.profiling.op_costs import CountedOps
from deepspeed.utils.timer import device_time

_ALWAYS = {"always_call": True} if TORCH2 else {}


class ModuleCost:
    """The sums of all calls of one module, with those of the modules inside of it."""

    def __init__(self):
        self.macs = self.flops = self.calls = 0
        self.seconds = 0.0


class _Call:
    """A call of a module that has not returned. ``again``: it is part of a backward; ``counts``: it is not, and of no
    module that is ignored."""

    def __init__(self, module, again, counts, begin):
        self.module, self.again, self.counts, self.begin = module, again, counts, begin


class ModuleCounts:
    """The costs of the modules of ``model``. ``total``: of the model, also where parts of it were called alone;
    ``backward``, ``recomputed``: flops of backward, and of forward that ran again in it; ``not_counted``: names of
    operators without a formula and how often they ran."""

    def __init__(self, model):
        self.model = model
        self._modules, self._times = set(), True  # of the model, while it is watched; whether they are timed
        self.ignored = ()  # modules, and classes of modules, whose calls count nothing
        self._ops = CountedOps(self._add)
        self.clear()

    def clear(self):
        self.costs, self.total = {}, ModuleCost()
        self.backward = self.recomputed = 0
        self._calls = []
        self._ops.clear()

    @property
    def not_counted(self):
        return self._ops.not_counted

    def divide(self, count):
        """All figures become those of one of ``count`` equal passes."""
        for one in (self.total, *self.costs.values()):
            one.macs, one.flops, one.calls = one.macs // count, one.flops // count, one.calls // count
            one.seconds /= count
        self.backward, self.recomputed = self.backward // count, self.recomputed // count

    def is_ignored(self, module):
        return any(module is one or isinstance(one, type) and isinstance(module, one) for one in self.ignored)

    @contextlib.contextmanager
    def watch(self, operators=True, times=True):
        """Inside, operators are counted and the calls of modules timed, or one of both; compiled code runs as it was
        written, so that its operators are seen. Hooks are torch's for all modules: experts with hooks of their own run
        one by one."""
        self._modules, self._times = set(self.model.modules()), times
        with contextlib.ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, **_ALWAYS).remove)
            stack.enter_context(uncompiled())
            if operators:
                stack.enter_context(self._ops)
            yield self

    @contextlib.contextmanager
    def call_of_model(self):
        """Inside, what runs belongs to the model, as in a call of it."""
        self._enter(self.model, ())
        try:
            yield
        finally:
            self._leave(self.model, (), None)

    def _enter(self, module, inputs):
        if module not in self._modules:
            return
        again, within = in_backward(), not self._calls or self._calls[-1].counts
        counts = within and not again and not self.is_ignored(module)
        self._calls.append(_Call(module, again, counts, device_time() if counts and self._times else 0.0))

    def _leave(self, module, inputs, output):
        if all(call.module is not module for call in self._calls):  # it began before the hooks were there
            return
        call = self._calls.pop()
        while call.module is not module:  # in torch 1.13 a call that has raised an error does not tell of its end
            call = self._calls.pop()
        if not call.counts or not self._times:
            return
        seconds = device_time() - call.begin
        of_model = [self.total] if not any(outer.counts for outer in self._calls) else []
        inside_itself = any(outer.module is module for outer in self._calls)
        for cost in [*of_model, *([] if inside_itself else [self._cost(module)])]:
            cost.seconds += seconds
            cost.calls += 1

    def _cost(self, module):
        return self.costs.setdefault(module, ModuleCost())

    def _add(self, name, cost, operands, out):
        if not cost.flops:
            return
        if in_backward():
            # A checkpoint runs its segment with gradients.
            if is_grad_enabled() or self._calls and self._calls[-1].again:
                self.recomputed += cost.flops
            else:
                self.backward += cost.flops
        elif self._calls and self._calls[-1].counts:
            modules = dict.fromkeys(call.module for call in self._calls)
            for one in (self.total, *map(self._cost, modules)):
                one.macs += cost.macs
                one.flops += cost.flops
