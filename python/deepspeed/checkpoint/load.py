"""Reads a checkpoint into an engine."""

import os

from deepspeed.checkpoint import names, rng, storage, zero_states
from deepspeed.log import log_dist, logger


def _find_tag(load_dir, tag):
    if tag is not None:
        return str(tag)
    pointer = os.path.join(load_dir, names.LATEST)
    if not os.path.isfile(pointer):
        logger.warning(
            f"nothing is loaded: {pointer} does not exist, and no tag was given. Pass tag=, or check the directory "
            f"{load_dir}."
        )
        return None
    try:
        with open(pointer) as file:
            return file.read().strip()
    except OSError as error:
        raise OSError(error.errno, f"cannot read {pointer}: {error.strerror}. Check its permissions.") from error


def _model_path(engine, folder, stage):
    mp_rank = engine.mp_rank_for_files()
    plain = names.model_states_path(folder, mp_rank)
    sharded = names.sharded_model_states_path(folder, 0, mp_rank)
    found, expected = (sharded, plain) if stage < 3 else (plain, sharded)
    if not os.path.exists(expected) and os.path.exists(found):
        raise ValueError(
            f"the checkpoint {folder} was saved {'without ' if stage == 3 else 'with '}ZeRO stage 3, this run has "
            f"stage {stage}; load it with the stage it was saved with"
        )
    return expected if stage < 3 else names.sharded_model_states_path(folder, engine.parallel.dp_rank, mp_rank)


def _check_world(engine, state, folder):
    saved = state.get("dp_world_size")
    if saved is not None and saved != engine.dp_world_size:
        raise ValueError(
            f"the checkpoint {folder} was saved by {saved} data-parallel ranks, this run has "
            f"{engine.dp_world_size}. Start "
            f"{saved} ranks"
            + (
                "."
                if engine.zero_optimization_stage() == 3
                else ", or load the weights alone with load_module_only=True."
            )
        )


def load_checkpoint(
    engine,
    load_dir,
    tag=None,
    load_module_strict=True,
    load_optimizer_states=True,
    load_lr_scheduler_states=True,
    load_module_only=False,
    custom_load_fn=None,
):
    """Every rank calls it. Returns ``(path of the model file, client_state)``; ``(None, None)`` without a tag.

    With all states loaded the run goes on bit by bit: weights, moments, schedule, loss scale, counters, random numbers
    and data position. Random numbers and data position are left alone when optimizer states are not loaded.
    """
    load_dir = os.fspath(load_dir)
    tag = _find_tag(load_dir, tag)
    if tag is None:
        return None, None
    folder = os.path.join(load_dir, tag)
    if not os.path.isdir(folder):
        known = (
            sorted(name for name in os.listdir(load_dir) if os.path.isdir(os.path.join(load_dir, name)))
            if os.path.isdir(load_dir)
            else []
        )
        raise FileNotFoundError(f"there is no checkpoint {folder}; tags there are: {', '.join(known) or 'none'}")
    stage = engine.zero_optimization_stage()
    path = _model_path(engine, folder, stage)
    state = storage.read(path)
    if stage == 3 or (stage == 0 and not load_module_only):
        _check_world(engine, state, folder)
    with_optimizer = load_optimizer_states and not load_module_only and engine.optimizer is not None
    with_scheduler = load_lr_scheduler_states and not load_module_only
    if stage == 3:
        zero_states.load_sharded_module(engine, state, load_module_strict, custom_load_fn)
    else:
        engine.load_module_state_dict(state, strict=load_module_strict, custom_load_fn=custom_load_fn)
    if stage > 0 and engine.basic_optimizer is not None and (with_optimizer or stage == 3):
        zero_states.load_optimizer(engine, folder, state, with_optimizer)
    elif with_optimizer and state.get("optimizer") is not None:
        engine.optimizer.load_state_dict(state["optimizer"])
    if with_scheduler and engine.lr_scheduler is not None and state.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if not load_module_only:
        engine.global_steps = state["global_steps"]
        engine.global_samples = state.get("global_samples", engine.global_steps * engine.train_batch_size())
        engine.skipped_steps = state.get("skipped_steps", 0)
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        engine.sparse_tensor_module_names = state.get("sparse_tensor_module_names", engine.sparse_tensor_module_names)
    engine.loaded_checkpoint_dp_world_size = state.get("dp_world_size")
    if with_optimizer:
        engine.zero_grad()
        _resume_run(engine, names.run_states_path(folder, engine.global_rank))
    log_dist(f"loaded checkpoint {path}", ranks=[0])
    hidden = {"module"} if load_module_only else set(names.ENGINE_KEYS)
    if with_scheduler:
        hidden.add("lr_scheduler")
    if with_optimizer:
        hidden.add("optimizer")
    client_state = {key: value for key, value in state.items() if key not in hidden}
    engine.loaded_engine_state = {key: client_state[key] for key in names.OWN_KEYS if key in client_state}
    return path, client_state


def _resume_run(engine, path):
    if engine.loaded_checkpoint_dp_world_size not in (None, engine.dp_world_size):
        logger.warning("random numbers and the position in the data are not resumed: another number of ranks has saved")
        return
    if not os.path.exists(path):
        logger.warning(
            f"{path} does not exist (the checkpoint is of another implementation): random numbers and the position in "
            "the data are not resumed"
        )
        return
    run = storage.read(path)
    if hasattr(engine.training_dataloader, "load_state_dict") and run["dataloader"] is not None:
        engine.training_dataloader.load_state_dict(run["dataloader"])
    engine.micro_steps = run["micro_steps"]
    if run["loss_scaler"] is not None and engine.stepping.scaler is not None:
        vars(engine.stepping.scaler).update(vars(run["loss_scaler"]))
    rng.restore(run["rng"])
