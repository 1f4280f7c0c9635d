"""Reads a checkpoint into an engine."""

import errno
import os

import torch

from deepspeed import comm as dist
from deepspeed._compat import named_parameters
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.saved_slices import Cut
from deepspeed.checkpoint.layouts.saved_stages import open_run
from deepspeed.checkpoint.layouts.saved_universal import is_universal
from deepspeed.checkpoint.read import memory, storage, verify
from deepspeed.checkpoint.read.weights import (
    load_weights,
    names_elsewhere,
    names_of_groups,
    plain,
    restore_strategy,
    resume_run,
)
from deepspeed.checkpoint.write import background, commit, file_writer
from deepspeed.checkpoint.write.ranks import Ranks, failure_of, in_turn, raise_together
from deepspeed.log import log_dist, logger
from deepspeed.zero.core import writing
from deepspeed.zero.param_ranks import SavedNames, differs_by_rank, layers_of, saved_part
from deepspeed.zero.restore import Restore

# ---- checking ------------------------------------------------------------------------------------------------------
# Before anything of a checkpoint is loaded: is it the one that was saved?


def check(engine, ranks, folder):
    """Compares ``folder`` with its manifest as ``checkpoint.verify_on_load`` says. Raises RuntimeError on all ranks,
    naming file and tensor. Every rank calls it: they share the reading of "all"."""
    mode = engine._config.checkpoint_config.verify_on_load
    if mode == "none":
        return
    error = None
    try:
        problems = _problems(folder, mode, ranks)
        if problems:
            text = "; ".join(str(problem) for problem in problems[:5])
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            missing = any("is missing" in str(problem) for problem in problems)
            error = FileNotFoundError(errno.ENOENT, text + more) if missing else RuntimeError(text + more)
    except verify.DamagedManifest as caught:
        error = caught
    ranks.agree(
        error, f"the checkpoint {folder} is damaged, nothing is loaded (ds_ckpt ls lists older ones, tag= loads one)"
    )


def _problems(folder, mode, ranks):
    facts = verify.read(folder)
    if facts is None:
        if mode == "all":
            logger.warning(f"{folder} has no manifest: its files are not compared with what was saved")
        return []
    short = verify.missing_or_short(folder, facts) if ranks.leads else []
    if short or mode == "sizes":
        return short
    beside = [rank for rank in range(ranks.size) if ranks.nodes[rank] == ranks.node]
    files = sorted(facts["files"])[beside.index(ranks.rank) :: len(beside)]
    return verify.verify_folder(folder, only=set(files), threads=1)


# ---- node local ----------------------------------------------------------------------------------------------------
# Checkpoints on disks of single nodes (``checkpoint.use_node_local_storage``): every node has what its ranks wrote.
# What a node lacks for loading comes from the others through the process group, once, and stays on its disk.

CHUNK_BYTES = 64 << 20


def fetch_missing(engine, ranks, folder):
    """Makes sure that every node has the files of ``folder`` that its ranks will read. Every rank calls it.

    At stage 3, saved by as many ranks of stage 3, those are the ranks' own files and rank 0's; otherwise all. Raises
    OSError on all ranks where a file cannot be written.
    """
    if len(set(ranks.nodes)) == 1:
        return
    here = sorted(filter(names.is_checkpoint_file, os.listdir(folder))) if os.path.isdir(folder) else []
    have = ranks.gather(here if ranks.leads else None)
    owner = {}  # file -> the first rank that can send it
    for rank, found in enumerate(have):
        for name in found or ():
            owner.setdefault(name, rank)
    wanted = ranks.gather(_wanted(engine, owner))
    missing = {}  # file -> leading ranks that write it
    for rank, found in enumerate(have):
        if found is None:
            continue
        beside = [other for other in range(ranks.size) if ranks.nodes[other] == ranks.nodes[rank]]
        for name in set().union(*(wanted[other] for other in beside)) - set(found):
            missing.setdefault(name, []).append(rank)
    error = None
    for name in sorted(missing):
        error = _send(ranks, os.path.join(folder, name), owner[name], missing[name], engine.device) or error
    if missing and ranks.rank == 0:
        logger.info(f"{len(missing)} files of {folder} were copied between nodes")
    ranks.agree(error, f"the checkpoint {folder} cannot be completed on the disk of a node")


def _wanted(engine, files):
    saved_by = sum(name.startswith("zero_pp_rank_") and name.endswith("_model_states.pt") for name in files)
    same = engine._stage_policy.saved.model_by_rank and saved_by == engine.parallel.dp_world_size * engine.mp_world_size
    if not same or differs_by_rank(engine.module):
        return sorted(files)
    mp_rank = engine.mp_rank_for_files()
    # Rank 0's say what is common to all.
    parts = [f"zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_" for rank in {0, engine.parallel.dp_rank}]
    parts += [names.run_states(rank) for rank in {0, engine.global_rank}]
    return sorted(name for name in files if any(part in name for part in parts))


def _send(ranks, path, source, targets, device):
    """One file from rank ``source`` to the disks of ``targets``. Returns what went wrong here, or None."""
    size = ranks.gather(os.path.getsize(path) if ranks.rank == source else None)[source]
    temporary, error, out = f"{path}.fetching", None, None
    source_file = open(path, "rb") if ranks.rank == source else None
    try:
        if ranks.rank in targets:
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                out = open(temporary, "wb")
            except OSError as caught:
                error = caught
        for begin in range(0, size, CHUNK_BYTES):
            count = min(CHUNK_BYTES, size - begin)
            chunk = torch.empty(count, dtype=torch.uint8)
            if source_file is not None:
                source_file.readinto(chunk.numpy())
            chunk = chunk.to(device)
            dist.broadcast(chunk, source)
            if out is not None and error is None:
                try:
                    out.write(chunk.cpu().numpy())
                except OSError as caught:
                    error = caught
        if out is not None and error is None:
            out.flush()
            os.fsync(out.fileno())
            file_writer.rename(temporary, path)
    except OSError as caught:
        error = caught
    finally:
        for file in (out, source_file):
            if file is not None:
                file.close()
        if error is not None and os.path.exists(temporary):
            os.unlink(temporary)
    return error


# ---- load ----------------------------------------------------------------------------------------------------------


def _find_tag(load_dir, tag, universal):
    if tag is not None:
        return str(tag)
    pointer = os.path.join(load_dir, names.LATEST_UNIVERSAL if universal else names.LATEST)
    if not os.path.isfile(pointer):
        if universal:
            raise ValueError(
                f"checkpoint.load_universal is true, and there is neither a tag nor the file {pointer}: convert a "
                "checkpoint with ds_to_universal first, or pass tag= with the name of the universal folder"
            )
        logger.warning(
            f"nothing is loaded: {pointer} does not exist, and no tag was given. Pass tag=, or check the directory "
            f"{load_dir}."
        )
        return None
    try:
        with open(pointer) as file:
            named = file.read().strip()
    except OSError as error:
        raise OSError(error.errno, f"cannot read {pointer}: {error.strerror}. Check its permissions.") from error
    if not named:  # a file system without renames
        raise RuntimeError(
            f"{pointer} is empty: a save was broken off when it wrote it. Pass tag=; complete are: "
            f"{', '.join(commit.names_of_whole(load_dir)) or 'none'}"
        )
    return named


def _open(engine, folder, with_optimizer):
    """The checkpoint, as far as it is needed to load it into this engine."""
    groups, shapes = names_of_groups(engine), {}
    for called, group in zip(groups, engine.trained_groups if groups else ()):
        for name, param in zip(called, group):
            shapes[name] = saved_part(param)[1]
    if engine.load_universal_checkpoint() and not is_universal(folder):
        raise ValueError(
            f"checkpoint.load_universal is true, and {folder} is no universal checkpoint: it has no folder 'zero'. "
            "Convert it with ds_to_universal, or leave that key out: load_checkpoint reads checkpoints of any stage "
            "and number of ranks as they are"
        )
    stage = layers_of(engine.module)
    return open_run(
        folder,
        engine.mp_rank_for_files(),
        engine.parallel.dp_rank,
        engine.mp_world_size,
        *(() if stage is None else (stage.stages, set(stage.layers.values()), stage.paths, _cuts(engine.module))),
        group_names=groups,
        shapes=shapes,
        with_optimizer=with_optimizer,
        experts=SavedNames(engine.module).numbers(),
    )


def _cuts(module):
    named = SavedNames(module)
    return {named(name): Cut.of(param, saved_part(param)[1]) for name, param in named_parameters(module)}


def _has_optimizer(engine, saved):
    """Whether there are optimizer states to load. Raises FileNotFoundError where there were some."""
    if saved.has_optimizer():
        return True
    if saved.model.get("param_shapes"):
        raise FileNotFoundError(
            f"{saved.origin()} has no file {names.optim_states(0, engine.mp_rank_for_files())}, nor one for bf16: its "
            "optimizer states are gone; load it with load_optimizer_states=False"
        )
    logger.warning(f"{saved.origin()} was saved without an optimizer: this run's optimizer starts anew")
    return False


def load_checkpoint(
    engine,
    load_dir,
    tag=None,
    load_module_strict=True,
    load_optimizer_states=True,
    load_lr_scheduler_states=True,
    load_module_only=False,
    custom_load_fn=None,
    snapshots=None,
):
    """Every rank calls it. Returns ``(path of the model file, client_state)``; ``(None, None)`` without a tag.
    ``snapshots``: those of this run in memory, of which a newer one is taken where no tag is given.

    Any number of ranks and any ZeRO stage and precision may have saved. At the same number of ranks, stage and
    precision the run goes on bit by bit: weights, moments, schedule, loss scale, counters, random numbers and data
    position. Random numbers and data position are left alone when optimizer states are not loaded.
    """
    load_dir = os.fspath(load_dir)
    background.drain_all()  # another engine of this process may be writing what is to be loaded
    if hasattr(engine.checkpoint_engine, "wait"):
        engine.checkpoint_engine.wait()
    universal = engine.load_universal_checkpoint()
    kept = None
    if snapshots is not None and tag is None and not universal:
        kept = _newer_in_memory(engine, load_dir, snapshots)
    if kept is None:
        tag = _find_tag(load_dir, tag, universal)
        if tag is None:
            return None, None
        ranks, folder = _on_disk(engine, load_dir, tag)
    else:
        ranks, folder = kept
    with_optimizer = load_optimizer_states and not load_module_only and engine.stepping is not None
    if with_optimizer and engine._config.zero_config.pipeline_loading_checkpoint:
        saved = engine._stage_policy.saved
        assert saved.model_by_rank or not saved.optimizer_by_rank, (
            "Only stage3 support for pipeline checkpoint loading: set zero_optimization.pipeline_loading_checkpoint to "
            f"false at stage {engine.zero_optimization_stage()}"
        )
    with_scheduler = load_lr_scheduler_states and not load_module_only
    with storage.trusting(engine._config.checkpoint_config.trust_pickles or None):
        found = _load(
            engine, ranks, folder, load_module_strict, with_optimizer, with_scheduler, load_module_only, custom_load_fn
        )
    if kept is not None:
        memory.undo(ranks, folder)
        snapshots.whole = os.path.basename(folder)
    return found


def _on_disk(engine, load_dir, tag):
    folder = os.path.join(load_dir, tag)
    ranks = Ranks(engine, engine._config.use_node_local_storage)
    folder = _settled(ranks, folder)
    fetch_missing(engine, ranks, folder)
    if not os.path.isdir(folder):
        known = (
            sorted(name for name in os.listdir(load_dir) if os.path.isdir(os.path.join(load_dir, name)))
            if os.path.isdir(load_dir)
            else []
        )
        raise FileNotFoundError(f"there is no checkpoint {folder}; tags there are: {', '.join(known) or 'none'}")
    check(engine, ranks, folder)
    return ranks, folder


def _newer_in_memory(engine, load_dir, snapshots):
    """``(ranks by host, folder on this host)`` of the newest whole snapshot, if it is newer than what is on disk."""
    ranks = snapshots.ranks
    name = memory.newest_whole(ranks, snapshots.folder)
    tag, on_disk = ranks.gather(memory.step_on_disk(load_dir) if ranks.rank == 0 else None)[0]
    disk = f"on disk is tag {tag}, step {on_disk}" if tag is not None else "on disk is none"
    if name is None or memory.parsed(name)[0] <= on_disk:
        kept = f"the newest whole snapshot in memory is {name}" if name else "no snapshot in memory is whole"
        log_dist(f"load_checkpoint looks on disk: {disk}; {kept}", ranks=[0])
        return None
    step, _, world = memory.parsed(name)
    folder = os.path.join(snapshots.folder, name)
    try:
        fetch_missing(engine, ranks, folder)
        memory.describe(ranks, folder)
        check(engine, ranks, folder)
    except (OSError, RuntimeError) as error:  # the same on all ranks
        logger.warning(f"load_checkpoint takes what is on disk ({disk}), not the snapshot {name} in memory: {error}")
        return None
    log_dist(f"load_checkpoint takes the snapshot {name} in memory, step {step} of {world} rank(s): {disk}", ranks=[0])
    return ranks, folder


def _settled(ranks, folder):
    """Where ``folder`` is to be read, after what a broken-off save has left is put right. Every rank calls it."""
    error = found = None
    if ranks.leads:
        try:
            found = commit.place_of(folder)
        except Exception as caught:
            error = caught
    told = ranks.agree(error, f"the checkpoint {folder} is not loaded", found)
    return told[ranks.nodes.index(ranks.node)]


def _together(ranks, folder, function):
    """What ``function()`` returns. Where it raises on any rank, all raise: none is left waiting for the others."""
    found = error = None
    try:
        found = function()
    except Exception as caught:
        error = caught
    failures = ranks.gather(failure_of(ranks.rank, error))
    if error is not None:
        raise error
    raise_together(failures, f"the checkpoint {folder} is not loaded")
    return found


def _load(engine, ranks, folder, strict, with_optimizer, with_scheduler, module_only, custom_load_fn):
    saved = _together(ranks, folder, lambda: _open(engine, folder, with_optimizer))
    with_optimizer = with_optimizer and _together(ranks, folder, lambda: _has_optimizer(engine, saved))
    path, state = saved.model_path, saved.model
    elsewhere = names_elsewhere(engine, ranks)
    with writing(engine.core):
        _together(
            ranks,
            folder,
            lambda: _load_weights_and_states(
                engine, ranks, saved, strict, custom_load_fn, module_only, with_optimizer, elsewhere
            ),
        )
        if engine.stepping is not None:
            engine.core.publish()
    if with_scheduler and engine.lr_scheduler is not None and state.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if not module_only:
        engine.global_steps = state["global_steps"]
        engine.global_samples = state.get("global_samples", engine.global_steps * engine.train_batch_size())
        engine.skipped_steps = state.get("skipped_steps", 0)
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        engine.sparse_tensor_module_names = state.get("sparse_tensor_module_names", engine.sparse_tensor_module_names)
    engine.loaded_checkpoint_dp_world_size = state.get("dp_world_size")
    if with_optimizer:
        engine.zero_grad()
        resume_run(engine, folder, saved)
    else:
        restore_strategy(engine, None)
    log_dist(f"loaded checkpoint {path}", ranks=[0])
    hidden = {"module"} if module_only else set(names.ENGINE_KEYS)
    if with_scheduler:
        hidden.add("lr_scheduler")
    if with_optimizer:
        hidden.add("optimizer")
    client_state = {key: plain(value) for key, value in state.items() if key not in hidden}
    engine.loaded_engine_state = {key: client_state[key] for key in names.OWN_KEYS if key in client_state}
    return path, client_state


def restore_universal(engine, folder, params=None, weights=True, states=True):
    """Masters (``weights``: or else the weights alone) and optimizer states from the folder of a universal checkpoint,
    without counters, schedules and buffers. ``params``: those to restore: they must be all trained ones."""
    if not is_universal(folder):
        raise ValueError(
            f"{folder} is no universal checkpoint: it has no folder 'zero'. Convert it with ds_to_universal"
        )
    trained = {id(param) for group in engine.trained_groups for param in group}
    if params is not None and {id(param) for param in params} != trained:
        raise ValueError("a universal checkpoint is restored into all parameters of the optimizer or none")
    saved = _open(engine, folder, states)
    if not states:
        load_weights(engine, saved, strict=True)
    restore = Restore(engine.stepping, [p for group in engine.trained_groups for p in group], saved)
    restore.check()
    with writing(engine.core):
        if weights:
            restore.masters()
        if states:
            restore.states()
            restore.extra()
        engine.core.publish()


def _load_weights_and_states(engine, ranks, saved, strict, custom_load_fn, module_only, with_optimizer, elsewhere):
    """Weights; fp32 masters, which decide where there are any; moments, steps, hyperparameters, loss scale."""
    if engine.stepping is None:
        load_weights(engine, saved, strict, custom_load_fn, elsewhere=elsewhere)
        return
    restore = Restore(engine.stepping, [p for group in engine.trained_groups for p in group], saved)
    masters = set()
    if not module_only and (engine._config.zero_config.load_from_fp32_weights or saved.masters_only):
        masters = {name for name in restore.names if saved.pieces(name, "fp32")}
    load_weights(engine, saved, strict, custom_load_fn, masters, elsewhere)
    restore.check()

    def fill():
        if masters:
            restore.masters()
        if with_optimizer:
            restore.states()
            restore.extra()

    if engine._config.zero_config.pipeline_loading_checkpoint and with_optimizer and engine.zero_optimization():
        in_turn(ranks, fill)
    else:
        fill()
