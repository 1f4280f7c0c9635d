"""The section ``flops_profiler``: one step is counted, module by module, and told of."""

import contextlib
import os
import weakref

import torch

from deepspeed._native import DeepSpeedConfigError
from deepspeed.engine import checks
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import logger
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.utils.timer import device_time

_PHASES = ("forward", "backward", "step")


@engine_parts.add("_flops_profiling")
class FlopsProfiling(Part):
    """A part of the engine, which gets ``flops_profiler`` while the section is enabled. All figures are means of the
    micro-batches of the step; rank 0 prints its own."""

    profiler = None  # until the step is done, or always where the section is off
    _begun = None  # when the step of this micro-step began

    def start(self):
        engine = self.engine
        if not engine.flops_profiler_enabled() or engine.autotuning_enabled():  # an experiment measures the same steps
            return
        self._step = engine.flops_profiler_profile_step()
        path = self._path = engine._outputs.paths.get("flops_profiler.output_file")
        if path is not None:  # the report comes late, so that its file is checked now
            checks.refuse_on_all(engine, _problem(path) if engine.global_rank == 0 else None, DeepSpeedConfigError)
        factor = engine.flops_profiler_recompute_fwd_factor()
        self.profiler = engine.flops_profiler = FlopsProfiler(engine.module, engine, factor)
        self._seconds = dict.fromkeys(_PHASES, 0.0)
        self._unreached = weakref.finalize(engine, _tell_unreached, self._step)

    def stop(self):
        if self.profiler is not None:
            self._unreached()
            self.profiler = None

    def _counts_now(self):
        return self.profiler is not None and self.engine.global_steps == self._step and torch.is_grad_enabled()

    def around(self, phase):
        return self._inside(phase) if self._counts_now() else None

    @contextlib.contextmanager
    def _inside(self, phase):
        counts, begin = self.profiler.counts, device_time()
        try:
            with counts.watch():
                yield
        except BaseException:
            self._seconds = dict.fromkeys(_PHASES, 0.0)
            counts.clear()
            raise
        self._seconds[phase] += device_time() - begin

    def before_micro_step(self, boundary):
        self._begun = device_time() if self._counts_now() else None

    def after_micro_step(self, boundary):
        if self._begun is None:
            return
        self._seconds["step"] += device_time() - self._begun
        self._begun = None
        if boundary:
            self._finish()

    def _finish(self):
        engine, profiler, self.profiler = self.engine, self.profiler, None
        self._unreached.detach()
        passes = engine._window.last_micro_batches
        profiler.counts.divide(passes)
        profiler.phases = {phase: seconds / passes for phase, seconds in self._seconds.items()}
        profiler.take_totals()
        try:
            if engine.global_rank == 0:
                profiler.print_model_profile(
                    self._step,
                    engine.flops_profiler_module_depth(),
                    engine.flops_profiler_top_modules(),
                    engine.flops_profiler_detailed(),
                    self._path,
                )
        except OSError as error:
            logger.warning(f"flops_profiler: the profile was not written: {error}. The training goes on")
        finally:
            profiler.end_profile()


def _problem(path):
    """The reason why the report cannot be written to ``path``, or None. The file is not made."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        return f"flops_profiler.output_file {path!r}: its folder cannot be made: {error}"
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        return f"flops_profiler.output_file {path!r} cannot be written: name a file in a folder that can"
    return None


def _tell_unreached(step):
    logger.warning(
        f"flops_profiler.profile_step is {step}, and the training has ended before that step was done: there is no "
        "profile. Steps are counted from 0."
    )
