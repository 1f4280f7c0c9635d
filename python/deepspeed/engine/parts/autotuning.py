"""The section ``autotuning``, in an experiment of the tuner: some steps are measured, then the run ends."""

import contextlib
import functools
import json
import os
import sys
import time

import torch

from deepspeed import _compat
from deepspeed.accelerator import get_accelerator
from deepspeed.engine import checks
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import log_dist, logger
from deepspeed.registry import load_target
from deepspeed.utils.init_on_device import copy_on_meta
from deepspeed.utils.timer import device_time
from deepspeed.zero.nested import replace, tensors_in
from deepspeed.zero.parameters.sharded_parameter import is_sharded

PLANNER = "deepspeed.planner:plan"
CANDIDATES, PLANS = "candidates.json", "plans.json"  # beside the facts about the model


@engine_parts.add("_autotuning", order=2)
class Autotuning(Part):
    """A part of the engine, which ends the run while ``autotuning.enabled``.

    It measures the steps from ``start_profile_step`` to ``end_profile_step`` and writes ``metric_path``; with
    ``model_info.profile`` it writes facts about the model in the first forward instead, and asks the planner about the
    configurations of the file ``candidates.json``. All ranks end with exit code 0 behind the same step.
    """

    _begun = _forward = _step = _meta = _sample = None

    def __init__(self, engine):
        super().__init__(engine)
        self.enabled, self.asks = engine.autotuning_enabled(), engine.autotuning_profile_model_info()
        self.counts_flops = self.enabled and not self.asks and engine.autotuning_metric() == "flops"
        self._seconds, self._steps, self._samples = dict.fromkeys(("forward", "step", "latency"), 0.0), 0, 0

    def see_model(self, model):
        """Before the engine changes ``model``: the planner gets it as it came, on the device ``meta``."""
        if self.asks and self.engine.global_rank == 0:
            self._meta = copy_on_meta(model)

    def start(self):
        if not self.enabled:
            return
        engine = self.engine
        self._first, self._end = engine.autotuning_start_profile_step(), engine.autotuning_end_profile_step()
        if self.counts_flops:  # step 1 is counted, which takes time
            self._first = min(max(self._first, 2), self._end - 1)
        if self.asks:
            self._path = engine.autotuning_model_info_path() or "model_info.json"
            checks.check_file(engine, self._path, "autotuning.model_info_path")
            return
        self._path = engine.autotuning_metric_path() or "metrics.json"
        checks.check_file(engine, self._path, "autotuning.metric_path")
        log_dist(f"autotuning.enabled: the run ends before step {self._end}, counted from 0", ranks=[0])
        engine._step_log.phases.listeners.append(self)
        self._before = sys.excepthook
        sys.excepthook = self._hook = functools.partial(_tell_of_memory, self._path, self._before)

    def stop(self):
        if self.enabled and not self.asks and sys.excepthook is self._hook:
            sys.excepthook = self._before

    # ---- some steps --------------------------------------------------------------------------------------------------
    def begin_phase(self, name):
        if not self._first <= self.engine.gas_boundary_ctr < self._end or name not in ("forward", "backward"):
            return
        if self._begun is None:
            self._begun = device_time()
            self._forward = self._begun
        elif name == "forward":
            self._forward = device_time()

    def end_phase(self, name):
        if name == "forward" and self._begun is not None:
            self._seconds["forward"] += device_time() - self._forward

    def before_micro_step(self, boundary):
        self._step = device_time() if self._begun is not None else None
        self._seen = self.engine.global_samples

    def after_micro_step(self, boundary):
        if self._begun is None:
            return
        end = device_time()
        self._seconds["step"] += end - self._step
        self._seconds["latency"] += end - self._begun
        self._begun = None
        if boundary:
            self._steps += 1
            self._samples += self.engine.global_samples - self._seen

    def after_step(self):
        """Raises SystemExit when all is measured."""
        if not self.enabled or self.asks or self.engine.gas_boundary_ctr < self._end:
            if self.asks:  # a pipeline, which has no forward of one rank
                self._tell_facts(None, None)
            return
        if self.engine.global_rank == 0:
            _write(self._path, self._metrics())
        raise SystemExit(0)

    def _metrics(self):
        """All times are seconds of a step, as the engine has them: what the script does between a step and the next
        forward is not among them."""
        mean = {name: seconds / self._steps for name, seconds in self._seconds.items()}
        flops, found = self.engine._operations.of_step, {}
        if self.counts_flops:
            found = (
                {"flops": flops / mean["latency"]} if flops else {"failure": "operators of pipelines are not counted"}
            )
        return {
            "throughput": self._samples / self._seconds["latency"],
            **mean,
            "backward": mean["latency"] - mean["forward"] - mean["step"],
            **found,
            "steps": self._steps,
            "train_batch_size": self.engine.train_batch_size(),
            "peak_memory": get_accelerator().max_memory_allocated(),
        }

    # ---- facts about the model ---------------------------------------------------------------------------------------
    def see_inputs(self, inputs, kwargs):
        if self.asks:
            self._sample = inputs, kwargs

    def around(self, phase):
        return self._seeing() if phase == "forward" and self._sample is not None and torch.is_grad_enabled() else None

    @contextlib.contextmanager
    def _seeing(self):
        """A context of the first forward that trains. Raises SystemExit at its end."""
        saved = _SavedBytes()
        with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
            yield
        self._tell_facts(self._sample, saved.bytes)

    def _tell_facts(self, sample, activations):
        engine = self.engine
        if engine.global_rank == 0:
            params = [
                (param, param.ds_numel if is_sharded(param) else param.numel()) for param in engine.module.parameters()
            ]
            self._plan(sample)
            facts = {
                "num_params": sum(numel for _, numel in params),
                "trainable_num_params": sum(numel for param, numel in params if param.requires_grad),
                "activation_mem_per_gpu": activations,
                "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
                "memory_per_gpu": self._memory(),
                "rank": engine.global_rank,
            }
            _write(self._path, facts)
        raise SystemExit(0)

    def _memory(self):
        """Bytes of this rank's device; on the CPU ranks of a host share them."""
        here = int(os.environ.get("LOCAL_SIZE") or self.engine.world_size) if self.engine.device.type == "cpu" else 1
        return get_accelerator().total_memory() // here

    def _plan(self, sample):
        """Asks the planner about each candidate. One that it cannot plan has no forecast, and why."""
        folder = os.path.dirname(self._path)
        if sample is None or not os.path.exists(os.path.join(folder, CANDIDATES)):
            return
        with open(os.path.join(folder, CANDIDATES), encoding="utf-8") as file:
            candidates = json.load(file)
        try:
            plan = load_target(PLANNER)
        except (ImportError, AttributeError) as error:
            logger.warning(f"There is no planner ({error}): experiments alone tell what fits and what is fast")
            return
        found, end = {}, time.monotonic() + self.engine._config.autotuning_config.experiment_timeout / 2
        for name, config in candidates.items():
            if time.monotonic() > end:
                logger.warning(
                    f"Half of autotuning.experiment_timeout is over: {len(found)} configurations are planned"
                )
                break
            batch = _resized(sample, config["train_micro_batch_size_per_gpu"])
            try:
                one = plan(self._meta, config, self.engine.world_size, self._memory(), batch)
                found[name] = {key: getattr(one, key) for key in ("fits", "peak_bytes", "seconds", "why")}
            except Exception as error:  # the model's own code runs there
                found[name] = {"fits": None, "why": f"{type(error).__name__}: {error}"}
        _write(os.path.join(folder, PLANS), found)


class _SavedBytes:
    """Counts what autograd keeps for backward, each storage once, without parameters."""

    def __init__(self):
        self.bytes, self._seen = 0, {}

    def add(self, tensor):
        storage = _compat.storage_of(tensor)
        is_weight = isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
        if not is_weight and storage.data_ptr() not in self._seen:
            self._seen[storage.data_ptr()] = tensor  # lives on, so that no other storage gets its address
            self.bytes += storage.nbytes()
        return tensor


def _resized(sample, count):
    """A micro-batch of ``count`` samples: those of ``sample``, again and again. Tensors whose first dimension is not
    that of the first tensor stay as they are."""
    size = next((one.size(0) for one in tensors_in(sample) if one.dim()), 0)
    rows = torch.arange(count) % max(size, 1)
    return replace(
        sample,
        lambda one: torch.is_tensor(one) and one.dim() > 0 and one.size(0) == size,
        lambda one: one.detach()[rows.to(one.device)],
    )


def _write(path, values):
    """Readers find the whole file or the one before."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1, default=str)
    os.replace(f"{path}.new", path)


def _tell_of_memory(path, before, kind, error, trace):
    """In place of ``sys.excepthook``: an end for want of memory is written where the tuner reads it."""
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        with contextlib.suppress(OSError):
            _write(path, {"failure": f"memory: {text.splitlines()[0] if text else kind.__name__}"})
    before(kind, error, trace)
