"""The bytes of a tensor in a file, taken from its memory piece by piece: no second copy of a state is ever made."""

import torch

from deepspeed.utils import lazy_tensor


class Staging:
    """Host memory, at most ``bytes`` of it, through which tensors pass that are elsewhere or have gaps.

    Made when first needed; pinned for tensors of a GPU, so that copies are fast.
    """

    def __init__(self, bytes):
        self.bytes = max(bytes, 4096)
        self._memory = {}

    def copy(self, tensor):
        """The elements of ``tensor`` (at most ``bytes``) in row-major order, valid until the next call."""
        pinned = tensor.device.type == "cuda"
        if pinned not in self._memory:
            self._memory[pinned] = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=pinned)
        used = tensor.numel() * tensor.element_size()
        return self._memory[pinned][:used].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class StoredTensor:
    """``bytes`` of a file that hold the elements of ``tensor``, and how a tensor over them must be strided.

    In memory order, a tensor without gaps keeps its memory as it is, with its strides (transposed, expanded ...): what
    shares that memory shares the bytes, ``key`` being equal. A tensor with gaps (a slice of columns), and every tensor
    in row-major order that is not so already, is put in order while it is written, a piece at a time.
    """

    def __init__(self, tensor, row_major=False):
        tensor = tensor.detach()
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.stride = tuple(tensor.stride())
        self.numel = tensor.numel()
        lazy = tensor.is_conj() or tensor.is_neg()
        in_order = tensor.is_contiguous()
        span = self.numel if in_order else 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride))
        if span <= self.numel and not lazy and (in_order or not row_major):
            self._flat, self._rows = tensor.as_strided((span,), (1,)), None
            self.numel = span
        else:
            self._flat, self._rows = None, tensor
            self.stride = lazy_tensor.row_major(self.shape)
        self.bytes = self.numel * tensor.element_size()
        # Tensors without elements have no address that would tell them apart.
        place = tensor.data_ptr() if self.numel else id(self)
        way = None if self._rows is None else (self.shape, tensor.stride(), lazy)
        self.key = (tensor.device, place, self.dtype, self.bytes, way)

    def pieces(self, staging):
        """Yields (address, bytes) of host memory, in order, valid until the next one is asked for."""
        if not self.bytes:
            return
        if self.in_place():
            yield self._flat.data_ptr(), self.bytes
            return
        size = self.bytes // self.numel
        for part in _parts(self._rows if self._flat is None else self._flat, staging.bytes // size):
            yield staging.copy(part).data_ptr(), part.numel() * size

    def copy_to(self, memory):
        """Copies all elements into ``memory``, a 1-D uint8 tensor on the host of ``bytes``; from another device into
        pinned memory, the copy is only queued."""
        target = memory.view(self.dtype)
        if self._flat is not None:
            target.copy_(self._flat, non_blocking=True)
        else:
            target.view(self.shape).copy_(self._rows, non_blocking=True)

    def copy_range(self, memory, begin, end):
        """Copies bytes ``begin`` to ``end`` into ``memory``, as ``copy_to`` copies all."""
        flat = self._flat
        if flat is None:
            flat = torch.empty(self.shape, dtype=self.dtype, device=self._rows.device).copy_(self._rows).reshape(-1)
        memory.copy_(flat.view(torch.uint8)[begin:end], non_blocking=True)

    @property
    def device_type(self):
        return (self._flat if self._flat is not None else self._rows).device.type

    def in_place(self):
        """Whether ``pieces`` hands out the tensor's own memory."""
        return self._flat is not None and self._flat.device.type == "cpu"


class StoredPieces:
    """The same of a ``TensorOfPieces``."""

    def __init__(self, tensor):
        self.dtype, self.numel = tensor.dtype, tensor.numel
        self.shape, self.stride = (tensor.numel,), (1,)
        self._parts = [StoredTensor(part) for part in tensor.parts]
        self.bytes = sum(part.bytes for part in self._parts)
        self.key = id(tensor)

    def pieces(self, staging):
        for part in self._parts:
            yield from part.pieces(staging)

    def copy_to(self, memory):
        at = 0
        for part in self._parts:
            part.copy_to(memory[at : at + part.bytes])
            at += part.bytes

    def copy_range(self, memory, begin, end):
        at = 0
        for part in self._parts:
            first, last = max(begin, at), min(end, at + part.bytes)
            if first < last:
                part.copy_range(memory[first - begin : last - begin], first - at, last - at)
            at += part.bytes

    @property
    def device_type(self):
        return next((part.device_type for part in self._parts if part.device_type != "cpu"), "cpu")

    def in_place(self):
        return all(part.in_place() for part in self._parts)


class StoredSlice:
    """Bytes ``begin`` to ``end`` of another source."""

    def __init__(self, source, begin, end):
        self._source, self._begin, self._end = source, begin, end
        self.bytes = end - begin

    def pieces(self, staging):
        at = 0
        for address, size in self._source.pieces(staging):
            first, last = max(self._begin, at), min(self._end, at + size)
            if first < last:
                yield address + first - at, last - first
            at += size
            if at >= self._end:
                return

    def copy_to(self, memory):
        self._source.copy_range(memory, self._begin, self._end)

    @property
    def device_type(self):
        return self._source.device_type

    def in_place(self):
        return self._source.in_place()


def _parts(tensor, most):
    """The tensor cut along its first dimensions, in row-major order, into parts of at most ``most`` elements."""
    if tensor.numel() <= most:
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    if row > most:
        for part in tensor:
            yield from _parts(part, most)
        return
    for begin in range(0, tensor.shape[0], most // row):
        yield tensor[begin : begin + most // row]
