"""Saves a step that fails, as the section ``postmortem`` asks, so that ``ds_postmortem`` can run it again
(``deepspeed.diagnosis``).

A bundle is a folder of one file for each rank. Each rank writes its own and calls no collective: of a rank that has
raised an error the others may know nothing.
"""

import collections
import math
import os
import platform
import re
import shutil
import statistics
import sys
import threading
import time
import traceback
import weakref

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.read.weights import capture
from deepspeed.checkpoint.write.file_writer import PreparedTorch, WriterOptions, replace_file
from deepspeed.comm.stacks import stack_text
from deepspeed.comm.timed import suppress_logging
from deepspeed.comm.watch import flight_record, tell_when_asked
from deepspeed.config.secrets import shown
from deepspeed.engine import checks
from deepspeed.engine.members import Part, engine_parts, member
from deepspeed.engine.scheduling import mean_loss
from deepspeed.log import logger, warning_once
from deepspeed.pipe.position import LAYER
from deepspeed.zero.audit import tolerance
from deepspeed.zero.nested import tensors_in
from deepspeed.zero.parameters.param_ranks import own_extent, ranks_of
from deepspeed.zero.parameters.sharded_parameter import is_sharded

VERSION = 2  # of the files
BUNDLE = re.compile(r"\d{8}-\d{6}-step\d{8}")  # the begin of the run, and the steps made before the one that failed
_REMEMBERED, _ENOUGH = 64, 8  # losses of which a spike is told by their median, and the fewest of them
_WAITED = re.compile(r"has not come for|timed? ?out", re.I)  # in an error: a rank has given up waiting for another
_PLAIN = (type(None), bool, int, float, str)


@engine_parts.add("_postmortem")
class Postmortem(Part):
    """A part of the engine. Between failures it keeps references to the micro-batches of this step and of the last one,
    and the states of random number generators before each."""

    on = frozenset()  # failures that are saved
    _failing = None  # the failure that the last step had, of "nonfinite" and "spike": only the first of a row is saved
    _loss = _saved = _kind = None  # the mean loss of this step; the step that was saved last, and why

    def start(self):
        engine, section = self.engine, self.engine._config.postmortem_config
        if not section.on or not engine._trains:
            return
        if engine.core.expects_steps or engine.core.strategy_states():
            raise ValueError(
                "postmortem.on: zenflow and super_offload update masters and states beside the training, so when a "
                "step fails, they are not those of its weights. Leave postmortem.on out, or leave them out"
            )
        self._dir = engine._outputs.paths["postmortem.dir"]
        self.section, self.on, self._lock = section, frozenset(section.on), threading.RLock()
        self._forwards = []  # for each of _micro the number of its forward; True: a backward has reached it
        self._micro, self._before, self._losses = [], [], collections.deque(maxlen=_REMEMBERED)
        self._pipelined, self._passes = hasattr(engine, "train_batch"), []
        checks.check_folder(engine, self._dir, "postmortem.dir")
        begin = [time.strftime("%Y%m%d-%H%M%S")]
        if engine.world_size > 1:
            with suppress_logging():
                dist.broadcast_object_list(begin, 0)
        self._run, self._facts = begin[0], self._facts_of_run()
        engine.stepping.inspect = self._inspect
        if "exception" in self.on:
            _see_uncaught(self)
        if "hang" in self.on:
            tell_when_asked(self)

    def stop(self):
        self.on = frozenset()

    # ---- a step under way --------------------------------------------------------------------------------------------
    def see_inputs(self, inputs, kwargs):
        """Keeps the inputs of a forward that trains. In a pipeline ``inputs`` is the pair that a stage has loaded."""
        if self.on:
            state = None if self._pipelined else capture()
            self._note_trained()
            self._micro.append({"inputs": inputs, "kwargs": kwargs, "rng": state, "more": (), "loss": None})
            self._forwards.append(None)

    def forwarded(self, number):
        if self.on:
            self._forwards[-1] = number

    def _note_trained(self):
        """Notes which micro-batches a backward has reached: the gradients of this step are of these alone."""
        if not self._pipelined:
            reached = self.engine._window.reached
            self._forwards = [True if number is True or number in reached else number for number in self._forwards]

    def _trained(self):
        """The micro-batches of this step that count, in a pipeline all of them; all, too, where backward reaches none
        that the engine knows, since the script has hidden the outputs of its model."""
        self._note_trained()
        found = [one for one, number in zip(self._micro, self._forwards) if number is True]
        return found if found and not self._pipelined else list(self._micro)

    def before_micro_step(self, boundary):
        if self.on:
            self._note_trained()

    def around(self, phase):
        """Stages take turns between micro-batches, so the random numbers of each pass are saved by themselves."""
        if self.on and self._pipelined and phase == "forward" and torch.is_grad_enabled():
            self._passes.append(capture())

    @member
    def keep_for_postmortem(self, *values):
        """Values that the loss of the micro-batch needs beside what ``forward`` got, such as labels: ``ds_postmortem
        --step`` passes them on, after the arguments of ``forward``. Called after ``forward``; by reference."""
        if self.on and self._micro:
            self._micro[-1]["more"] = values

    def see_loss(self, loss, parts):
        """Keeps the loss of a backward, before its division by ``parts``."""
        if self.on and self._micro:
            self._micro[-1].update(loss=loss.detach(), parts=parts)

    def before_step(self):
        if "spike" in self.on:
            self._loss = mean_loss(self.engine)
            if self._loss is None:
                warning_once("postmortem.on: spikes are seen in losses of engine.backward(loss), which is not called")

    def _inspect(self, norm, applied=True):
        """All ranks, before an update (``applied``) or after one that was skipped: weights are those of the step."""
        scaler, kind = self.engine.stepping.scaler, None
        if not math.isfinite(norm):
            kind = None if scaler is not None and scaler.dynamic else "nonfinite"
        elif self._loss is not None and len(self._losses) >= _ENOUGH:
            usual = statistics.median(self._losses)
            kind = "spike" if self._loss > self.section.spike_factor * usual > 0 else None
        first, self._failing = kind != self._failing, kind
        if kind is None and self._loss is not None and math.isfinite(self._loss):
            self._losses.append(self._loss)
        if first and kind in self.on:
            self._save(kind, norm=norm, gradients=applied)

    def after_step(self):
        if self.on:
            self._before, self._micro, self._passes = self._trained(), [], []
            self._forwards = []

    def failed(self, error):
        """An error on this rank, in the engine or (``sys.excepthook``) anywhere; it is saved once."""
        if not self.on or not isinstance(error, Exception) or _is_saved(error):
            return
        error.in_postmortem = True
        kind = "hang" if "hang" in self.on and _WAITED.search(str(error)) else "exception"
        if kind in self.on:
            self._save(kind, error)
        # The script may catch the error and go on: gradients of earlier micro-batches are still there.
        self._note_trained()
        kept = [] if self._pipelined else [one for one, done in zip(self._micro, self._forwards) if done is True]
        self._micro, self._forwards, self._passes = kept, [True] * len(kept), []

    def asked(self):
        """Another rank asks where this one is, since a collective has failed. Where this one is in none, it is the one
        that is missing. The answer does not wait for the file."""
        waits = any(flight["state"] == "under way" for flight in flight_record())
        if "hang" in self.on and not waits and self._saved != self.engine.global_steps:
            threading.Thread(target=self._save, args=("hang",), daemon=True).start()

    # ---- the bundle --------------------------------------------------------------------------------------------------
    def _save(self, kind, error=None, norm=None, gradients=False):
        engine, section, limit = self.engine, self.section, self.section.max_bytes
        rank, step = engine.global_rank, engine.global_steps
        folder = os.path.join(self._dir, f"{self._run}-step{step:08d}")
        with self._lock:
            # A later hang does not replace the file of this step, which says where the rank was when it was missing. An
            # error replaces the file of a hang. A pipeline that has failed raises the same failure again.
            again = kind == "hang" or (self._pipelined and self._kind != "hang")
            if again and self._saved == step:
                return
            self._saved, self._kind = step, kind
            try:
                content = self._content(kind, error, norm, gradients)
                if limit is not None and _bytes_of(content) > limit:
                    content.update(left_out=f"it would be larger than postmortem.max_bytes, {limit}", **_NOTHING)
                    if _bytes_of(content) > limit:
                        raise OSError(f"its micro-batches are larger than postmortem.max_bytes, {limit}")
                os.makedirs(folder, exist_ok=True)
                path = os.path.join(folder, f"rank{rank:05d}.pt")
                replace_file(PreparedTorch(content), path, WriterOptions(sync=False))
                if rank == 0 or engine.local_rank == 0:
                    known = sorted(name for name in os.listdir(self._dir) if BUNDLE.fullmatch(name))
                    for name in known[: -section.keep]:
                        shutil.rmtree(os.path.join(self._dir, name), ignore_errors=True)
            except Exception as failure:  # what has failed the step is told to the caller, not this
                logger.warning("[Rank %d] postmortem: step %d (%s) is not saved: %s", rank, step, kind, failure)
                return
        lacks = f", without weights: {content['left_out']}" if content["left_out"] else ""
        logger.warning("[Rank %d] postmortem: step %d (%s) is in %s%s", rank, step, kind, folder, lacks)

    def _content(self, kind, error, norm, gradients):
        """A dict of plain values and tensors, views where possible. Of a hang without a call of the core, which may be
        in the middle of one."""
        engine = self.engine
        changes = {
            "random_ltd": engine.random_ltd_scheduler,
            "dynamic_batching": engine._dynamic.batches,
            "convert_to_pld": engine._layer_dropping._plan,
        }
        if self._pipelined:
            for one, loss in zip(self._micro, engine.fwd_outputs):
                one["loss"] = loss
        content = {
            **self._facts,
            "kind": kind,
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "error_type": None if error is None else type(error).__name__,
            "traceback": None if error is None else "".join(traceback.format_exception(error)),
            "stacks": stack_text(),
            "flights": [{key: flight[key] for key in ("group", "call", "tag", "state")} for flight in flight_record()],
            "time": time.time(),
            "step": engine.global_steps,
            "loss_scale": engine.stepping.loss_scale,
            "average": engine.gradient_average,
            "in_eval": [name for name, module in engine.module.named_modules() if not module.training],
            "norm": norm,
            "mean_loss": self._loss,
            "usual_loss": statistics.median(self._losses) if self._losses else None,
            "micro_batches": [_plain(one) for one in (self._trained() if error is None else self._micro)],
            "before": [_plain(one) for one in self._before],
            "passes": list(self._passes),
            "accumulation": engine.gradient_accumulation_steps(),
            "schedule": engine._plans.used() if self._pipelined else None,
            "layer": engine.module.position.words[LAYER] - 1 if self._pipelined else -1,  # that runs; -1: none
            "changed_by": [name for name, on in changes.items() if on is not None],
            "local_nonfinite": [],
            "left_out": "a hang saves none" if kind == "hang" else None,
            **_NOTHING,
        }
        if kind == "hang":
            return content
        run = engine._checkpoints.run_state()
        named = run.weights.named
        content["local_nonfinite"] = engine.core.local_nonfinite()
        content["weights"] = {
            named(name): (own_extent(param)[0], param.ds_tensor if is_sharded(param) else param.data)
            for name, param in run.weights.unique()
        }
        content["buffers"] = {named(name): buffer for name, buffer in run.weights.buffers.items()}
        content["states"] = run.states.named(lambda index: True, in_pieces=False).tensors
        if gradients:
            content["gradients"] = self.gradients()
        return content

    def _facts_of_run(self):
        engine, run = self.engine, self.engine._checkpoints.run_state()
        params = [param for group in engine.trained_groups for param in group]
        experts = any(ranks_of(param) is not None for param in run.weights.params.values())
        return {
            "version": VERSION,
            "rank": engine.global_rank,
            "world_size": engine.world_size,
            "dp_ranks": list(run.ranks.dp_ranks),
            "axes": {
                **{key[:2]: degree for key, degree in run.ranks.degrees.items()},
                "sp": engine.sequence_parallel_size or 1,
                "ep": 1 + experts,
            },
            "pipeline": self._pipelined,
            "groups": [
                {"names": [engine.param_names.get(param, "") for param in group], "options": _plain(options)}
                for group, options in zip(engine.trained_groups, run.options)
            ],
            "stage": engine.zero_optimization_stage(),
            "reduces_each": engine._stage_policy.reduces_each_micro_step,
            "config": shown(engine._config.native.values()),
            "given": _plain(shown(engine.config)),
            "machine": {
                "host": platform.node(),
                "processor": platform.machine(),
                "device": engine.device.type,
                "torch": str(torch.__version__),
                "threads": torch.get_num_threads(),
            },
            "before_sum": engine.core.predivide,
            "spike_factor": self.section.spike_factor,
            "tolerance": tolerance({kind for param in params for kind in (param.dtype, engine.kept_grad_dtype(param))}),
        }

    def gradients(self):
        """(name, offset, numel) -> (2-norm, sum) of each piece that this rank owns of the reduced gradients."""
        core, found = self.engine.core, {}
        for number, (index, offset, numel) in enumerate(core.pieces()):
            grad = core.piece_tensor("grad", 0, number) if numel else None
            if grad is not None:
                wide = grad.detach().double()
                found[self.engine.stepping.names[index], offset, numel] = wide.norm().item(), wide.sum().item()
        return found


_NOTHING = {"weights": {}, "buffers": {}, "states": {}, "gradients": {}}


def _bytes_of(content):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(content))


def _plain(value):
    """``value`` of plain data and tensors; of anything else its class, as a text, which replays refuse."""
    if torch.is_tensor(value):
        return value.detach()
    if isinstance(value, (list, tuple)):
        made = [_plain(item) for item in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (torch.dtype, torch.Size, *_PLAIN)):
        return value
    return f"<not saved: {type(value).__module__}.{type(value).__qualname__}>"


def _is_saved(error):
    """Whether it is, or is told again of, an error that ``failed`` has had."""
    while error is not None and not getattr(error, "in_postmortem", False):
        error = error.__cause__
    return error is not None


def _see_uncaught(part):
    """Errors that end the script are errors of its step."""
    known, before = weakref.ref(part), sys.excepthook

    def hook(kind, error, trace):
        if known() is not None:
            known().failed(error)
        before(kind, error, trace)

    sys.excepthook = hook
