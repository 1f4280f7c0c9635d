"""Small ZeRO checkpoints, made without an engine, in the layout that all implementations write."""

import collections
import os
import pathlib

import torch


def weights_of(shapes, seed=0):
    """Values for ``[{name: shape}]``, one dict per parameter group."""
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(shape, generator=generator) for name, shape in group.items()} for group in shapes]


def flat_shards(group, ranks):
    flat = torch.cat([value.reshape(-1) for value in group.values()])
    size = -(-flat.numel() // ranks)
    return [flat[rank * size : (rank + 1) * size].clone() for rank in range(ranks)]


def slices(value, ranks):
    """One row a rank, with zeros behind the last element."""
    return torch.cat([value.reshape(-1), value.new_zeros(-value.numel() % ranks)]).view(ranks, -1)


def sliced_shards(groups, ranks):
    sliced = [[slices(value, ranks) for value in group.values()] for group in groups]
    return [[torch.cat([value[rank] for value in group]) for group in sliced] for rank in range(ranks)]


def write_checkpoint(folder, groups, stage, ranks, tag="step", frozen=None, buffers=None, shared=None):
    """Writes ``groups`` ([{name: tensor}]) as a checkpoint of ``stage`` by that many ranks; ``latest`` names it."""
    frozen, buffers, shared = frozen or {}, buffers or {}, shared or {}
    os.makedirs(os.path.join(folder, tag), exist_ok=True)
    shapes = [collections.OrderedDict((n, v.shape) for n, v in group.items()) for group in groups]
    module = {**buffers, **{n: v.bfloat16() for group in groups for n, v in group.items()}, **frozen}
    module.update({alias: module[name] for alias, name in shared.items()})
    for rank in range(ranks if stage == 3 else 1):
        parts = {n: slices(v, ranks)[rank].clone() for n, v in frozen.items()}
        state = {
            "module": {n: v if n in buffers else v.new_empty(0) for n, v in module.items()} if stage == 3 else module,
            "buffer_names": list(buffers),
            "param_shapes": shapes,
            "frozen_param_shapes": {n: v.shape for n, v in frozen.items()} if stage > 1 else None,
            "frozen_param_fragments": (parts if stage == 3 else frozen) if stage > 1 else None,
            "shared_params": shared,
            "ds_version": "0",
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(state, os.path.join(folder, tag, f"{name}_model_states.pt"))
    flats = [flat_shards(group, ranks) for group in groups]
    for rank in range(ranks):
        if stage == 3:
            part = {"partition_count": ranks, "fp32_flat_groups": sliced_shards(groups, ranks)[rank]}
        else:
            part = {
                "partition_count": [ranks] * len(groups),
                "single_partition_of_fp32_groups": [shards[rank] for shards in flats],
            }
        state = {"optimizer_state_dict": {"zero_stage": stage, **part}, "ds_version": "0"}
        torch.save(state, os.path.join(folder, tag, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    pathlib.Path(folder, "latest").write_text(tag)
