"""Everything that a stage keeps of one micro-batch, in one record."""

import collections.abc

BUFFERS = ("inputs", "labels", "outputs", "output_tensors")  # the fields that are published as ``pipe_buffers``


class MicroBatch:
    """One micro-batch on one part of a stage.

    ``part`` and ``number`` (None: the next instruction without a number starts another micro-batch); ``inputs``,
    ``labels``, ``outputs`` of the part, and ``output_tensors``, which are the outputs where another part follows;
    ``grads`` of the outputs; ``loss``; ``split``, the ``SplitBackward`` between the two halves of a backward.
    """

    __slots__ = ("part", "number", *BUFFERS, "grads", "loss", "split")

    def __init__(self, part=None, number=None):
        for name in self.__slots__:
            setattr(self, name, None)
        self.part, self.number = part, number

    def free_inputs(self):
        self.inputs = self.number = None

    def take(self, name):
        """The value of a field, which is None afterwards."""
        value = getattr(self, name)
        setattr(self, name, None)
        return value


class Column(collections.abc.Sequence):
    """One field of all ``records``, which can be read and written by the number of the buffer."""

    def __init__(self, records, name):
        self._records, self._name = records, name

    def __len__(self):
        return len(self._records)

    def __getitem__(self, buffer_id):
        return getattr(self._records[buffer_id], self._name)

    def __setitem__(self, buffer_id, value):
        setattr(self._records[buffer_id], self._name, value)
