"""``NativePinnedMemory`` under the path that scripts import."""

from deepspeed.accelerator.native_pinning import NativePinnedMemory, get_active_native_pinned_memory

__all__ = ["NativePinnedMemory", "get_active_native_pinned_memory"]
