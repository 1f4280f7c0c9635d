"""The memory of each tier that a configuration will need, before anything is allocated: ``deepspeed.offload_plan``."""

import functools
import os
import shutil

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.model import layout
from deepspeed.host.cpu import memory_bytes
from deepspeed.planner.child import run_apart
from deepspeed.planner.machine import Machine, mean_rate
from deepspeed.planner.plans import files_apart, values_of
from deepspeed.planner.step import KINDS, PlannedRun, own_states
from deepspeed.planner.world import World
from deepspeed.utils.init_on_device import copy_on_meta
from deepspeed.zero.nested import loss_or_sum
from deepspeed.zero.offload.rates import folder_of

_BUFFERS = layout("training", "zero_optimization.offload_optimizer")["buffer_count"]
_TIERS = ("device", "host", "file")
_PARAMETERS = 64  # of a model that is only a number
_ALIGNED = 64  # elements
_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)  # which are not called


def offload_plan(model, config, world_size=None, rates=None):
    """The memory of each tier that training ``model`` with ``config`` takes on one rank. The engine makes two steps on
    tensors without memory, as in ``deepspeed.plan``, with a gradient for each parameter and no activations.

    model: a module (of the device ``meta``, too) or a number of parameters. world_size: data-parallel ranks; None:
    those of WORLD_SIZE, else 1. rates: bytes per second at which a tier reads and writes, by its name ("host", "file"),
    and "step", the bytes per second that an update reads and writes; None: those that this machine reaches, measured
    once and kept in ``~/.cache/deepspeed/rates``; {}: none.

    Returns a dict with ``parameters`` and, by tier ("device", "host", "file"), ``peak_bytes`` without activations,
    ``bytes_per_step`` that travel between that tier and where they are worked on, ``free_bytes`` as far as that is
    known, and ``fits`` (None: unknown); ``placement``: which shares of gradients ("grad"), masters and optimizer states
    ("slots") rest in which tier, as the engine places them; ``step_seconds``: the least that a step takes with these
    ``rates``, None where nothing travels or no rate is known.
    """
    made = config if isinstance(config, DeepSpeedConfig) else DeepSpeedConfig(config)
    world = int(world_size or os.environ.get("WORLD_SIZE", 1))
    accelerator, zero = get_accelerator(), made.zero_config
    device = torch.device(accelerator.current_device_name() if accelerator.device_name() != "cpu" else "cpu")
    folder = folder_of([zero.offload_optimizer, zero.offload_param])
    machine = _machine(device, zero.offload_optimizer, folder if os.path.isdir(folder) else "", rates)
    bare = model if isinstance(model, int) else copy_on_meta(model, hooks=False)
    given = {**values_of(made), "train_micro_batch_size_per_gpu": 1}
    given["gradient_accumulation_steps"] = made.gradient_accumulation_steps or 1
    given.pop("train_batch_size", None)  # without activations it does not matter
    given.setdefault("optimizer", {"type": "Adam"})  # nobody knows a client's
    leaving = zero.offload_optimizer.buffer_count if zero.offload_optimizer is not None else _BUFFERS["default"]
    with files_apart(given) as given:
        tiers, placement, seconds, numel = run_apart(_plan_tiers, bare, given, world, machine, leaving)
    free = {
        "device": None if device.type == "cpu" else accelerator.total_memory(),
        "host": memory_bytes()[0],
        "file": shutil.disk_usage(folder).free if os.path.isdir(folder) else None,
    }
    for tier, row in tiers.items():
        row.update(free_bytes=free[tier], fits=None if free[tier] is None else row["peak_bytes"] <= free[tier])
    return {"parameters": numel, "tiers": tiers, "placement": placement, "step_seconds": seconds}


def _machine(device, section, folder, rates):
    """The rates of tiers; of calls and operators none."""
    if rates is None:
        pinned = section is None or section.pin_memory
        both = _C.memory.machine_rates(device, pinned, "", torch.get_num_threads())
        drive = _C.memory.drive_update_rate(folder) if folder else 0.0
        rates = {"host": mean_rate(*both[:2]), "file": drive, "step": both[4]}
    host, file, step = (float(rates.get(name, 0)) for name in ("host", "file", "step"))
    return Machine("given", {"float32": 1e18}, step, 0, (0, 1e18), (0, 1e18), host, file, step)


class _WithoutActivations(torch.nn.Module):
    """Runs the modules that own parameters one after the other. They pass on a number, to which they add their
    parameters: each of these is used once and gets a gradient."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
        self.called = [module for module in owners if not isinstance(module, _LISTS)]
        self.lists = [module for module in owners if isinstance(module, _LISTS)]
        for module in self.called:
            object.__setattr__(module, "forward", functools.partial(_with_parameters, module))

    def forward(self, x):
        for module in self.lists:
            x = _with_parameters(module, x)
        for module in self.called:
            x = module(x)
        return x


def _with_parameters(module, x):
    return sum((param.float().sum() for param in module.parameters(recurse=False)), x)


def _of_number(numel):
    """A model of this many parameters."""
    size = max(_ALIGNED, numel // _PARAMETERS // _ALIGNED * _ALIGNED)
    sizes = [size] * (numel // size) + ([numel % size] if numel % size else [])
    return torch.nn.ParameterList(torch.nn.Parameter(torch.empty(one, device="meta")) for one in sizes)


def _on_their_way(copies, count):
    """The most bytes of ``count`` (0: all) rows of gradients that leave the device one after the other, without the
    largest row, which a plan counts: there each copy is done at once, and in a run the link may be slow."""
    rows = [size for plane, _, read, size, *_ in copies if not read and plane.startswith("grad")]
    windows = [sum(rows[first : first + (count or len(rows))]) for first in range(len(rows))]
    return max(windows, default=0) - max(rows, default=0)


def _plan_tiers(model, config, world_size, machine, leaving):
    """The work of the child process: ``(tiers, placement, seconds, parameters that are trained)``. ``leaving``: rows of
    a bucket that may be on their way to their tier at a time."""
    world = World(0, world_size, 1 << 62, machine)
    world.install()
    made = _WithoutActivations(_of_number(model) if isinstance(model, int) else model)
    numel = sum(param.numel() for param in made.parameters() if param.requires_grad)
    run = PlannedRun(world, made, config, torch.zeros((), device="meta"), loss_or_sum, None)
    run.step()
    storage = None if run.engine.core is None else run.engine.core.storage
    if storage is not None:
        storage.record_copies(True)
    _, moved = run.step()
    late = _on_their_way(storage.take_copies(), leaving) if storage is not None else 0
    shares = {kind: run.shares_of(kind) for kind in KINDS}
    own = own_states(run.engine)
    if own:  # where torch makes them: beside the masters
        shares["slots"] = shares["master"]
    media = run.media() or {tier: {"peak_bytes": 0} for tier in _TIERS}
    tiers = {
        tier: {
            "peak_bytes": media[tier]["peak_bytes"] + int(own * shares["master"][tier]) + late * (tier == "device"),
            "bytes_per_step": moved.get(tier, 0) if tier != "device" else 0,
        }
        for tier in _TIERS
    }
    rates = {"host": machine.host, "file": machine.file}
    known = any(size and rates.get(tier) for tier, size in moved.items())
    return tiers, shares, run.update_seconds(moved) if known else None, numel
