"""Writes a checkpoint of an engine."""

import hashlib
import os

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import names, storage, zero_states
from deepspeed.checkpoint.contents import files_of
from deepspeed.log import log_dist, logger


def _check_tag(engine, tag):
    """All ranks must save under one tag, or each rank writes into a folder of its own."""
    if not engine._config.checkpoint_tag_validation_enabled or engine.world_size == 1:
        return
    digest = torch.tensor(list(hashlib.sha256(tag.encode()).digest()), dtype=torch.int32, device=engine.device)
    lowest, highest = digest.clone(), digest.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if bool((lowest == highest).all()):
        return
    text = (
        f"rank {engine.global_rank} saves under tag {tag!r}, other ranks under another one; pass the same tag on every "
        "rank"
    )
    if engine._config.checkpoint_tag_validation_fail:
        raise ValueError(text)
    logger.warning(text)


def _without_own_keys(engine, client_state):
    """``client_state`` without what load_checkpoint handed back of the engine's own: passed on to the next save, those
    old values would replace the current ones."""
    loaded = engine.loaded_engine_state
    return {key: value for key, value in client_state.items() if not (key in loaded and loaded[key] is value)}


def save_checkpoint(engine, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
    """Every rank calls it. Files appear whole; ``latest`` moves only when all ranks have written theirs.

    Raises ValueError without ``save_dir``, KeyError when ``client_state`` uses a reserved key. Returns True.
    """
    if not save_dir:
        raise ValueError(f"save_checkpoint needs a directory, got save_dir={save_dir!r}")
    client_state = _without_own_keys(engine, client_state or {})
    if names.RESERVED_KEY in client_state:
        raise KeyError(f"client_state may not use the key {names.RESERVED_KEY!r}: it is the engine's own; rename yours")
    save_dir = os.fspath(save_dir)
    tag = str(tag if tag is not None else f"global_step{engine.global_steps}")
    _check_tag(engine, tag)
    folder = os.path.join(save_dir, tag)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot make the checkpoint folder {folder}: {error.strerror}") from error
    for name, value in files_of(engine, client_state, exclude_frozen_parameters).items():
        storage.write(value(), os.path.join(folder, name))
    if engine.world_size > 1:
        dist.barrier()
    if save_latest and engine.global_rank == 0:
        pointer = os.path.join(save_dir, names.LATEST)
        with open(pointer + ".writing", "w") as file:
            file.write(tag)
        os.replace(pointer + ".writing", pointer)
    if engine.world_size > 1:
        dist.barrier()
    log_dist(f"saved checkpoint {folder}", ranks=[0])
    return True


def save_16bit_model(engine, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
    """Rank 0 writes the module's state dict to ``save_dir/save_filename``; every rank calls it.

    Returns True; at ZeRO stage 3 False, with nothing written, unless
    ``zero_optimization.stage3_gather_16bit_weights_on_model_save`` is on.
    """
    sharded = engine.zero_optimization_stage() == 3
    if sharded and not engine.zero_gather_16bit_weights_on_model_save():
        logger.warning(
            f"nothing is saved to {save_dir}: set zero_optimization.stage3_gather_16bit_weights_on_model_save to true "
            "to gather the weights of ZeRO stage 3 for it"
        )
        return False
    gathered = zero_states.whole_state_dict(engine, exclude_frozen_parameters) if sharded else None
    if engine.global_rank == 0:
        os.makedirs(save_dir, exist_ok=True)
        state = gathered or storage.compact(
            engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        )
        storage.write(state, os.path.join(os.fspath(save_dir), save_filename))
    if engine.world_size > 1:
        dist.barrier()
    return True
