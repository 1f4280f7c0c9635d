"""Takes micro-batches from the data."""

import contextlib

import torch

from deepspeed.engine.members import Part, member, pipeline_parts
from deepspeed.pipe.failures import PipelineError
from deepspeed.pipe.profile import tensors_of
from deepspeed.utils.repeating_loader import RepeatingLoader
from deepspeed.zero.nested import move_to_device


@pipeline_parts.add("_batches")
class Batches(Part):
    """A part of a pipeline's engine. Stages that load data have ``data_iterator``, which gives ``(inputs, labels)``."""

    engine_attributes = ("data_iterator", "batch_fn")

    data_iterator = batch_fn = None
    _peeked = ()  # an item that somebody has looked at

    def begin(self):
        """Once this engine knows its stage."""
        if self.engine.training_dataloader is not None and self._loads_data():
            self.data_iterator = iter(RepeatingLoader(self.engine.training_dataloader))  # epoch after epoch

    @member
    def _loads_data(self):
        return self.engine.is_first_stage() or self.engine.is_last_stage()

    @member
    def set_dataloader(self, loader):
        """``train_batch()`` takes micro-batches from ``loader`` from now on."""
        if self._loads_data():
            self.engine.training_dataloader = loader
            self.data_iterator, self._peeked = iter(loader), []

    @member
    def set_dataiterator(self, iterator):
        """``train_batch()`` takes micro-batches from ``iterator`` from now on. Checkpoints have its position where it
        is a loader that tells one."""
        if self._loads_data():
            self.engine.training_dataloader = iterator if hasattr(iterator, "load_state_dict") else None
            self.data_iterator, self._peeked = iterator, []

    @contextlib.contextmanager
    def reading(self, iterator, what):
        """Inside, micro-batches come from ``iterator``; training goes on with its own afterwards."""
        kept = self.data_iterator, self._peeked
        self.data_iterator, self._peeked = iterator, []
        try:
            self.need_data(what)
            yield
        finally:
            self.data_iterator, self._peeked = kept

    @member
    def set_batch_fn(self, fn):
        """``fn(item)`` makes the pair ``(inputs, labels)`` of what the iterator gives."""
        if fn is not None and not callable(fn):
            raise TypeError(f"set_batch_fn({fn!r}): give a function of an item that returns (inputs, labels)")
        self.batch_fn = fn

    def need_data(self, what):
        if self._loads_data() and self.data_iterator is None:
            raise RuntimeError(
                f"{what} on stage {self.engine.stage_id} has no data: pass data_iter=, or training_data= to "
                f"deepspeed.initialize, or call set_dataloader()"
            )

    def peek(self):
        """The next item, which stays the next one."""
        self._peeked = [self.next_batch(0)]
        return self._peeked[0]

    def next_batch(self, micro):
        if self._peeked:
            return self._peeked.pop()
        try:
            with self.engine._step_log.phases.inside("data"):
                item = next(self.data_iterator)
        except StopIteration as end:
            raise PipelineError(
                f"the data iterator is at its end after {micro} of {self.engine.micro_batches} micro-batches: a batch "
                f"takes as many items as gradient_accumulation_steps; deepspeed.utils.RepeatingLoader never ends"
            ) from end
        except TypeError as error:
            if hasattr(self.data_iterator, "__next__"):
                raise
            raise TypeError(
                f"data_iter is a {type(self.data_iterator).__name__}, not an iterator: pass iter(...) of it"
            ) from error
        return self.engine._curriculum.cut(item if self.batch_fn is None else self.batch_fn(item))

    def pair(self, item):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            size = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
            raise ValueError(
                f"the data iterator gave a {type(item).__name__}{size}: a micro-batch is a pair (inputs, labels); "
                f"set_batch_fn() takes a function that makes one"
            )
        return item

    def inputs_of(self, inputs):
        """The inputs of a micro-batch as the first layer gets them."""
        inputs = move_to_device(inputs, self.engine.device)
        if isinstance(inputs, list):
            inputs = tuple(inputs)
        if not isinstance(inputs, torch.Tensor) and not tensors_of(inputs):
            raise TypeError(
                f"the inputs of a micro-batch are {type(inputs).__name__}: a tensor or a tuple of tensors goes to the "
                f"first layer"
            )
        return inputs
