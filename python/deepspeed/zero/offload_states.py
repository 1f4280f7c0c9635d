"""Moves what training keeps on an accelerator to the host and back, while nobody needs it there.

The memory behind a tensor is a plane of a native ``ShardStorage`` (csrc/storage/shard_storage.h) while it is away: the
tensor stays, and all views of it, those of the native core included, are valid again after ``reload``. Between the two
nothing may read them; ``need`` says who is stopped by what. On a CPU accelerator all states are on the host already and
stay where they are.
"""

import torch

from deepspeed._compat import storage_of
from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.config.sections import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.log import log_dist

ALL = tuple(OffloadStateTypeEnum)


def chosen_kinds(include):
    """The set of ``OffloadStateTypeEnum`` that ``include`` names (None: all); members or their names."""
    if include is None:
        return set(ALL)
    if isinstance(include, (str, OffloadStateTypeEnum)):
        raise TypeError(f"offload_states: include= is a set or list of OffloadStateTypeEnum, got {include!r} itself")
    try:
        return {OffloadStateTypeEnum(kind) for kind in include}
    except ValueError as error:
        names = ", ".join(kind.name for kind in ALL)
        raise ValueError(f"offload_states: {error}; include= takes {names}") from None


def check_device(device):
    """Raises ValueError for a device that states cannot go to."""
    try:
        device = OffloadDeviceEnum(device)
    except ValueError:
        raise ValueError(f"offload_states: device= is OffloadDeviceEnum.cpu, not {device!r}") from None
    if device == OffloadDeviceEnum.nvme:
        raise ValueError(
            "offload_states: device=nvme is not possible, states can only wait in host memory (device=cpu). To train "
            "with states on NVMe use zero_optimization.offload_optimizer in the configuration."
        )
    return device


class OffloadedStates:
    """What is away. ``tensors_of`` maps a kind to a function that lists the tensors whose memory is of that kind.

    ``even_on_host``: move host memory as well (for tests).
    """

    def __init__(self, tensors_of, even_on_host=False):
        self.tensors_of = tensors_of
        self.even_on_host = even_on_host
        self.away = {}  # kind -> its planes
        self._storage = None  # of the device that they come from
        self._listed = {}  # tensors of every kind while something is away: no view can be made of what is not there

    def offload(self, include=None, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False):
        """Copies the memory of the chosen kinds to the host and gives it back to the accelerator.

        ``non_blocking``: the copies are queued together and awaited once at the end. When the call returns, the
        accelerator's memory is free. What is away already stays so.
        """
        kinds = chosen_kinds(include)
        if check_device(device) == OffloadDeviceEnum.none:
            return
        if not self.away:
            self._listed = {kind: list(self.tensors_of[kind]()) for kind in ALL}
        leaving, taken = {}, set()
        for kind in ALL:
            tensors = [t for t in self._listed[kind] if t.device.type != "cpu" or self.even_on_host]
            if kind in kinds and kind not in self.away and tensors:
                leaving[kind] = self._adopt(kind, tensors, taken)
        if not leaving:
            log_dist("offload_states: these states are in host memory already; nothing moves.", ranks=[0])
            return
        get_accelerator().synchronize()  # the native core has streams of its own
        try:
            self._storage.move(sum(leaving.values(), []), "host", pin_memory, not non_blocking)
        except Exception:
            self._forget(leaving)
            raise
        self.away.update(leaving)
        usage = self._storage.usage()
        if usage["unpinned"]:
            log_dist(f"offload_states: {usage['unpinned']} bytes not pinned: {usage['unpinned_reason']}", ranks=[-1])

    def _adopt(self, kind, tensors, taken):
        # Memory that two kinds share goes with the first.
        planes = []
        self._storage = self._storage or _C.ShardStorage(tensors[0].device)
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage.nbytes() and storage.data_ptr() not in taken:
                taken.add(storage.data_ptr())
                planes.append(self._storage.adopt(kind.name, tensor.detach()))
        return planes

    def _forget(self, kinds):
        for plane in sum(kinds.values(), []):
            self._storage.remove(plane)
        if not self.away:
            self._storage, self._listed = None, {}

    def moved_bytes(self):
        """Bytes that are away."""
        return self._storage.usage()["host"] if self.away else 0

    def reload(self, non_blocking=False):
        """Everything that is away comes back to where it was."""
        if not self.away:
            return
        self._storage.move(sum(self.away.values(), []), "device", False, not non_blocking)
        get_accelerator().synchronize()
        away, self.away = self.away, {}
        self._forget(away)

    def need(self, kinds, what):
        """Raises RuntimeError when one of ``kinds`` is away; ``what`` is who needs it."""
        missing = [kind.name for kind in ALL if kind in kinds and self._is_away(kind)] if self.away else []
        if missing:
            raise RuntimeError(
                f"{what} needs {', '.join(missing)}, which offload_states() has moved to host memory: call "
                "reload_states() first"
            )

    def _is_away(self, kind):
        # Two kinds may share memory: masters of an fp32 model are its weights.
        return any(t.numel() and not storage_of(t).nbytes() for t in self._tensors(kind))

    def _tensors(self, kind):
        return self._listed[kind] if self.away else self.tensors_of[kind]()

    def devices(self, kind):
        """Where the memory of a kind is now: a set of devices, empty where there is none."""
        kind = OffloadStateTypeEnum(kind)
        if self._is_away(kind):
            return {torch.device("cpu")}
        return {tensor.device for tensor in self._tensors(kind) if tensor.numel()}


def states_of(optimizer):
    """The ``OffloadedStates`` of a sharded optimizer. Its buffers are the native core's."""
    core = optimizer.core

    def low_precision():
        engine = optimizer.engine
        params = optimizer._params if engine is None else engine.module.parameters()
        return [p.ds_handle.shard if hasattr(p, "ds_handle") else p.detach() for p in params]

    def states():
        return [
            value
            for state in optimizer.optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value) and value.dim() > 0
        ]

    return OffloadedStates(
        {
            OffloadStateTypeEnum.optim_states: states,
            OffloadStateTypeEnum.hp_params: core.masters,
            OffloadStateTypeEnum.lp_params: low_precision,
            OffloadStateTypeEnum.lp_grads: core.grads,
            # The buckets of a reduction are taken when a backward starts and given back when it ends.
            OffloadStateTypeEnum.contiguous_grad_buffer: lambda: [],
        }
    )


def get_state_devices(model, state):
    """The devices on which the states of one ``OffloadStateTypeEnum`` are now. ``model``: an engine with ZeRO."""
    return model.optimizer.states.devices(state)
