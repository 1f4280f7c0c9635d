"""Keeps a segment's inputs for backward: unchanged, sharded over the model-parallel ranks, or on the host.

Between forward and backward a list of inputs is a list of *entries*, two per input: the kept object, and the ``Origin``
that describes the input, or None if the input itself is kept.
"""

from typing import NamedTuple

import torch

from deepspeed import comm as dist
from deepspeed.activation_checkpointing.hidden_states import mark_active
from deepspeed.activation_checkpointing.settings import current, thread
from deepspeed.activation_checkpointing.tensors import is_activation_to_checkpoint
from deepspeed.comm.mesh_views import ask_mpu


class Origin(NamedTuple):
    """An activation before it was sharded or moved."""

    shape: torch.Size
    device: torch.device
    parts: int  # 1: not sharded


# ---- shards -------------------------------------------------------------------------------------------------------
def get_partition_size(item):
    """Elements of each model-parallel rank's shard of ``item``; the last shard may be padded."""
    parts = current.parts()
    return (item.numel() + parts - 1) // parts


def get_partition_start(item):
    """First element of this rank's shard in the flattened ``item``."""
    return (ask_mpu(current.mpu, "rank") or 0) * get_partition_size(item) if current.parts() > 1 else 0


def partition_activations(args, cpu_checkpoint, contiguous_checkpoint):
    """The inputs with this rank's shard, 1-D and in memory of its own, instead of each activation.

    cpu_checkpoint: shards go to the host; contiguous_checkpoint: into buffers for all layers. Returns a list.
    """
    return [
        _shard(arg, index, cpu_checkpoint, contiguous_checkpoint) if is_activation_to_checkpoint(arg) else arg
        for index, arg in enumerate(args)
    ]


def _shard(arg, index, to_host, contiguous):
    _compare_once(arg)
    size, start = get_partition_size(arg), get_partition_start(arg)
    flat = arg.detach().reshape(-1)
    mine = flat[min(start, flat.numel()) : min(start + size, flat.numel())]
    move = to_host and arg.device.type != "cpu"
    if move and current.offload is None:
        raise RuntimeError(
            "cpu_checkpoint is set, but CPU checkpointing is not: call deepspeed.checkpointing.configure with "
            "checkpoint_in_cpu=True."
        )
    shard = _room(index, size, arg, move, contiguous)
    if mine.numel() < size:  # one collective gathers the shards of all ranks, so they have one size
        mine = torch.cat([mine, mine.new_zeros(size - mine.numel())])
    if move:
        current.offload.to_host(mine, shard)
    else:
        shard.copy_(mine)
    return shard


def _room(index, size, arg, on_host, contiguous):
    device = torch.device("cpu") if on_host else arg.device
    if contiguous and not thread.recomputing:
        if current.buffers is None:
            raise RuntimeError(
                "contiguous_checkpoint is set, but there are no buffers: call deepspeed.checkpointing.configure with "
                "contiguous_checkpointing=True, partition_activations=True and num_checkpoints."
            )
        return current.buffers.slot(index, size, arg.dtype, device, on_host and current.offload.use_pin_memory)
    return current.offload.room(size, arg.dtype) if on_host else torch.empty(size, dtype=arg.dtype, device=device)


def _compare_once(arg):
    """Shards make a whole only if all ranks cut the same activation. The first one is compared, by its sums."""
    if current.inputs_compared or current.parts() == 1:
        return
    current.inputs_compared = True
    values = arg.detach().double()
    mine = torch.stack([values.new_tensor(float(arg.numel())), values.sum(), values.abs().sum()])
    gathered = [torch.empty_like(mine) for _ in range(current.parts())]
    dist.all_gather(gathered, mine, group=current.group())
    first = gathered[0]
    for rank, other in enumerate(gathered):
        if bool(torch.isnan(first).any() | torch.isnan(other).any()):
            continue  # there is nothing to compare
        if other[0] != first[0] or bool(((other - first).abs() > 1e-3 * (first[2] + 1e-30)).any()):
            raise RuntimeError(
                f"partition_activations needs the same activation on every model-parallel rank, but rank {rank} of the "
                f"group passes one with {int(other[0])} elements of sum {float(other[1]):.6g} to the checkpointed "
                f"segment, and rank 0 one with {int(first[0])} of sum {float(first[1]):.6g}. Turn "
                f"partition_activations off where ranks hold different parts (sequence parallelism), or check why "
                f"they differ (dropout outside of the RNG tracker, different data)."
            )


def get_partitioned_activations_for_backward(args, inputs, contiguous_checkpoint):
    """Entries for ``args``, of which ``inputs`` is the result of ``partition_activations``. ``contiguous_checkpoint``
    has no effect: shards in buffers are kept like others."""
    parts = current.parts()
    return _entries(args, inputs, lambda arg: Origin(arg.shape, arg.device, parts))


def _entries(args, inputs, origin_of):
    entries = []
    for arg, kept in zip(args, inputs):
        entries += [kept, None if kept is arg else origin_of(arg)]
    return entries


# ---- the host -----------------------------------------------------------------------------------------------------
def get_cpu_activations_for_backward(args, inputs):
    """Entries for ``args``, of which ``inputs`` holds copies on the host (or ``args``' own tensors)."""
    return _entries(args, inputs, lambda arg: Origin(arg.shape, arg.device, 1))


def get_offloaded_activations_for_backward(args, engine):
    """Entries for ``args``, whose activations the offload ``engine`` copies to the host."""
    inputs = [
        engine.to_host(arg) if is_activation_to_checkpoint(arg) and engine.worth_moving(arg) else arg for arg in args
    ]
    return get_cpu_activations_for_backward(args, inputs)


def restore_offloaded_activations(tensors, engine):
    """Entries again; tensors that the ``engine`` has copied to the host are on their devices again."""
    restored = []
    for kept, origin in zip(tensors[0::2], tensors[1::2]):
        if origin is not None and kept.device != origin.device:
            kept = engine.to_device(kept, origin.device)
        restored += [kept, origin]
    return restored


def gather_partitioned_activations(tensors, device=None):
    """The inputs behind entries, as a tuple. Shards are gathered from the model-parallel group: every rank of it must
    call this in the same order. Activations are moved to ``device`` if it is given, else to their earlier device."""
    inputs = []
    for kept, origin in zip(tensors[0::2], tensors[1::2]):
        if origin is None:
            inputs.append(kept)
            continue
        target = torch.device(device) if device is not None else origin.device
        whole = kept.detach().to(target)
        if origin.parts > 1:
            gathered = whole.new_empty(origin.parts * whole.numel())
            dist.all_gather_into_tensor(gathered, whole, group=current.group())
            whole = gathered
        inputs.append(whole.reshape(-1)[: origin.shape.numel()].view(origin.shape))
    return tuple(inputs)


# ---- both, as configured ------------------------------------------------------------------------------------------
def keep(args):
    """Entries for the inputs ``args`` of a segment that begins."""
    if current.partition and (current.parts() > 1 or current.contiguous):
        inputs = partition_activations(args, current.cpu, current.contiguous)
        return get_partitioned_activations_for_backward(args, inputs, current.contiguous)
    mark_active([arg for arg in args if is_activation_to_checkpoint(arg)])
    if current.cpu:
        return get_offloaded_activations_for_backward(args, current.offload)
    return [one for arg in args for one in (arg, None)]


def bring_back(entries):
    """The inputs that ``entries`` describe: a tuple of tensors and other objects."""
    if current.buffers is not None and not thread.recomputing:
        current.buffers.close()
    if any(o is not None and k.device != o.device for k, o in zip(entries[0::2], entries[1::2])):
        entries = restore_offloaded_activations(entries, current.offload)
    return gather_partitioned_activations(entries)
