"""Makes this process one rank of a job whose other ranks do not exist, with the device meta as its accelerator."""

import logging
import os

import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed._compat import TORCH2
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.abstract_accelerator import constant, of_device
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.comm import group_communicators, mesh
from deepspeed.comm.timed import call_log, listen_alone
from deepspeed.log import logger

NAME = "counted"


class MetaAccelerator(CPU_Accelerator):
    """The device ``meta``, with ``memory`` bytes: operations on it take no time and no memory. What the host does for
    another device, it does as for a GPU."""

    _name = "meta"
    _communication_backend_name = NAME

    def __init__(self, memory, count, devices=8):
        super().__init__()
        self.bytes, self.count, self.devices = memory, count, devices
        self._communication_backend_name = NAME

    device_name = of_device(lambda index: "meta")
    current_device_name = constant("meta")

    def device_count(self):
        return self.devices

    def memory_allocated(self, device_index=None):
        return self.count.live

    def max_memory_allocated(self, device_index=None):
        return self.count.peak

    def total_memory(self, device_index=None):
        return self.bytes

    def available_memory(self, device_index=None):
        return self.bytes - self.count.live

    def is_fp16_supported(self):
        return True

    def supported_dtypes(self):
        return [torch.float32, torch.bfloat16, torch.float16]

    def pin_memory(self, tensor, make_copy=True, match_shape=True):
        return tensor if match_shape else tensor.reshape(-1)


def _keep_objects(object_list, *args, **kwargs):
    """A broadcast of objects: the sender does not exist, and has what this rank has."""


class World:
    """One rank of ``size``. ``calls()`` are those of its communicators since the last time. ``times``: measured ones of
    operators (``operators.nanoseconds``), None where the rates of the machine give all. The process cannot leave it:
    see ``run_apart``."""

    def __init__(self, rank, size, memory, machine):
        self.rank, self.size, self.machine, self.times = rank, size, machine, None
        self.memory = _native._C.MetaMemory(512)
        self.memory.set_rates(machine.host, machine.file, machine.host_step, machine.memory)
        logger.setLevel(logging.WARNING)  # the planned engine is no run
        self.clock = self.memory.clock = _native._C.StepPlan()
        self.recorder = _native._C.CallRecorder(False)
        listen_alone(self.recorder)
        set_accelerator(MetaAccelerator(memory, self.memory))
        local = min(size, machine.ranks_of_host or size)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank % local), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(local),
            LOCAL_SIZE=str(local), MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
        )  # fmt: skip
        self._join()

    def _join(self):
        if not hasattr(dist.Backend, NAME.upper()):
            dist.Backend.register_backend(NAME, self._backend, **({"devices": ["cpu", "meta"]} if TORCH2 else {}))
        dist.broadcast_object_list = _keep_objects
        group_communicators.native_backends[NAME] = self._of_group
        job = _native._C.Job(self.rank, self.size, self._open)
        self.earlier = mesh.join_planned(NAME, self.rank, self.size, job)

    def _backend(self, store, rank, size, timeout):
        made = self._communicator(rank, size, "torch.distributed", self.machine.link(range(size)))
        return _native._C.c10d_backend(made, None, NAME)

    def _of_group(self, group):
        ranks = [dist.get_global_rank(group, one) for one in range(dist.get_world_size(group))]
        return self._communicator(dist.get_rank(group), len(ranks), "torch.distributed", self.machine.link(ranks))

    def _open(self, key, ranks):
        return self._communicator(ranks.index(self.rank), len(ranks), key, self.machine.link(ranks))

    def _communicator(self, rank, size, name, link):
        return _native._C.counted_communicator(rank, size, call_log, name, self.clock, link)

    def at(self, phase):
        """Allocations and operations from now on belong to this phase of the step."""
        self.memory.set_moment(phase)
        self.clock.set_phase(phase)

    def calls(self):
        return self.recorder.take()
