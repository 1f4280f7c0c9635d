"""The bytes of a tensor in a file, taken from its memory piece by piece: no second copy of a state is ever made."""

import torch


class Staging:
    """Host memory through which tensors of other devices pass, ``bytes`` of it; pinned, so that copies are fast.

    Made when first needed.
    """

    def __init__(self, bytes):
        self.bytes = bytes
        self._memory = None

    def copy(self, tensor):
        """``tensor`` (1-D, at most ``bytes``) in host memory that is valid until the next call."""
        if self._memory is None:
            pinned = tensor.device.type == "cuda"
            self._memory = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=pinned)
        used = tensor.numel() * tensor.element_size()
        return self._memory[:used].view(tensor.dtype).copy_(tensor)


class StoredTensor:
    """``bytes`` of a file that hold the elements of ``tensor``, and how a tensor over them must be strided.

    In memory order, a tensor without gaps keeps its memory as it is, with its strides (transposed, expanded ...): what
    shares that memory shares the bytes, ``key`` being equal. A tensor with gaps (a slice of columns), and every tensor
    in row-major order that is not so already, is made contiguous while it is written, a piece at a time.
    """

    def __init__(self, tensor, row_major=False):
        tensor = tensor.detach()
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.stride = tuple(tensor.stride())
        self.numel = tensor.numel()
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride)) if self.numel else 0
        lazy = tensor.is_conj() or tensor.is_neg()
        if span <= self.numel and not lazy and not (row_major and not tensor.is_contiguous()):
            self._flat, self._rows = tensor.as_strided((span,), (1,)), None
            self.numel = span
        else:
            self._flat, self._rows = None, tensor
            self.stride = _row_major_stride(self.shape)
        self.bytes = self.numel * tensor.element_size()
        # Tensors without elements have no address that would tell them apart.
        place = tensor.data_ptr() if self.numel else id(self)
        way = None if self._rows is None else (self.shape, tensor.stride(), lazy)
        self.key = (tensor.device, place, self.dtype, self.bytes, way)

    def pieces(self, staging):
        """Yields (address, bytes) of host memory, in order, valid until the next one is asked for."""
        if not self.bytes:
            return
        if self._flat is not None and self._flat.device.type == "cpu":
            yield self._flat.data_ptr(), self.bytes
            return
        size = self.bytes // self.numel
        most = max(1, staging.bytes // size)
        parts = [self._flat] if self._flat is not None else _contiguous_parts(self._rows, most)
        for part in parts:
            for begin in range(0, part.numel(), most):
                piece = part[begin : begin + most]
                host = piece if piece.device.type == "cpu" else staging.copy(piece)
                yield host.data_ptr(), host.numel() * size

    def copy_to(self, memory):
        """Copies all elements into ``memory``, a 1-D uint8 tensor on the host of ``bytes``; from another device into
        pinned memory, the copy is only queued."""
        target = memory.view(self.dtype)
        if self._flat is not None:
            target.copy_(self._flat, non_blocking=True)
        else:
            target.view(self.shape).copy_(self._rows, non_blocking=True)

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

    @property
    def device_type(self):
        return next((part.device_type for part in self._parts if part.device_type != "cpu"), "cpu")

    def in_place(self):
        return all(part.in_place() for part in self._parts)


def _row_major_stride(shape):
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _contiguous_parts(tensor, most):
    """The elements in row-major order as 1-D tensors, each of at most ``most`` elements or one innermost row."""
    if tensor.dim() <= 1 or tensor.numel() <= most:
        yield tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return
    row = tensor.numel() // tensor.shape[0]
    if row > most:
        for part in tensor:
            yield from _contiguous_parts(part, most)
        return
    for begin in range(0, tensor.shape[0], most // row):
        yield from _contiguous_parts(tensor[begin : begin + most // row], most)
