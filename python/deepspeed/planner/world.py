"""Makes this process one rank of a job whose other ranks do not exist, with the device meta as its accelerator."""

import contextlib
import functools
import itertools
import logging
import os
import pickle
from typing import NamedTuple

import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed._compat import TORCH2
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.abstract_accelerator import constant, of_device
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.comm import group_communicators, mesh
from deepspeed.comm.timed import call_log, listen_alone
from deepspeed.comm.timeouts import default_timeout
from deepspeed.log import logger
from deepspeed.planner.host_time import HostTime

NAME = "counted"


class _MetaStream:
    """A stream, or an event, of the device meta. A copy on it is done at once. Code that keeps the tensors of a copy
    until a stream has been waited for keeps them in a plan, too. ``clock``: of the planned step."""

    def __init__(self, clock, **options):
        self.clock, self._mark = clock, 0

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream

    def record(self, stream=None):
        self._mark = self.clock.mark

    def query(self):
        return True

    def elapsed_time(self, end):
        return 0.0

    def synchronize(self):
        self.clock.host_waits("an event", self._mark)


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

    # As the device of the host has them, which has none, or as a GPU.
    Stream = Event = property(
        lambda self: None if self.count.on_host else functools.partial(_MetaStream, self.count.clock)
    )

    def stream(self, stream):
        return contextlib.nullcontext()

    def current_stream(self, device_index=None):
        return _MetaStream(self.count.clock)

    def use_host_timers(self):
        return self.count.on_host

    def synchronize(self, device_index=None):
        self.count.clock.host_waits("the device")

    def _on_host(self, device):
        return device.type == "cpu" or self.count.on_host

    def is_fp16_supported(self):
        return True

    def supported_dtypes(self):
        return [torch.float32, torch.bfloat16, torch.float16]

    def pin_memory(self, tensor, make_copy=True, match_shape=True):
        return tensor if match_shape else tensor.reshape(-1)


class Peers(NamedTuple):
    """Ranks of a job that are planned at one time, in processes of their own, and send each other messages without
    values. ``path``: a file for these processes alone."""

    ranks: tuple
    path: str


def _meet_nobody(*args, **kwargs):
    """The other ranks do not exist."""


class World:
    """One rank of ``size``. ``calls()`` are those of its communicators since the last time. ``on_host``: the device has
    the memory of the host, and ranks exchange through it. ``peers``: the ranks that are planned with this one; None: it
    is alone. ``times``: measured ones of operators (``operators.nanoseconds``), None where the rates of the machine
    give all. ``flag``: the value of flags that the model asks for. The process cannot leave it: see ``run_apart``."""

    def __init__(self, rank, size, memory, machine, on_host=False, peers=None):
        self.rank, self.size, self.machine, self.times, self.flag = rank, size, machine, None, True
        self.peers, self._told = (rank,) if peers is None else peers.ranks, 0
        self._store = dist.HashStore() if peers is None else dist.FileStore(peers.path, len(peers.ranks))
        self._store.set_timeout(default_timeout())  # a peer that fails ends all of them before
        self.memory, self.shared = _native._C.MetaMemory(1 if on_host else 512, on_host), {}
        self.memory.set_rates(machine.host, machine.file, machine.host_step, machine.memory)
        logger.setLevel(logging.WARNING)  # the planned engine is no run
        self.clock = self.memory.clock = _native._C.StepPlan(machine.synchronous, machine.call_ns)
        local = min(size, machine.ranks_of_host or size)
        self.host = HostTime(self.clock, machine, local)
        self.recorder = _native._C.CallRecorder(False)
        listen_alone(self.recorder)
        set_accelerator(MetaAccelerator(memory, self.memory))
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank % local), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(local),
            LOCAL_SIZE=str(local), MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
        )  # fmt: skip
        self._join()

    def install(self):
        """From now on tensors on meta count, and the device has the workspaces of its libraries."""
        self.memory.install()
        if self.machine.workspace:
            self.memory.set_owner("workspaces")
            self._workspace = torch.empty(self.machine.workspace, dtype=torch.uint8, device="meta")

    def _join(self):
        if not hasattr(dist.Backend, NAME.upper()):
            dist.Backend.register_backend(NAME, self._backend, **({"devices": ["cpu", "meta"]} if TORCH2 else {}))
        dist.broadcast_object_list = self._broadcast_objects
        dist.distributed_c10d._store_based_barrier = _meet_nobody  # with which new_group ends in torch 1
        group_communicators.native_backends[NAME] = self._of_group
        job = _native._C.Job(self.rank, self.size, self._open, self.machine.ranks_of_host)
        mesh.join_planned(NAME, self.rank, self.size, job)

    def _backend(self, store, rank, size, timeout):
        made = self._communicator(rank, size, "torch.distributed", self.machine.link(range(size)))
        return _native._C.c10d_backend(made, None, NAME)

    def _of_group(self, group):
        ranks = [dist.get_global_rank(group, one) for one in range(dist.get_world_size(group))]
        return self._communicator(dist.get_rank(group), len(ranks), "torch.distributed", self.machine.link(ranks))

    def _open(self, key, ranks, in_memory):
        peers = dist.PrefixStore(key, self._store) if set(ranks) <= set(self.peers) else None
        return self._communicator(ranks.index(self.rank), len(ranks), key, self.machine.link(ranks), peers)

    def _communicator(self, rank, size, name, link, peers=None):
        touched = functools.partial(self._touch, name) if self.memory.on_host else None
        return _native._C.counted_communicator(rank, size, call_log, name, self.clock, link, touched, peers)

    def _touch(self, name, size):
        """Exchanges of a group touch ``size`` bytes of the memory that its ranks share."""
        if name not in self.shared or self.shared[name].numel() < size:
            self.shared.pop(name, None)
            owner = self.memory.set_owner("buffers")
            self.shared[name] = torch.empty(size, dtype=torch.uint8, device="meta")
            self.memory.set_owner(owner)

    def told_by_peers(self, value):
        """Returns the values that the peers pass, in their order. All peers call it."""
        self._told += 1
        self._store.set(f"told {self._told} by {self.rank}", pickle.dumps(value))
        return [pickle.loads(self._store.get(f"told {self._told} by {rank}")) for rank in self.peers]

    def _broadcast_objects(self, object_list, src=0, group=None, **kwargs):
        """A sender that is not planned has what this rank has. Groups have one of the peers, or all."""
        ranks = (
            range(self.size)
            if group is None
            else map(dist.get_global_rank, itertools.repeat(group), range(dist.get_world_size(group)))
        )
        if src in self.peers and set(self.peers) <= set(ranks):
            object_list[:] = self.told_by_peers(object_list)[self.peers.index(src)]

    def at(self, phase):
        """Allocations and operations from now on belong to this phase of the step."""
        self.host.pause()
        self.memory.set_moment(phase)
        self.clock.set_phase(phase)

    def calls(self):
        return self.recorder.take()
