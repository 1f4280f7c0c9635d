"""Activations in host memory between forward and backward."""

import collections
import threading
import weakref

import torch

from deepspeed.accelerator import get_accelerator


class HostPool:
    """Host buffers for reuse, at most ``capacity`` of them. A buffer returns to the pool when the last tensor on it
    is freed, so a buffer in use (``retain_graph``, a saved-tensor hook that kept it) is never given out twice."""

    def __init__(self, pin, capacity):
        self._pin = pin
        self._capacity = capacity
        self._free = collections.defaultdict(list)  # bytes -> buffers
        self._lock = threading.RLock()  # the garbage collector may give a buffer back while one is taken

    def empty(self, numel, dtype):
        """An uninitialised 1-D tensor on the host."""
        size = numel * torch.empty((), dtype=dtype).element_size()
        if size == 0:
            return torch.empty(0, dtype=dtype)
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else None
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8)
            if self._pin:
                buffer = get_accelerator().pin_memory(buffer, make_copy=False)
        # torch's storage refers to this array, so it is freed with the last tensor on the buffer.
        array = buffer.numpy()
        weakref.finalize(array, self._take_back, buffer).atexit = False
        return torch.from_numpy(array).view(dtype)

    def _take_back(self, buffer):
        with self._lock:
            if self.count() < self._capacity:
                self._free[buffer.numel()].append(buffer)

    def count(self):
        """The number of unused buffers."""
        with self._lock:
            return sum(map(len, self._free.values()))

    def clear(self):
        with self._lock:
            self._free.clear()


class _ActivationOffloadEngine:
    """Copies tensors of one device to the host and back, beside the computation where the device has streams.

    use_pin_memory:            copy into page-locked memory; without it no copy overlaps anything.
    use_streams:               copy on a stream of its own.
    min_offload_bytes:         smaller tensors stay on the device.
    max_fwd_stash_count:       copies to the host that may be under way, each with its tensor kept until it is done.
    max_cpu_buffer_pool_count: host buffers kept for reuse.
    keep_last_count:           the latest tensors, which backward wants first, stay on the device.
    """

    def __init__(
        self,
        use_pin_memory=True,
        use_streams=True,
        min_offload_bytes=1024,
        max_fwd_stash_count=2,
        max_cpu_buffer_pool_count=64,
        keep_last_count=1,
    ):
        for name, value, least in (
            ("min_offload_bytes", min_offload_bytes, 0),
            ("max_fwd_stash_count", max_fwd_stash_count, 1),
            ("max_cpu_buffer_pool_count", max_cpu_buffer_pool_count, 0),
            ("keep_last_count", keep_last_count, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        self.use_pin_memory = use_pin_memory and get_accelerator().device_name() != "cpu"
        self.use_streams = use_streams and get_accelerator().Stream is not None
        self.min_offload_bytes, self.keep_last_count = min_offload_bytes, keep_last_count
        self.max_fwd_stash_count, self.max_cpu_buffer_pool_count = max_fwd_stash_count, max_cpu_buffer_pool_count
        self._pool = HostPool(self.use_pin_memory, max_cpu_buffer_pool_count)
        self._streams = {}
        self._stash = collections.deque()  # (event, source, its version) of copies that may still run

    def _stream(self, device):
        if device not in self._streams:
            with get_accelerator().device(device.index):
                self._streams[device] = get_accelerator().Stream()
        return self._streams[device]

    def worth_moving(self, tensor):
        """Whether ``tensor`` lies on a device that is not the host, and is large enough."""
        on_host = get_accelerator()._on_host(tensor.device)
        return not on_host and tensor.numel() * tensor.element_size() >= self.min_offload_bytes

    def room(self, numel, dtype):
        """Uninitialised 1-D host memory for ``to_host``."""
        return self._pool.empty(numel, dtype)

    def to_host(self, tensor, host=None):
        """A copy of ``tensor`` in host memory, in ``host`` if given. The copy may still run when this returns:
        pass it to ``to_device``, or synchronise before reading it on the host."""
        source = tensor.detach()
        if host is None:
            host = self.room(source.numel(), source.dtype).view(source.shape)
        if not self.use_streams or source.device.type == "cpu":
            host.copy_(source)
            return host
        accelerator = get_accelerator()
        stream, now = self._stream(source.device), accelerator.current_stream(source.device.index)
        stream.wait_stream(now)
        with accelerator.stream(stream):
            host.copy_(source, non_blocking=True)
            done = accelerator.Event()
            done.record(stream)
        # The source must not be freed, and its memory not given to later work, before the copy has read it.
        self._stash.append((done, source, source._version))
        self._settle(self.max_fwd_stash_count)
        return host

    def to_device(self, host, device):
        """A copy on ``device`` of a tensor that ``to_host`` has copied."""
        if not self.use_streams or torch.device(device).type == "cpu":
            return host.to(device)
        self._settle(0)
        accelerator = get_accelerator()
        stream, now = self._stream(device), accelerator.current_stream(device.index)
        made = torch.empty(host.shape, dtype=host.dtype, device=device)
        # Earlier work of this stream may still read the memory of `made`; and the copy to the host came before on
        # the same stream, so it is complete.
        stream.wait_stream(now)
        with accelerator.stream(stream):
            made.copy_(host, non_blocking=True)
        if not made.is_meta:  # which no allocator reuses
            made.record_stream(stream)
        now.wait_stream(stream)
        return made

    def _settle(self, count):
        """Releases all but the latest ``count`` sources; later work waits for their copies."""
        while len(self._stash) > count:
            event, source, version = self._stash.popleft()
            get_accelerator().current_stream(source.device.index).wait_event(event)
            if source._version != version:
                raise RuntimeError(
                    f"an activation of shape {list(source.shape)} was modified by an inplace operation while it was "
                    f"copied to the host for backward: write the result to a new tensor instead."
                )

    def reset(self):
        """Waits for copies and gives unused host buffers back."""
        self._settle(0)
        self._pool.clear()
