"""Memory of an engine that changes only in calls of the engine: fp32 masters and states of a native optimizer."""

from deepspeed._compat import storage_of
from deepspeed.checkpoint.snapshot import MemoryRanges


def _is_on_host(tensor):
    return tensor is not None and tensor.device.type == "cpu" and tensor.numel() > 0


class EngineStates:
    """That memory of ``engine``, and its hold on it. Weights are not in it, even where they are their own masters, and
    neither are the states of an optimizer of somebody else: programs write to them between steps."""

    def __init__(self, engine):
        self._core = engine.core
        weights = [*engine.module.parameters(), *engine.module.buffers()]
        known = {storage_of(weight).data_ptr() for weight in weights}
        self._ranges = MemoryRanges()
        self._watched = {}  # address of a storage -> (a tensor over it, its version)
        for tensor in self._tensors():
            storage = storage_of(tensor)
            if storage.data_ptr() not in known and storage.data_ptr() not in self._watched:
                self._ranges.add(storage.data_ptr(), storage.nbytes())
                self._watched[storage.data_ptr()] = tensor, tensor._version

    def _tensors(self):
        if self._core is None:
            return []
        found = list(self._core.masters())
        for slot in range(len(self._core.slot_names())):
            found += self._core.slots(slot)
        return [tensor for tensor in found if _is_on_host(tensor)]

    def cover(self, address, bytes):
        """Whether all of it is such memory."""
        return self._ranges.find(address, bytes) is not None

    def hold(self):
        """From now on calls that would change it wait for ``let_go``."""
        self._core.hold_states()

    def let_go(self):
        self._core.let_states_go()

    def check_unchanged(self):
        """RuntimeError if it was written to since this was made, as far as torch saw it."""
        if any(tensor._version != version for tensor, version in self._watched.values()):
            raise RuntimeError(
                "fp32 masters or optimizer states were written to, by other means than the engine, between "
                "save_checkpoint and the next engine.step(), while they were being copied. Call "
                "engine.checkpoint_engine.wait() before you change them, or use safe_set_full_fp32_param and "
                "safe_set_full_optimizer_state, which wait by themselves"
            )
