"""One checkpoint that goes into a run. ``checked`` refuses a load before anything is changed."""

from deepspeed.checkpoint.constants import TENSOR_CUTS, UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.saved_state import plain
from deepspeed.checkpoint.read.weights import add_resumed, check_weights, counters_in
from deepspeed.checkpoint.run_state import LoadedRun
from deepspeed.log import log_dist

_SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr"}  # in the parameter groups: what a schedule of rates decides
_SCHEDULED_MOMENTA = {"betas", "momentum", "base_momentum", "max_momentum"}


def winning_options(run, saved, with_scheduler):
    """Returns, for each parameter group, the hyperparameters that changed in the configuration since the checkpoint was
    saved. They override the saved values; unchanged ones keep the saved values, which a script or a schedule may have
    set. Returns nothing for an optimizer that the caller has made."""
    made, before = run.given_groups, saved.model.get("ds_config")
    now = _optimizer_params(run.ds_config)
    if not made or now is None or before is None:
        return [{} for _ in made]
    before = _optimizer_params(before) or {}
    changed = {key for key in before.keys() | now.keys() if listed(before.get(key)) != listed(now.get(key))}
    if with_scheduler and run.scheduler is not None:
        changed -= _SCHEDULED
        changed -= _SCHEDULED_MOMENTA if getattr(run.scheduler, "cycle_momentum", False) else set()
    found = [{key: group[key] for key in changed & group.keys()} for group in made]
    if any(found):
        log_dist(
            f"{saved.origin()}: optimizer.params.{', '.join(sorted(set().union(*found)))} is the configuration's, "
            "which has changed since it was saved",
            ranks=[0],
        )
    return found


def _optimizer_params(config):
    """``optimizer.params`` of a configuration as the user wrote it; None where there is no such section."""
    section = config.get("optimizer") if isinstance(config, dict) else None
    return dict(section.get("params") or {}) if isinstance(section, dict) else None


def listed(value):
    return list(value) if isinstance(value, tuple) else value


def checked(run, target, saved, strict, with_optimizer, with_scheduler, module_only, custom_load_fn, elsewhere):
    """Reads all but the values of tensors of ``saved``, and raises for whatever does not fit ``run``. Returns the
    ``LoadedRun``, the ``Restore`` (None: without an optimizer) and the names of the parameters whose masters it is to
    load: fp32 masters decide where there are any. ``elsewhere``: see ``load_weights``.

    With ``with_optimizer`` the result has counters of the run and random numbers; with ``with_scheduler`` the schedule.
    """
    state, restore, masters, schedule = saved.model, None, set(), None
    if not module_only and "global_steps" not in state:
        raise ValueError(
            f"{saved.origin()} has no 'global_steps': it is not a checkpoint of an engine. Load its weights with "
            "load_module_only=True"
        )
    if run.states is not None:
        restore = target.restoring(saved, winning_options(run, saved, with_scheduler) if with_optimizer else None)
        if not module_only and (run.config.zero_config.load_from_fp32_weights or saved.masters_only):
            masters = {name for name in restore.names if saved.pieces(name, "fp32")}
    check_weights(run, saved, strict, custom_load_fn, masters, elsewhere)
    if restore is not None:
        restore.check(masters=bool(masters), states=with_optimizer)
    if with_scheduler and run.scheduler is not None and state.get("lr_scheduler") is not None:
        schedule = plain(state["lr_scheduler"])
        target.rehearse(schedule)
    hidden = {"module"} if module_only else set(names.ENGINE_KEYS)
    hidden |= {key for key, taken in (("lr_scheduler", with_scheduler), ("optimizer", with_optimizer)) if taken}
    client_state = {key: plain(value) for key, value in state.items() if key not in hidden}
    described = (UNIVERSAL_CHECKPOINT_INFO,) if TENSOR_CUTS in state else ()  # by the engine, not by the caller
    own = {key: client_state[key] for key in (*names.OWN_KEYS, *described) if key in client_state}
    found = LoadedRun(saved.model_path, client_state, own, schedule, state.get("dp_world_size"))
    if not module_only:
        found.counters = counters_in(run, state)
    if with_optimizer:
        add_resumed(run, saved, found)
    return found, restore, masters
