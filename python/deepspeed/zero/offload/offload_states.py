"""Moves states of training from an accelerator to the host, or to files, and back, while they are not in use.

The core's buffers are planes of its ``ShardStorage`` (csrc/storage/shard_storage.h), which go to another placement;
memory behind other tensors is made a plane while it is away. Tensors stay, and all views of them, those of the native
core included, are valid again after ``reload``. Between the two nothing may read them; ``need`` raises for code that
does. On a CPU accelerator all states are on the host already and stay there, unless they go to files.
"""

import torch

from deepspeed._compat import storage_of
from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.config.sections import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.log import log_dist
from deepspeed.zero.offload.rates import folder_of
from deepspeed.zero.states.states_in_files import StatesOfMaster

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


def check_device(device, folder=""):
    """Raises ValueError for a device that states cannot go to. ``folder``: where files may be made, or ""."""
    try:
        device = OffloadDeviceEnum(device)
    except ValueError:
        raise ValueError(f"offload_states: device= is OffloadDeviceEnum.cpu or nvme, not {device!r}") from None
    if device == OffloadDeviceEnum.nvme and not folder:
        raise ValueError(
            "offload_states: device=nvme is not possible without a folder for the files: name one in "
            "zero_optimization.offload_optimizer.nvme_path"
        )
    return device


# Planes of the core for each kind; their tensors have the same memory. contiguous_grad_buffer has none: the buckets of
# a reduction are taken when a backward starts and given back when it ends.
_PLANES = {
    OffloadStateTypeEnum.optim_states: "slots",
    OffloadStateTypeEnum.hp_params: "master",
    OffloadStateTypeEnum.lp_params: "lp",
    OffloadStateTypeEnum.lp_grads: "grad",
}


class OffloadedStates:
    """The states of a sharded ``optimizer`` that are away. Its buffers are planes of the native core's storage; other
    memory is made a plane while it is away. ``even_on_host``: host memory moves to the host as well (for tests)."""

    even_on_host = False

    def __init__(self, optimizer):
        self.optimizer, self.core, self.storage = optimizer, optimizer.core, optimizer.core.storage
        # For files; "" without.
        self.folder = "" if optimizer.engine is None else folder_of([optimizer.engine.zero_offload_optimizer()])
        self.away = {}  # kind -> [(plane, bytes, where it was, whether it was made for this)]
        self._in_files = False
        self._listed = {}  # tensors of every kind while something is away: no view can be made of what is not there

    def _list(self, kind):
        """The tensors whose memory is of a kind, those of the planes and others."""
        kinds, core = OffloadStateTypeEnum, self.core
        listed = {
            kinds.optim_states: self._optimizer_states,
            kinds.hp_params: core.masters,
            kinds.lp_params: self._low_precision,
            kinds.lp_grads: core.grads,
        }
        return list(listed.get(kind, list)())

    def _low_precision(self):
        optimizer = self.optimizer
        params = optimizer._params if optimizer.engine is None else list(optimizer.engine.module.parameters())
        slices = [p.ds_handle for p in params if hasattr(p, "ds_handle") and not p.ds_handle.offloaded]
        trained = {id(p) for p in optimizer._params}  # they lie in the core's buffers
        others = [p.detach() for p in params if not hasattr(p, "ds_handle") and id(p) not in trained]
        return [h.shard for h in slices] + _C.flat_params(self.core) + others

    def _optimizer_states(self):
        return [
            value
            for state in self.optimizer.optimizer.state.values()
            if not isinstance(state, StatesOfMaster)  # in files already
            for value in state.values()
            if torch.is_tensor(value) and value.dim() > 0
        ]

    def offload(self, include=None, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False):
        """Copies the memory of the chosen kinds there and gives it back to the accelerator.

        ``non_blocking``: the copies are queued together and awaited once at the end. When the call returns, the
        accelerator's memory is free. What is away already stays so.
        """
        kinds = chosen_kinds(include)
        device = check_device(device, self.folder)
        if device == OffloadDeviceEnum.none:
            return
        to_files = device == OffloadDeviceEnum.nvme
        if not self.away:
            self._listed = {kind: self._list(kind) for kind in ALL}
        if OffloadStateTypeEnum.contiguous_grad_buffer in kinds:
            self.core.trim_wire()
        leaving, taken = {}, {number for planes in self.away.values() for number, *_ in planes}
        for kind in ALL:
            tensors = [t for t in self._listed[kind] if t.device.type != "cpu" or self.even_on_host or to_files]
            if kind in kinds and kind not in self.away and tensors:
                leaving[kind] = self._leaving(kind, [t for t in tensors if not t.is_meta], taken, to_files)
        leaving = {kind: planes for kind, planes in leaving.items() if planes}
        if not leaving:
            log_dist("offload_states: these states are in host memory already; nothing moves.", ranks=[0])
            return
        get_accelerator().synchronize()  # the native core has streams of its own
        numbers = [number for planes in leaving.values() for number, *_ in planes]
        target = _C.Placement("file" if to_files else "host", pinned=pin_memory, folder=self.folder if to_files else "")
        try:
            self.storage.move(numbers, target, not non_blocking)
        except Exception:
            self._forget(leaving)
            raise
        _C.follow_moves(self.core)
        self.away.update(leaving)
        self._in_files = to_files
        usage = self.storage.usage()
        if usage["unpinned"]:
            log_dist(f"offload_states: {usage['unpinned']} bytes not pinned: {usage['unpinned_reason']}", ranks=[-1])

    def _leaving(self, kind, tensors, taken, to_files):
        """``[(plane, bytes, placement, made)]`` of what moves. Memory that two kinds share goes with the first."""
        found, from_device = [], self.even_on_host or to_files or self.storage.device.type != "cpu"
        for plane, size in self.core.planes(_PLANES[kind]) if kind in _PLANES else ():
            placement, addresses = self.storage.placement(plane), self.storage.addresses(plane)
            moves = from_device if placement.rest == "device" else to_files and placement.rest == "host"
            if size and moves and not taken.intersection([plane, *addresses]):
                found.append((plane, size, placement, False))
            taken.update(addresses)
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage.nbytes() and storage.data_ptr() not in taken:
                taken.add(storage.data_ptr())
                plane = self.storage.adopt(kind.name, tensor.detach())
                found.append((plane, storage.nbytes(), self.storage.placement(plane), True))
        return found

    def _forget(self, kinds):
        for plane in (number for planes in kinds.values() for number, _, _, made in planes if made):
            self.storage.remove(plane)
        if not self.away:
            self._listed = {}

    def reload(self, non_blocking=False):
        """Everything that is away comes back to where it was."""
        if not self.away:
            return
        left = sum(self.away.values(), [])
        while left:
            placement = left[0][2]
            self.storage.move([number for number, _, to, _ in left if to == placement], placement, not non_blocking)
            left = [one for one in left if not one[2] == placement]
        _C.follow_moves(self.core)
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
        return any(t.numel() and not t.is_meta and not storage_of(t).nbytes() for t in self._tensors(kind))

    def _tensors(self, kind):
        return self._listed[kind] if self.away else self._list(kind)

    def devices(self, kind):
        """The devices on which the memory of a kind is now, as a set, which may be empty. "meta": in files."""
        kind = OffloadStateTypeEnum(kind)
        if self._is_away(kind):
            return {torch.device("meta" if self._in_files else "cpu")}
        return {tensor.device for tensor in self._tensors(kind) if tensor.numel()}


def get_state_devices(model, state):
    """The devices on which the states of one ``OffloadStateTypeEnum`` are now. ``model``: an engine with ZeRO."""
    return model.optimizer.states.devices(state)
