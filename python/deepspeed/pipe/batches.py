"""Where micro-batches come from: a base of ``PipelineEngine``."""

import contextlib

from deepspeed.pipe.failures import PipelineError
from deepspeed.utils.repeating_loader import RepeatingLoader


class Batches:
    """Stages that load data have ``data_iterator``, which gives ``(inputs, labels)`` pairs."""

    def _start_batches(self):
        self.data_iterator = None
        self.batch_fn = None
        self._peeked = []  # an item that somebody has looked at
        if self.training_dataloader is not None and self._loads_data():
            self.data_iterator = iter(RepeatingLoader(self.training_dataloader))  # epoch after epoch

    def _loads_data(self):
        return self.is_first_stage() or self.is_last_stage()

    def set_dataloader(self, loader):
        """``train_batch()`` takes micro-batches from ``loader`` from now on."""
        if self._loads_data():
            self.training_dataloader = loader
            self.data_iterator, self._peeked = iter(loader), []

    def set_dataiterator(self, iterator):
        """``train_batch()`` takes micro-batches from ``iterator`` from now on. Checkpoints have its position where it
        is a loader that tells one."""
        if self._loads_data():
            self.training_dataloader = iterator if hasattr(iterator, "load_state_dict") else None
            self.data_iterator, self._peeked = iterator, []

    @contextlib.contextmanager
    def _reading(self, iterator, what):
        """Inside, micro-batches come from ``iterator``; training goes on with its own afterwards."""
        kept = self.data_iterator, self._peeked
        self.data_iterator, self._peeked = iterator, []
        try:
            self._need_data(what)
            yield
        finally:
            self.data_iterator, self._peeked = kept

    def set_batch_fn(self, fn):
        """``fn(item)`` makes the pair ``(inputs, labels)`` of what the iterator gives."""
        if fn is not None and not callable(fn):
            raise TypeError(f"set_batch_fn({fn!r}): give a function of an item that returns (inputs, labels)")
        self.batch_fn = fn

    def _need_data(self, what):
        if self._loads_data() and self.data_iterator is None:
            raise RuntimeError(
                f"{what} on stage {self.stage_id} has no data: pass data_iter=, or training_data= to "
                f"deepspeed.initialize, or call set_dataloader()"
            )

    def _peek(self):
        """The next item, which stays the next one."""
        self._peeked = [self._next_batch(0)]
        return self._peeked[0]

    def _next_batch(self, micro):
        if self._peeked:
            return self._peeked.pop()
        try:
            item = next(self.data_iterator)
        except StopIteration as end:
            raise PipelineError(
                f"the data iterator is at its end after {micro} of {self.micro_batches} micro-batches: a batch takes "
                f"as many items as gradient_accumulation_steps; deepspeed.utils.RepeatingLoader never ends"
            ) from end
        except TypeError as error:
            if hasattr(self.data_iterator, "__next__"):
                raise
            raise TypeError(
                f"data_iter is a {type(self.data_iterator).__name__}, not an iterator: pass iter(...) of it"
            ) from error
        return item if self.batch_fn is None else self.batch_fn(item)

    def _pair(self, item):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            size = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
            raise ValueError(
                f"the data iterator gave a {type(item).__name__}{size}: a micro-batch is a pair (inputs, labels); "
                f"set_batch_fn() takes a function that makes one"
            )
        return item
