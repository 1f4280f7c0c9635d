"""Moves what training keeps on an accelerator to the host and back, while nobody needs it there.

The memory behind a tensor goes, the tensor does not: its storage is emptied and filled again, so that all views of it,
those of the native core included, are valid again after ``reload``. Between the two nothing may read them; ``need``
says who is stopped by what. On a CPU accelerator all states are on the host already and stay where they are.
"""

import torch

from deepspeed._compat import storage_of
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
        self.away = {}  # kind -> [(tensor that keeps the storage alive, its bytes on the host)]
        self._listed = {}  # tensors of every kind while something is away: no view can be made of what is not there

    def offload(self, include=None, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False):
        """Copies the memory of the chosen kinds to the host and gives it back to the accelerator.

        ``non_blocking``: the copies are queued together and awaited once at the end. When the call returns, the
        accelerator's memory is free. What is away already stays so. Returns the bytes moved.
        """
        kinds = chosen_kinds(include)
        if check_device(device) == OffloadDeviceEnum.none:
            return 0
        if not self.away:
            self._listed = {kind: list(self.tensors_of[kind]()) for kind in ALL}
        leaving = []
        for kind in ALL:
            if kind in kinds and kind not in self.away:
                found = self._copies(self._listed[kind], pin_memory, non_blocking)
                if found is not None:
                    self.away[kind] = found
                    leaving += found
        if not leaving:
            log_dist("offload_states: these states are in host memory already; nothing moves.", ranks=[0])
            return 0
        self._finish(leaving)
        for tensor, _ in leaving:
            storage_of(tensor).resize_(0)
        return sum(host.numel() for _, host in leaving)

    def _copies(self, tensors, pin_memory, non_blocking):
        # None: there is nothing of this kind on an accelerator. Memory that two kinds share goes with the first.
        taken = {storage_of(t).data_ptr() for entries in self.away.values() for t, _ in entries} - {0}
        found, any_there = [], False
        for tensor in tensors:
            storage = storage_of(tensor)
            if tensor.device.type == "cpu" and not self.even_on_host:
                continue
            any_there = True
            size, address = storage.nbytes(), storage.data_ptr()
            if not size or address in taken:
                continue
            taken.add(address)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory and tensor.device.type == "cuda")
            host.copy_(_bytes(tensor), non_blocking=non_blocking)
            found.append((tensor.detach(), host))
        return found if any_there else None

    @staticmethod
    def _finish(entries):
        for device in {tensor.device for tensor, _ in entries if tensor.device.type == "cuda"}:
            get_accelerator().synchronize(device)

    def reload(self, non_blocking=False):
        """Everything that is away comes back to where it was. Returns the bytes moved."""
        moved = 0
        for entries in self.away.values():
            for tensor, host in entries:
                storage_of(tensor).resize_(host.numel())
                _bytes(tensor).copy_(host, non_blocking=non_blocking)
                moved += host.numel()
        back = [entry for entries in self.away.values() for entry in entries]
        self.away, self._listed = {}, {}
        self._finish(back)  # the native core has streams of its own, and the host copies go now
        return moved

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


def _bytes(tensor):
    """All memory behind a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage_of(tensor))


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
