"""The memory of each tier that a configuration will need, before anything is allocated: ``deepspeed.offload_plan``."""

import dataclasses
import os
import shutil
from itertools import accumulate

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.model import layout
from deepspeed.host.cpu import memory_bytes
from deepspeed.ops.by_name import is_native, optimizer_named, states_of_element
from deepspeed.zero.offload.rates import folder_of, tier_rate
from deepspeed.zero.parameters.param_ranks import numel_of

_TIERS = ("device", "host", "file")
_ANY = 2**63 - 1  # bytes of a memory that has no limit
_WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}


def offload_plan(model, config, world_size=None, rates=None):
    """The memory of each tier that training ``model`` with ``config`` takes on one rank.

    model: a module (of the device ``meta``, too) or a number of parameters. world_size: data-parallel ranks; None:
    those of WORLD_SIZE, else 1. rates: bytes per second at which a tier reads and writes, by its name ("host", "file");
    None: those that this machine reaches, measured once and kept in ``~/.cache/deepspeed/rates``; {}: none. For
    ``zero_optimization.placement`` "step" is the bytes per second that an update reads and writes.

    Returns a dict with ``parameters`` and, by tier ("device", "host", "file"), ``peak_bytes`` without activations,
    ``bytes_per_step`` that travel between that tier and where they are worked on, ``free_bytes`` as far as that is
    known, and ``fits`` (None: unknown); ``placement``: which shares of gradients ("grad"), masters and optimizer states
    ("slots") rest in which tier, as the engine places them; ``step_seconds``: the least that a step takes with these
    ``rates``, None where nothing travels or no rate is known.
    """
    made = config if isinstance(config, DeepSpeedConfig) else DeepSpeedConfig(config)
    zero, world = made.zero_config, int(world_size or os.environ.get("WORLD_SIZE", 1))
    params = [] if isinstance(model, int) else list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    numels = list(map(numel_of, trained)) or [model if isinstance(model, int) else 0]
    numel, frozen = sum(numels), sum(numel_of(param) for param in params if not param.requires_grad)
    narrow = made.float16_config.enabled or made.bfloat16_config.enabled
    width, section = 2 if narrow else 4, zero.offload_optimizer
    steps = made.gradient_accumulation_steps or 1
    accumulates = steps > 1
    grad = _WIDTHS.get(str(made.grad_accum_dtype), 4 if accumulates else width)
    policy = _C.stage_policy(int(zero.stage))
    states, own_states = _states(made, trained or [torch.nn.Parameter(torch.zeros(2, 2))])
    parts = [-(-one // world) for one in numels]
    in_planes = 4 * sum(part * count for part, count in zip(parts, states))
    slots = -(-(in_planes + 4 * own_states * sum(parts)) // max(1, sum(parts)))  # bytes of an element
    planned = _shares_of(zero, policy, [sum(parts) * grad, sum(parts) * 4, in_planes, sum(parts) * width], steps, rates)
    shares, away = planned.shares, planned.away
    if own_states:  # where torch makes them: beside the masters
        shares = {**shares, "slots": shares["master"]}
    of_params = zero.offload_param if policy.shards_params else None  # elsewhere the section has no effect
    slices = of_params if _device_in(of_params) != "none" else None
    master = 4 if narrow or away or slices is not None else 0
    held = _C.memory.states_per_rank(int(zero.stage), numel, world, width, grad, master, slots)
    if shares["grad"][0] < 1:  # reduced gradients have a buffer of their own
        held["grad"] = -(-numel // world) * grad
    bucket = _bucket(zero, policy, numel, away, map(numel_of, trained) if params else None)
    tiers = {
        tier: int(sum(held[kind] * share[number] for kind, share in shares.items()))
        for number, tier in enumerate(_TIERS)
    }
    tiers["device"] += held["param"] + frozen * width // (world if policy.shards_params else 1)
    own, row = -(-numel // world), -(-bucket // world)
    default = layout("training", "zero_optimization.offload_optimizer")["buffer_count"]["default"]
    leaving = section.buffer_count if section is not None else default
    tiers["device"] += _gradients_on_device(policy, shares["grad"][0] < 1, numel, world, bucket, leaving) * grad
    if policy.shards_params:
        tiers["device"] += _gathered(zero, numels) * width
    if away:
        weights = row * (5 if width == 2 else 4)  # new ones on their way: two or three rows of 16 bits, or one
        tiers["host"] += weights
        tiers["host"] += int(own * grad * (1 - shares["grad"][0])) if accumulates else 0  # what is added to the sums
    if planned.in_files:
        # A step holds states of a bucket and of the next one; those that are being written may fill all buffers.
        states_of_row = row * (grad + master + slots)
        buffers = row * 4 * (planned.buffers + 1) * (1 + planned.reads_ahead + planned.writes_behind)
        held_ahead = states_of_row * (1 + planned.reads_ahead)
        held_ahead += weights * planned.reads_ahead  # new ones of two buckets, then
        tiers["host"] += buffers - weights if planned.writes_behind else min(buffers, held_ahead)
    moved = {"device": 0, "host": 0, "file": 0}
    if planned.moved is not None:
        moved["host"], moved["file"] = planned.moved
    elif away:
        moved["host"] = int(own * (grad + width) * section.ratio)
        if planned.in_files:
            moved["file"] = int(own * (2 * grad + 2 * master + 2 * slots) * section.ratio)
    if slices is not None:
        _add_params(slices, held["param"], width, tiers, moved)
    device, folder = _device(), folder_of([section, of_params])
    free = {
        "device": None if device.type == "cpu" else get_accelerator().total_memory(),
        "host": memory_bytes()[0],
        "file": shutil.disk_usage(folder).free if os.path.isdir(folder) else None,
    }
    report = {
        tier: {
            "peak_bytes": peak,
            "bytes_per_step": moved[tier],
            "free_bytes": free[tier],
            "fits": None if free[tier] is None else peak <= free[tier],
        }
        for tier, peak in tiers.items()
    }
    if rates is None:  # of bytes that are read and written in equal parts, one after the other
        reached = {tier: tier_rate(tier, device, [section, of_params]) for tier in moved if moved[tier]}
        rates = {tier: 2 / (1 / rate[0] + 1 / rate[1]) for tier, rate in reached.items() if rate is not None}
    times = [moved[tier] / rates[tier] for tier in moved if moved[tier] and rates.get(tier)]
    placement = {kind: dict(zip(_TIERS, share)) for kind, share in shares.items()}
    return {
        "parameters": numel,
        "tiers": report,
        "placement": placement,
        "step_seconds": max(times + [planned.seconds]) if times else None,
    }


def _states(made, trained):
    """Numbers that the optimizer keeps of each element: of each trained parameter (one that has them all, for a number
    of parameters) in planes of the engine, and in tensors of torch's own. Nobody knows a client's: two, as Adam's."""
    name = made.optimizer_name or "adam"
    optimizer = optimizer_named(name, trained, made.optimizer_params if made.optimizer_name else {})
    if not is_native(optimizer):
        return [0] * len(trained), states_of_element(name, made.optimizer_params)
    counts = {id(p): len(optimizer.slots_of(group)) for group in optimizer.param_groups for p in group["params"]}
    return [counts[id(param)] for param in trained], 0


def _device_in(section):
    return "none" if section is None else str(getattr(section.device, "value", section.device))


@dataclasses.dataclass
class _Shares:
    """``shares``: kind -> shares on the device, on the host, in files. Of files: ``buffers`` of the host for a bucket,
    and whether they are read ahead and written behind. ``moved``: bytes between host and device and of files in a step;
    ``seconds``: the least time of a step, where it is known."""

    shares: dict
    buffers: int = 0
    reads_ahead: bool = False
    writes_behind: bool = False
    moved: tuple = None
    seconds: float = 0.0

    @property
    def away(self):
        return any(share[0] < 1 for share in self.shares.values())

    @property
    def in_files(self):
        return any(share[2] > 0 for share in self.shares.values())


def _shares_of(zero, policy, need, steps, rates):
    """``need``: bytes of this rank's gradients, masters, states and weights."""
    section, placement = zero.offload_optimizer, zero.placement
    if placement is not None and placement.auto and policy.shards_states:
        files = section is not None and section.nvme_path is not None
        given = zip((placement.device_gb, placement.host_gb, placement.nvme_gb), (0, _ANY, _ANY))
        room = [fallback if gib is None else int(gib * 2**30) for gib, fallback in given]
        room[2] = room[2] if files else 0
        pinned, folder = section is None or section.pin_memory, str(section.nvme_path) if files else ""
        one_memory = sum(need[:3]) <= room[0] or room[0] == 0 and sum(need[:3]) <= room[1]
        reached = [0.0] * 6
        if rates is not None:
            host, file, step = (float(rates.get(key, 0)) for key in ("host", "file", "step"))
            reached = [host, host, file, file, step, step]
        elif not one_memory and (os.path.isdir(folder) or not files):
            reached = _C.memory.machine_rates(_device(), pinned, folder, torch.get_num_threads())
        shares, seconds, link, drive = _C.memory.auto_placements(need, room, steps, reached)
        buffers = section.buffer_count if section is not None else 0
        return _Shares(shares, buffers, True, True, (int(link), int(drive)), seconds)
    device = _device_in(section)
    share = section.ratio if device != "none" else 0.0
    each = (1 - share, share if device == "cpu" else 0.0, share if device == "nvme" else 0.0)
    shares = dict.fromkeys(("grad", "master", "slots"), each)
    if device != "nvme":
        return _Shares(shares)
    return _Shares(shares, section.buffer_count, section.pipeline_read, section.pipeline_write)


def _gradients_on_device(policy, moves, numel, world, bucket, leaving):
    """Elements of buffers for gradients before and during their reduction. ``leaving``: the number of rows of a bucket
    that may be in transfer to their tier at a time (0: all)."""
    own, row, count = -(-numel // world), -(-bucket // world), -(-numel // bucket)
    if not moves:  # one rank alone sums them in place; otherwise sums go to their tier
        return 0 if world == 1 and not policy.shards_params else min(2, count) * bucket
    copies = min(own, min(count, leaving or count) * row)
    if policy.shards_grads:  # a bucket that is filled, one that is reduced; a sum, which is copied, and copies
        return min(2, count) * bucket + row + copies
    return numel + own + copies  # local ones, all sums at once


def _gathered(zero, numels):
    """Elements of whole parameters: those kept up to their next use, those fetched ahead, and a layer."""
    numel, largest = sum(numels), max(numels, default=0)
    kept = min(numel, zero.max_live_parameters)
    if numel > zero.max_reuse_distance:
        kept = min(kept, max(zero.max_reuse_distance, 2 * largest))
    return min(numel, kept + zero.prefetch_bucket_size + largest)


def _add_params(section, held, width, tiers, moved):
    """Slices of parameters that rest elsewhere."""
    where = _device_in(section)
    tiers["device"] -= held
    on_host = held if where == "cpu" else min(held, int(section.max_in_cpu) * width)
    tiers["host"] += on_host
    tiers["file"] += held - on_host
    moved["host"] += 2 * held  # for forward and for backward
    if where == "nvme":
        tiers["host"] += min(int(section.buffer_count) * int(section.buffer_size) * width, 2 * (held - on_host))
        moved["file"] += 3 * (held - on_host)  # and written in the step


def _device():
    accelerator = get_accelerator()
    return torch.device(accelerator.current_device_name() if accelerator.device_name() != "cpu" else "cpu")


def _bucket(zero, policy, numel, away, numels):
    """Elements of the largest one: whole parameters, one after the other. ``numels``: theirs; None: not known."""
    limit = min(zero.reduce_bucket_size, numel)
    if away:
        limit = min(limit, _C.memory.moved_bucket_limit(numel))
        if policy.shards_params and _device_in(zero.offload_optimizer) != "none":
            limit = min(limit, zero.sub_group_size)
    if numels is None:
        return max(1, limit)
    held = accumulate(numels, lambda before, size: size if before + size > limit else before + size, initial=0)
    return max(1, *held)
