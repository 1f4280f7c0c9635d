"""Writes a checkpoint of an engine."""

import hashlib
import os

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import names, rng, storage, zero_states
from deepspeed.log import log_dist, logger
from deepspeed.version import __version__


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


def _model_states(engine, client_state, exclude_frozen_parameters):
    optimizer = engine.optimizer
    scheduler = engine.lr_scheduler
    stage = engine.zero_optimization_stage()
    frozen = stage >= 2 and not exclude_frozen_parameters
    state = {
        "module": storage.compact(_module_states(engine, exclude_frozen_parameters)),
        "buffer_names": [name for name, _ in engine.module.named_buffers()],
        "optimizer": storage.compact(optimizer.state_dict()) if optimizer is not None and stage == 0 else None,
        "param_shapes": zero_states.param_shapes(engine) if stage > 0 else None,
        "frozen_param_shapes": zero_states.frozen_shapes(engine) if frozen else None,
        "shared_params": zero_states.shared_params(engine.module) if stage > 0 else None,
        "frozen_param_fragments": zero_states.frozen_fragments(engine) if frozen else None,
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": engine.sparse_tensor_module_names,
        "skipped_steps": engine.skipped_steps,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "dp_world_size": engine.dp_world_size,
        "mp_world_size": engine.mp_world_size,
        names.RESERVED_KEY: {"pp_degree": 1, "tp_degree": engine.mp_world_size},
        "ds_config": engine.config,
        "ds_version": __version__,
    }
    state.update(client_state)
    return state


def _module_states(engine, exclude_frozen_parameters):
    state = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
    if engine.zero_optimization_stage() < 3:
        return state
    sharded = zero_states.sharded_names(engine.module)
    return {name: torch.empty(0, dtype=value.dtype) if name in sharded else value for name, value in state.items()}


def _run_states(engine):
    loader = engine.training_dataloader
    return {
        "rng": rng.capture(),
        "dataloader": loader.state_dict() if hasattr(loader, "state_dict") else None,
        "micro_steps": engine.micro_steps,
        "world_size": engine.world_size,
        "loss_scaler": engine.stepping.scaler if engine.core is not None else None,
    }


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
    stage = engine.zero_optimization_stage()
    dp_rank, mp_rank = engine.parallel.dp_rank, engine.mp_rank_for_files()
    if stage == 3:
        path = names.sharded_model_states_path(folder, dp_rank, mp_rank)
        storage.write(_model_states(engine, client_state, exclude_frozen_parameters), path)
    elif dp_rank == 0:
        path = names.model_states_path(folder, mp_rank)
        storage.write(_model_states(engine, client_state, exclude_frozen_parameters), path)
    if stage > 0 and engine.core is not None and engine.basic_optimizer is not None:
        shard = {
            "optimizer_state_dict": storage.compact(engine.optimizer.state_dict()),
            "ds_config": engine.config,
            "ds_version": __version__,
        }
        storage.write(shard, names.optim_states_path(folder, dp_rank, mp_rank, engine.bfloat16_enabled()))
    storage.write(_run_states(engine), names.run_states_path(folder, engine.global_rank))
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
