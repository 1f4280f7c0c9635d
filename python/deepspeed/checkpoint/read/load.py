"""Reads a checkpoint into a run (``RunState``)."""

import errno
import functools
import os

from deepspeed.checkpoint.layouts import names, storage
from deepspeed.checkpoint.layouts.open_saved import open_run
from deepspeed.checkpoint.layouts.saved_universal import Cut
from deepspeed.checkpoint.read import memory
from deepspeed.checkpoint.read.loading import checked
from deepspeed.checkpoint.read.node_local import fetch_missing
from deepspeed.checkpoint.read.weights import check_weights, load_weights, names_elsewhere
from deepspeed.checkpoint.write import background, commit, verify
from deepspeed.checkpoint.write.ranks import Ranks, in_turn
from deepspeed.comm.agreement import attempt
from deepspeed.log import log_dist, logger
from deepspeed.zero.parameters.param_ranks import saved_part

# ---- checking ------------------------------------------------------------------------------------------------------
# Before anything of a checkpoint is loaded: is it the one that was saved?


def check(run, ranks, folder):
    """Compares ``folder`` with its manifest as ``checkpoint.verify_on_load`` says. Raises RuntimeError on all ranks,
    naming file and tensor. Every rank calls it: they share the reading of "all"."""
    mode = run.config.checkpoint_config.verify_on_load
    if mode == "none":
        return
    problems, error = attempt(lambda: list(map(str, _problems(folder, mode, ranks))), verify.DamagedManifest)
    if problems:
        text = "; ".join(problems[:5]) + (f" and {len(problems) - 5} more" if len(problems) > 5 else "")
        missing = any("is missing" in problem for problem in problems)
        error = FileNotFoundError(errno.ENOENT, text) if missing else RuntimeError(text)
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
        named = names.latest_tag(load_dir, os.path.basename(pointer))
    except OSError as error:
        raise OSError(error.errno, f"cannot read {pointer}: {error.strerror}. Check its permissions.") from error
    if not named:  # a file system without renames
        raise RuntimeError(
            f"{pointer} is empty: a save was broken off when it wrote it. Pass tag=; complete are: "
            f"{', '.join(commit.names_of_whole(load_dir)) or 'none'}"
        )
    return named


def _open(run, folder, with_optimizer):
    """The checkpoint, as far as it is needed to load it into this run."""
    if run.config.load_universal_checkpoint and not names.is_universal(folder):
        raise ValueError(
            f"checkpoint.load_universal is true, and {folder} is not a universal checkpoint: it has no folder 'zero'. "
            "Convert it with ds_to_universal, or leave that key out: load_checkpoint reads checkpoints of any stage "
            "and number of ranks as they are"
        )
    stage, weights, pipeline = run.weights.layers, run.weights, {}
    if stage is not None:
        pipeline = dict(stages=stage.stages, layers=set(stage.layers.values()), tied=stage.paths)
    return open_run(
        folder,
        run.ranks.mp_rank,
        run.ranks.dp_rank,
        run.ranks.mp_world_size,
        cuts={weights.named(name): Cut.of(param, saved_part(param)[1]) for name, param in weights.params.items()},
        **pipeline,
        group_names=run.group_names,
        shapes={name: saved_part(param)[1] for name, param in run.trained()},
        with_optimizer=with_optimizer,
        experts=run.weights.named.numbers(),
    )


def _has_optimizer(run, saved):
    """Whether there are optimizer states to load. Raises FileNotFoundError where there were some."""
    if saved.has_optimizer():
        return True
    if saved.model.get("param_shapes"):
        raise FileNotFoundError(
            f"{saved.origin()} has no file {names.OPTIM_STATES(dp_rank=0, mp_rank=run.ranks.mp_rank)}, nor one for "
            "bf16: its optimizer states are gone; load it with load_optimizer_states=False"
        )
    logger.warning(f"{saved.origin()} was saved without an optimizer: this run's optimizer starts anew")
    return False


def load_checkpoint(
    run,
    target,
    load_dir,
    tag=None,
    load_module_strict=True,
    load_optimizer_states=True,
    load_lr_scheduler_states=True,
    load_module_only=False,
    custom_load_fn=None,
    snapshots=None,
):
    """Fills ``run``, a ``RunState``, through ``target``, a ``LoadTarget``. Every rank calls it. Returns a
    ``LoadedRun``, which the caller applies, or None without a tag. ``snapshots``: those of this run in memory, of which
    a newer one is taken where no tag is given.

    Any number of ranks and any ZeRO stage and precision may have saved. At the same number of ranks, stage and
    precision the run goes on bit by bit: weights, moments, schedule, loss scale, counters, random numbers and data
    position. Random numbers and data position are left alone when optimizer states are not loaded.
    """
    load_dir = os.fspath(load_dir)
    background.drain_all()  # another run of this process may be writing what is to be loaded
    if hasattr(run.writer, "wait"):
        run.writer.wait()
    section = run.config.zero_config
    kept = None
    if snapshots is not None and tag is None and not run.config.load_universal_checkpoint:
        kept = _newer_in_memory(run, load_dir, snapshots)
    found = kept or _on_disk(run, load_dir, tag)
    if found is None:
        return None
    ranks, folder = found
    together = functools.partial(ranks.together, what=f"the checkpoint {folder} is not loaded")
    with_optimizer = load_optimizer_states and not load_module_only and run.states is not None
    with_scheduler = load_lr_scheduler_states and not load_module_only
    if with_optimizer and section.pipeline_loading_checkpoint:
        files = run.policy.saved
        assert files.model_by_rank or not files.optimizer_by_rank, (
            "Only stage3 support for pipeline checkpoint loading: set zero_optimization.pipeline_loading_checkpoint to "
            f"false at stage {run.config.zero_optimization_stage}"
        )
    with storage.trusting(run.config.checkpoint_config.trust_pickles or None):
        saved = together(lambda: _open(run, folder, with_optimizer))
        with_optimizer = with_optimizer and together(lambda: _has_optimizer(run, saved))
        elsewhere = names_elsewhere(run, ranks)
        how = load_module_strict, with_optimizer, with_scheduler, load_module_only, custom_load_fn, elsewhere
        found, restore, masters = together(lambda: checked(run, target, saved, *how))

        def fill():
            load_weights(run, target, saved, custom_load_fn, masters, elsewhere)
            in_turns = section.pipeline_loading_checkpoint and with_optimizer and run.config.zero_enabled
            states = functools.partial(_restore, restore, bool(masters), with_optimizer)
            if in_turns:
                in_turn(ranks, states)
            else:
                states()

        try:
            with target.writing():
                together(fill)
                if run.states is not None:
                    target.publish()
        except Exception:
            logger.error(f"{folder}: the engine holds a part of this checkpoint now: load one before you train or save")
            raise
    log_dist(f"loaded checkpoint {saved.model_path}", ranks=[0])
    if kept is not None:
        memory.undo(ranks, folder)
        snapshots.whole = os.path.basename(folder)
    return found


def _restore(restore, masters, states):
    if masters:
        restore.masters()
    if states:
        restore.states()
        restore.extra()


def _on_disk(run, load_dir, tag):
    """``(ranks, folder of the tag)``, or None without a tag. RuntimeError on all ranks where only some find one."""
    ranks = Ranks(run.ranks, run.config.use_node_local_storage)
    tag = ranks.together(
        lambda: _find_tag(load_dir, tag, run.config.load_universal_checkpoint),
        f"the checkpoint {load_dir} is not loaded",
    )
    without = [str(rank) for rank, found in enumerate(ranks.gather(tag)) if found is None]
    if len(without) == ranks.size:
        return None
    if without:
        raise RuntimeError(
            f"rank {', '.join(without)} sees no checkpoint in {load_dir}, and others do: mount the directory on all "
            "hosts, or set checkpoint.use_node_local_storage"
        )
    folder = os.path.join(load_dir, tag)
    # The leftovers of a broken-off save are repaired first.
    folder = ranks.lead(lambda: commit.path_to_read(folder), f"the checkpoint {folder} is not loaded")
    fetch_missing(run, ranks, folder)
    if not os.path.isdir(folder):
        tags = os.scandir(load_dir) if os.path.isdir(load_dir) else ()
        known = sorted(entry.name for entry in tags if entry.is_dir())
        raise FileNotFoundError(f"there is no checkpoint {folder}; tags there are: {', '.join(known) or 'none'}")
    check(run, ranks, folder)
    return ranks, folder


def _newer_in_memory(run, load_dir, snapshots):
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
        fetch_missing(run, ranks, folder)
        memory.describe(ranks, folder)
        check(run, ranks, folder)
    except (OSError, RuntimeError) as error:  # the same on all ranks
        logger.warning(f"load_checkpoint takes what is on disk ({disk}), not the snapshot {name} in memory: {error}")
        return None
    log_dist(f"load_checkpoint takes the snapshot {name} in memory, step {step} of {world} rank(s): {disk}", ranks=[0])
    return ranks, folder


def restore_universal(run, target, folder, params=None, weights=True, states=True):
    """Masters (``weights``: or else the weights alone) and optimizer states from the folder of a universal checkpoint,
    without counters, schedules and buffers. ``params``: those to restore: they must be all trained ones."""
    if not names.is_universal(folder):
        raise ValueError(
            f"{folder} is not a universal checkpoint: it has no folder 'zero'. Convert it with ds_to_universal"
        )
    if params is not None and {id(param) for param in params} != run.trained_ids():
        raise ValueError("a universal checkpoint is restored into all parameters of the optimizer or none")
    ranks, what = Ranks(run.ranks, run.config.use_node_local_storage), f"the checkpoint {folder} is not loaded"
    saved = ranks.together(lambda: _open(run, folder, states), what)
    restore = target.restoring(saved)

    def check():
        if not states:
            check_weights(run, saved, strict=True)
        restore.check(masters=weights, states=states)

    ranks.together(check, what)
    if not states:
        load_weights(run, target, saved)
    with target.writing():
        _restore(restore, weights, states)
        target.publish()
