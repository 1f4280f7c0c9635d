"""A tensor that is still in its file."""

import math

import torch

# Sizes of what a stored tensor may be expanded to (strides of 0): a few bytes must not ask for a terabyte.
_MOST_EXPANDED_NUMEL = 1 << 28


def itemsize(dtype):
    """Bytes of an element."""
    return torch.empty(0, dtype=dtype).element_size()


def row_major(shape):
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class StoredMemory:
    """The storage of tensors in a file: a range of bytes; ``swapped`` if it is of the other byte order."""

    def __init__(self, source, dtype, swapped=False, base=None):
        self.source, self.dtype, self.swapped = source, dtype, swapped
        self._base = None if swapped else base  # the same bytes, of another type
        self.item = itemsize(dtype)
        self._whole = None
        self._views = {}

    def viewed_as(self, dtype):
        """The same bytes as elements of another type."""
        if dtype != self.dtype and dtype not in self._views:
            self._views[dtype] = StoredMemory(self.source, dtype, self.swapped, self)
        return self if dtype == self.dtype else self._views[dtype]

    @property
    def numel(self):
        return self.source.bytes // self.item

    def read(self, start, numel):
        """1-D tensor of the elements from ``start`` on, in memory of its own."""
        found = torch.empty(numel, dtype=self.dtype)
        if numel:
            self.source.read_into(_as_bytes(found), start * self.item)
            if self.swapped:
                self._swap(found)
        return found

    def allocate(self):
        """Memory for all of it, which somebody else fills."""
        self._whole = torch.empty(self.numel, dtype=self.dtype)
        return self._whole

    def whole(self):
        """All of it, the same memory for every caller: tensors that share a storage go on sharing it."""
        if self._whole is None and self._base is not None:
            self._whole = _as_bytes(self._base.whole())[: self.numel * self.item].view(self.dtype)
        elif self._whole is None:
            self._whole = self.read(0, self.numel)
        return self._whole

    def _swap(self, tensor):
        width = self.item // 2 if self.dtype.is_complex else self.item
        if width > 1:
            data = _as_bytes(tensor).view(-1, width)
            data.copy_(data.flip(1))


def _as_bytes(flat):
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


class LazyTensor:
    """``shape``, ``stride`` (elements), ``dtype`` and ``requires_grad`` of a tensor in a file; ``read()`` brings it.

    Raises ValueError when the sizes do not fit the storage.
    """

    def __init__(self, memory, offset, shape, stride, requires_grad=False):
        self.memory, self.offset = memory, offset
        self.shape, self.stride = tuple(shape), tuple(stride)
        self.requires_grad = requires_grad
        self._check()
        self.shape = torch.Size(shape)

    def _check(self):
        numel = math.prod(self.shape)
        numbers = (self.offset, *self.shape, *self.stride)
        if len(self.stride) != len(self.shape) or min(numbers) < 0 or max(numbers) >= 1 << 63:
            raise ValueError(f"a tensor of shape {tuple(self.shape)} with strides {self.stride} at {self.offset}")
        end = self.offset + (sum((n - 1) * s for n, s in zip(self.shape, self.stride)) + 1 if numel else 0)
        if end > self.memory.numel:
            raise ValueError(
                f"a tensor of shape {tuple(self.shape)} with strides {self.stride} at {self.offset} lies outside of "
                f"its storage of {self.memory.numel} elements"
            )
        if numel > max(self.memory.numel, _MOST_EXPANDED_NUMEL):
            raise ValueError(f"a tensor of shape {tuple(self.shape)} on a storage of {self.memory.numel} elements")

    @property
    def dtype(self):
        return self.memory.dtype

    @property
    def nbytes(self):
        return self.numel() * self.memory.item

    @property
    def path(self):
        """The file."""
        return self.memory.source.path

    def numel(self):
        return self.shape.numel()

    def dim(self):
        return len(self.shape)

    def is_contiguous(self):
        expected = row_major(self.shape)
        return self.numel() == 0 or all(n == 1 or s == e for n, s, e in zip(self.shape, self.stride, expected))

    def read(self):
        """The tensor, on the CPU, in memory of its own."""
        if self.is_contiguous():
            return self.memory.read(self.offset, self.numel()).view(self.shape)
        span = sum((n - 1) * s for n, s in zip(self.shape, self.stride)) + 1
        flat = self.memory.read(self.offset, span)
        return torch.empty(0, dtype=self.dtype).set_(flat, 0, self.shape, self.stride)

    def read_range(self, start, numel):
        """1-D tensor of ``numel`` elements from ``start`` on, in row-major order; of a contiguous tensor only these are
        read. IndexError outside of the tensor."""
        if start < 0 or numel < 0 or start + numel > self.numel():
            raise IndexError(f"elements {start} to {start + numel} of a tensor of {self.numel()} elements")
        if self.is_contiguous():
            return self.memory.read(self.offset + start, numel)
        return self.read().reshape(-1)[start : start + numel].clone()

    def fill(self, target, start):
        """Reads the elements from ``start`` on straight into ``target``, 1-D and contiguous. False, and nothing is
        read, where that is not possible: of another type, on another device, not in this order in the file."""
        direct = target.dtype == self.dtype and target.device.type == "cpu" and not self.memory.swapped
        if not direct or not self.is_contiguous() or start < 0 or start + target.numel() > self.numel():
            return False
        if target.numel():
            self.memory.source.read_into(_as_bytes(target), (self.offset + start) * self.memory.item)
        return True

    def share(self):
        """The tensor on the memory that all tensors of its storage share, as torch.load gives them."""
        return torch.empty(0, dtype=self.dtype).set_(self.memory.whole(), self.offset, self.shape, self.stride)

    def __repr__(self):
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, {self.path})"
