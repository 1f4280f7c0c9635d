"""An error of one stage is raised on all ranks, with one text that names stage, rank, layer and micro-batch."""

import contextlib
import time

from deepspeed.engine.members import Part, pipeline_parts, run_hooks
from deepspeed.pipe.failures import PipelineError, retold
from deepspeed.pipe.layers import describe
from deepspeed.pipe.position import INSTRUCTION, LAYER, MICRO_BATCH
from deepspeed.pipe.schedule import kind_of

CAUSE_TIMEOUT = 1.5  # seconds: a message that did not come has a cause, which its rank is about to tell


@pipeline_parts.add("_failures")
class Failures(Part):
    """A part of a pipeline's engine. Gradients of the batch are dropped on every rank, so nothing has moved.

    ``error_propagation`` is the native ``ErrorPropagation``, None where this rank is the only one.
    """

    engine_attributes = ("error_propagation",)

    error_propagation = None

    def number_instructions(self):
        """Names of instructions by the numbers that this rank's ``Position`` gives them, from 1 on."""
        kinds = list(self.engine._INSTRUCTION_MAP)
        self._instruction_numbers = {kind: number for number, kind in enumerate(kinds, 1)}
        return [kind.__name__ for kind in kinds]

    def stand_at(self, command, words):
        micro = command.kwargs.get("micro")
        if micro is None:
            micro = self._number_in(command.kwargs.get("buffer_id"), -1)
        words[INSTRUCTION] = self._instruction_numbers.get(type(command), 0)
        words[MICRO_BATCH], words[LAYER] = micro + 1, 0

    def _number_in(self, buffer_id, none=None):
        """The number of the micro-batch in a buffer; ``none`` where it has none, or there is no such buffer."""
        records = self.engine._execution.records
        held = records[buffer_id] if buffer_id is not None and buffer_id < len(records) else None
        return none if held is None or held.number is None else held.number

    def _position(self, command):
        """The text for the position of an instruction: stage, rank, layer, micro-batch."""
        words = [f"stage {self.engine.stage_id}", f"rank {self.engine.global_rank}"]
        kind = kind_of(command) if command is not None else None
        number, given = self.engine.module.running_layer, getattr(command, "kwargs", {})
        if kind == "ForwardPass" and number is not None:
            words.append(describe(number, self.engine.module._layer_specs[number]))
        elif kind is not None and kind.startswith("Backward"):
            chunk = self.engine.module._chunks[given.get("chunk", 0)]
            words.append(f"layers {chunk.start} to {chunk.stop - 1}" if len(chunk) > 1 else f"layer {chunk.start}")
        micro = given.get("micro", self._number_in(given.get("buffer_id")))
        if micro is not None:
            words.append(f"micro-batch {micro}")
        return ", ".join(words) + (f", {type(command).__name__}" if command is not None else "")

    @contextlib.contextmanager
    def guarded(self):
        """While a batch runs: what goes wrong elsewhere ends this rank's waits."""
        if self.error_propagation is None:
            yield
            return
        if self.error_propagation.error:
            raise PipelineError(f"this pipeline has failed before: {self.error_propagation.error}")
        self.error_propagation.begin()
        try:
            yield
        except Exception as error:
            told = self._cause()
            if told:
                self.error_propagation.await_delivery()
            if told and told not in str(error):
                raise PipelineError(told) from error
            raise
        finally:
            self.error_propagation.end()

    @contextlib.contextmanager
    def told_to_all(self, others_wait=True):
        """Beside a schedule: what goes wrong here is told to the ranks that wait for this one."""
        try:
            yield
        except BaseException as error:
            if not others_wait:
                raise
            self.give_up(None, error)

    def _cause(self, timeout=0.0):
        """The error that a rank has reported; "" if none does so within ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while self.error_propagation is not None and not self.error_propagation.error and time.monotonic() < until:
            time.sleep(0.02)
        return self.error_propagation.error if self.error_propagation is not None else ""

    def give_up(self, command, error):
        """Raises ``error`` with the position of the command; here, and on the ranks that wait for this one."""
        run_hooks(self.engine, "failed", error)  # before others are told: the first that is saved is the cause
        position = self._position(command)
        text = f"the pipeline failed on {position}: {type(error).__name__}: {error}".rstrip(": ")
        waited = isinstance(error, RuntimeError) and (command is None or kind_of(command) not in ("ForwardPass", None))
        told = self._cause(CAUSE_TIMEOUT if waited else 0.0)
        if not told and self.error_propagation is not None:
            if waited and self.error_propagation.where:  # the rank that this one waits for is too slow
                text = f"{text}\nWhere the ranks of this host are: {self.error_propagation.where}"
            told = self.error_propagation.report(text)
        if self.engine.core is not None:
            self.engine.core.clear_grads()
        if not isinstance(error, Exception):
            raise error
        if told and told != text:
            raise PipelineError(told) from error
        raise retold(error, text) from error
