"""Counts page-locked memory: the bytes that a process has requested, and those that the pool has locked now."""

from deepspeed.accelerator.native_pinning import pool

__all__ = ["pinned_memory_summary", "track_pinned_memory"]


class _PinnedMemoryTracker:
    """Counts what callers report: number, sum and largest of their allocations."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.count = self.total_bytes = self.largest_bytes = 0

    def track(self, num_bytes):
        if num_bytes < 0:
            raise ValueError(f"an allocation has 0 bytes or more, got {num_bytes}")
        self.count += 1
        self.total_bytes += num_bytes
        self.largest_bytes = max(self.largest_bytes, num_bytes)

    def summary(self, tag=""):
        return (
            f"{f'{tag}: ' if tag else ''}{self.count} page-locked allocations, {_fmt_bytes(self.total_bytes)} in all, "
            f"the largest {_fmt_bytes(self.largest_bytes)}; native pool: {_fmt_bytes(pool().locked_bytes)} locked in "
            f"{pool().blocks} blocks, peak {_fmt_bytes(pool().peak_bytes)}"
        )


def _fmt_bytes(num_bytes):
    """``1536`` as ``1.50 KB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TB"


_tracker = _PinnedMemoryTracker()


def track_pinned_memory(num_bytes):
    """Adds an allocation of ``num_bytes`` to what ``pinned_memory_summary`` tells."""
    _tracker.track(num_bytes)


def pinned_memory_summary(tag=""):
    """One line: what was reported, and what the process's pool has locked. ``tag`` stands before it."""
    return _tracker.summary(tag)
