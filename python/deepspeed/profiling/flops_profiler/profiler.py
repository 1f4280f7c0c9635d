"""``FlopsProfiler`` and ``get_model_profile``: what one pass of a model costs, as figures and as a report."""

import contextlib
import os

import torch

from deepspeed._compat import when_call_fails
from deepspeed.profiling.flops_profiler import report
from deepspeed.profiling.flops_profiler.module_counts import ModuleCounts


class FlopsProfiler:
    """Measures the passes of ``model`` between ``start_profile`` and ``stop_profile``.

    ``ds_engine``: the engine that trains it, for the numbers of ranks and the batch size in the report; None: one rank.
    ``recompute_fwd_factor``: forward passes that activation checkpointing adds to a backward, as the report assumes.
    ``flops``, ``macs``, ``params``: the totals of forward when the profile was stopped; ``duration``: its seconds;
    ``backward_flops``, ``recomputed_flops``: of backward, and of forward that ran again in it, as counted.
    ``phases``: seconds of forward, backward and step in the engine, where it has measured them.
    """

    def __init__(self, model, ds_engine=None, recompute_fwd_factor=0.0):
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.counts = ModuleCounts(model)
        self.started = False
        self.phases = None
        self._open = contextlib.ExitStack()
        self.reset_profile()

    def start_profile(self, ignore_list=None):
        """Counts from now on, from zero. ``ignore_list``: modules or their classes that are left out."""
        self._close()
        self.counts.ignored = tuple(ignore_list or ())
        self.reset_profile()
        self._open.enter_context(self.counts.watch())
        for handle in when_call_fails(self.model, self._close):
            self._open.callback(handle.remove)
        self.started = True

    def stop_profile(self):
        """Ends the counting; the totals stay. The model has no hook and torch no mode of the profiler any more."""
        self._close()
        self.take_totals()

    def _close(self):
        self.started = False
        self._open.close()

    def take_totals(self):
        """``flops`` and the others become what was counted."""
        total = self.counts.total
        self.flops, self.macs, self.duration = total.flops, total.macs, total.seconds
        self.backward_flops, self.recomputed_flops = self.counts.backward, self.counts.recomputed
        self.params = sum(self.parameters_of(self.model))

    def reset_profile(self):
        """Forgets what was counted."""
        self.counts.clear()
        self.take_totals()

    def end_profile(self):
        """Stops, and forgets the figures of modules. The totals stay."""
        self._close()
        self.counts.clear()

    def parameters_of(self, module):
        """The whole sizes of the parameters of ``module``, each once, without those of ignored modules."""
        owners = [module]
        for one in owners:  # which grows
            owners += [child for child in one.children() if not self.counts.is_ignored(child)]
        found = {id(param): param for one in owners for param in one._parameters.values() if param is not None}
        return [getattr(param, "ds_numel", param.numel()) for param in found.values()]

    def _total(self, name, as_string, text):
        if self.started:
            self.take_totals()
        return text(getattr(self, name)) if as_string else getattr(self, name)

    def get_total_flops(self, as_string=False):
        """The flops of forward."""
        return self._total("flops", as_string, report.number)

    def get_total_macs(self, as_string=False):
        """The multiply-accumulates of forward."""
        return self._total("macs", as_string, report.macs)

    def get_total_duration(self, as_string=False):
        """The seconds of forward."""
        return self._total("duration", as_string, report.duration)

    def get_total_params(self, as_string=False):
        """The number of parameters: of experts those of this rank, of a pipeline those of this stage."""
        return self._total("params", as_string, report.number)

    def is_expert_tensor_parallelism_enabled(self):
        """Whether ranks that split single weights split experts, too."""
        return any(getattr(one, "enable_expert_tensor_parallelism", False) for one in self.model.modules())

    def print_model_profile(self, profile_step=1, module_depth=-1, top_modules=1, detailed=True, output_file=None):
        """Prints the report, or writes it to ``output_file``. ``module_depth``: the deepest modules in the table of top
        modules, -1 for all; ``detailed``: with a line for each module."""
        text = report.summary(self, profile_step) + report.aggregated(self, module_depth, top_modules)
        text += report.tree(self) if detailed else ""
        if output_file is None:
            print(text + report.END)
            return
        os.makedirs(os.path.dirname(output_file) or ".", exist_ok=True)
        with open(output_file, "w", encoding="utf-8") as file:
            file.write(text + report.END + "\n")

    def print_model_aggregated_profile(self, module_depth=-1, top_modules=1):
        """Prints the ``top_modules`` classes of modules of each depth by parameters, MACs and latency."""
        print(report.aggregated(self, module_depth, top_modules), end="")


def get_model_profile(
    model,
    input_shape=None,
    args=[],  # noqa: B006
    kwargs={},  # noqa: B006
    print_profile=True,
    detailed=True,
    module_depth=-1,
    top_modules=1,
    warm_up=1,
    as_string=True,
    output_file=None,
    ignore_modules=None,
    mode="forward",
):
    """Runs ``model`` in evaluation mode and returns ``(flops, macs, params)`` of one pass.

    Args:
        input_shape: of one random tensor, the only positional argument; else ``args`` and ``kwargs`` are passed.
        print_profile, detailed, module_depth, top_modules, output_file: see ``FlopsProfiler.print_model_profile``.
        warm_up: passes before those that are measured: one for the time, and one for the operators.
        as_string: texts such as ``"866.08 M"`` instead of numbers.
        ignore_modules: modules or their classes that are left out.
        mode: ``"forward"`` calls the model, ``"generate"`` its method ``generate``.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"get_model_profile profiles a torch.nn.Module, got {type(model).__name__}")
    if mode not in ("forward", "generate"):
        raise ValueError(f"get_model_profile(mode={mode!r}): mode is 'forward' or 'generate'")
    if mode == "generate" and not hasattr(model, "generate"):
        raise ValueError(f"get_model_profile(mode='generate'): {type(model).__name__} has no method generate()")
    args, kwargs = list(args or ()), dict(kwargs or {})
    if input_shape is not None:
        if not isinstance(input_shape, (tuple, list)) or not input_shape:
            raise ValueError(
                f"get_model_profile(input_shape={input_shape!r}): a tuple of sizes, such as (1, 3, 224, 224)"
            )
        like = next((param for param in model.parameters() if param.is_floating_point()), torch.empty(0))
        args = [torch.rand(tuple(input_shape), dtype=like.dtype, device=like.device)]
    elif not args and not kwargs:
        raise ValueError("get_model_profile needs input_shape=, args= or kwargs=: what the model is called with")
    profiler = FlopsProfiler(model)
    counts, training = profiler.counts, {one: one.training for one in model.modules()}

    def run():
        with counts.call_of_model() if mode == "generate" else contextlib.nullcontext():
            (model.generate if mode == "generate" else model)(*args, **kwargs)

    counts.ignored = tuple(ignore_modules or ())
    try:
        model.eval()
        for _ in range(warm_up):
            run()
        for what in ({"operators": False}, {"times": False}):  # counting takes time of its own
            with counts.watch(**what):
                run()
    finally:
        for one, was in training.items():
            one.training = was
    profiler.take_totals()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    profiler.end_profile()
    totals = profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params
    return tuple(total(as_string) for total in totals)
