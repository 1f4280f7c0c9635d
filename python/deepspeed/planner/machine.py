"""The rates of a machine, which turn operators, calls and transfers into time."""

import dataclasses
import functools
import json
import os

import torch

from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.planner.child import run_anew
from deepspeed.planner.host_time import host_ns
from deepspeed.profiling.op_costs import is_attention
from deepspeed.profiling.peak import attention_flops, device_model, measured_once, peak_flops, rate_name

VERSION = 1


@dataclasses.dataclass
class Machine:
    """``flops``: by dtype, of a matrix product, per second. ``memory``: bytes per second that the device reads and
    writes. ``operator_ns``: the least time of an operator. ``inside``, ``between``: ``(nanoseconds of a round, bytes
    per second)`` of a rank's calls with ranks of its host, and of several hosts. ``host``: bytes per second between the
    device and memory of the host. ``file``: of files, which are read and written at the same time. ``host_step``: bytes
    per second that an update on the host reads and writes. A rate of 0 takes no time. ``ranks_of_host``: 0: all ranks
    are on one host. ``workspace``: bytes on the device that libraries of matrix products keep from the first one on.
    ``synchronous``: the host waits for each operator, as on the CPU. ``host_ns``: its time for the call of a small
    layer (``host_time.host_ns``); 0: its program takes no time. ``attention``: as ``flops``, of fused attention; where
    it has no rate, that of products counts. ``call_ns``: of the host, to start a collective on a device; on the CPU
    the host carries it out."""

    name: str
    flops: dict
    memory: float
    operator_ns: int
    inside: tuple
    between: tuple
    host: float
    file: float
    host_step: float
    ranks_of_host: int = 0
    workspace: int = 0
    synchronous: bool = False
    host_ns: int = 0
    attention: dict = dataclasses.field(default_factory=dict)
    call_ns: int = 5_000

    def link(self, ranks):
        """The ``LinkCost`` of a group."""
        hosts = {rank // self.ranks_of_host for rank in ranks} if self.ranks_of_host else {0}
        latency, rate = self.inside if len(hosts) == 1 else self.between
        return _native._C.LinkCost(int(latency), int(rate))

    def with_drives(self, folders):
        """This machine with the rate of the slowest drive of ``folders``, which need not be there yet; itself where it
        has a rate, or where nothing can be written to any of them."""
        rates = [] if self.file else list(filter(None, map(_drive_rate, folders)))
        return dataclasses.replace(self, file=min(rates)) if rates else self

    def peak(self, dtype):
        """Flops per second of products of this dtype."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])

    def time_of(self, name, cost, dtype):
        """Nanoseconds of an operator (``op_costs.Cost``)."""
        peak = self.attention.get(str(dtype).removeprefix("torch.")) if is_attention(name) else None
        peak = peak or self.peak(dtype)
        moves = 1e9 * cost.bytes / self.memory if self.memory else 0.0
        return int(max(self.operator_ns, 1e9 * cost.flops / peak, moves))

    def save(self, path):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"version": VERSION, **dataclasses.asdict(self)}, file, indent=1)

    @classmethod
    def of_jobs(cls, path=None):
        """That of the file ``path``; None: of the file that ``ds_plan --profile-machine`` keeps, else of this machine,
        whose links were not measured."""
        kept = kept_path()
        if path is None and not (kept and os.path.exists(kept)):
            return here()
        return cls.read(kept if path is None else path)

    @classmethod
    def read(cls, path):
        """ValueError for a file of another version, or that is none."""
        with open(path, encoding="utf-8") as file:
            try:
                values = json.load(file)
            except ValueError as error:
                raise ValueError(f"{path} is not a machine file: {error}") from None
        version = values.pop("version", None) if isinstance(values, dict) else None
        if version != VERSION:
            raise ValueError(
                f"{path} is a machine file of version {version!r}, and this is version {VERSION}: "
                "make a new one with ds_plan --profile-machine"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) - names or not {"name", "flops", "memory"} <= set(values):
            raise ValueError(f"{path} is not a machine file: it has the keys {', '.join(sorted(values))}")
        return cls(**values)


def kept_path():
    """The machine file of this user; "" where nothing can be kept."""
    rates = _native._C.rates_folder()
    return os.path.join(os.path.dirname(rates), "machine.json") if rates else ""


def here(inside=(20_000, 2e9), between=(50_000, 1e9), ranks_of_host=0):
    """This machine, by the rates that are measured once and kept. Links are as given."""
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    host, back, _, _, host_step, step = _native._C.memory.machine_rates(
        device, device.type != "cpu", "", torch.get_num_threads()
    )
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if accelerator.is_fp16_supported():
        dtypes["float16"] = torch.float16
    return Machine(
        name=f"{accelerator.device_name()} of this machine, links assumed",
        flops={name: peak_flops(device, dtype) for name, dtype in dtypes.items()},
        attention={name: attention_here(device, dtype) for name, dtype in dtypes.items()},
        memory=step or host_step,
        operator_ns=5_000,
        inside=inside,
        between=between,
        host=mean_rate(host, back),
        file=0.0,
        host_step=host_step,
        ranks_of_host=ranks_of_host,
        workspace=workspace_here(),
        synchronous=device.type == "cpu",
        host_ns=round(host_ns()),
    )


def _drive_rate(folder):
    """The rate of the drive that holds ``folder``, or the folder in which it will be made; 0 where nothing can be
    written there."""
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(os.path.abspath(folder)).rstrip("/")
    return _native._C.memory.drive_update_rate(folder) if folder and os.access(folder, os.W_OK) else 0.0


def mean_rate(read, write):
    """The rate of bytes that are read and written in equal parts, one after the other."""
    return 2 / (1 / read + 1 / write) if read and write else 0.0


def attention_here(device, dtype):
    """``Machine.attention`` of this machine, measured once. A backward on a device starts threads, which a forked child
    does not have, so another process runs it."""
    apart = device.type != "cpu"
    there, here = functools.partial(run_anew, _attention, (dtype,)), functools.partial(_attention, dtype)
    measure = functools.partial(there, torch.get_num_threads()) if apart else here
    return measured_once("attention", rate_name(device, dtype), measure)


def _attention(dtype):
    """The work of a new process, whose accelerator knows the name of the device."""
    return attention_flops(torch.device(get_accelerator().current_device_name()), dtype)


def workspace_here():
    """``Machine.workspace`` of this machine, measured once; 0 on the CPU, where nothing counts such memory."""
    device = torch.device(get_accelerator().current_device_name())
    if device.type == "cpu":
        return 0
    name = f"{device_model(device)}-{torch.__version__}-{os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')}"
    return int(measured_once("workspaces", name, functools.partial(run_anew, _workspace, (), 1)))


def _workspace():
    """The work of a new process. The thread of a forward and that of its backward have workspaces of their own."""
    accelerator = get_accelerator()
    device, before = accelerator.current_device_name(), accelerator.memory_allocated()
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(64, 64, device=device, dtype=dtype).requires_grad_()).sum().backward()
        del layer
    accelerator.synchronize()
    return accelerator.memory_allocated() - before
