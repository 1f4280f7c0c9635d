"""One checkpoint that goes into a run. What can be refused is refused by ``check``, before anything is changed."""

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.saved_state import plain
from deepspeed.checkpoint.read.weights import add_resumed, check_weights, counters_in, load_weights, read_run
from deepspeed.checkpoint.run_state import LoadedRun
from deepspeed.checkpoint.write.ranks import in_turn
from deepspeed.log import log_dist

_SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr"}  # in the parameter groups: what a schedule of rates decides
_SCHEDULED_MOMENTA = {"betas", "momentum", "base_momentum", "max_momentum"}


def winning_options(run, saved, with_scheduler):
    """For each parameter group the hyperparameters that the configuration of this run says and that of the run which
    saved did not: they win over the saved ones. What both say alike goes on as it was saved: a script, or a schedule,
    may have changed it since. Nothing for an optimizer that the caller has made."""
    made, before = run.given_groups, saved.model.get("ds_config")
    now = _optimizer_params(run.ds_config)
    if not made or now is None or before is None:
        return [{} for _ in made]
    before = _optimizer_params(before) or {}
    changed = {key for key in before.keys() | now.keys() if _listed(before.get(key)) != _listed(now.get(key))}
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


def _listed(value):
    return list(value) if isinstance(value, tuple) else value


class Loading:
    """``saved`` into ``run``, through ``target``: its weights; with ``with_optimizer`` its states, counters of the run
    and random numbers; with ``with_scheduler`` the schedule. ``elsewhere``: see ``load_weights``.

    Every rank calls ``check``, then ``fill`` while it is ``target.writing()``, then ``found``; where the first raises
    on any rank, no rank may call the others.
    """

    def __init__(
        self, run, target, saved, strict, with_optimizer, with_scheduler, module_only, custom_load_fn, elsewhere
    ):
        self.run, self.target, self.saved, self.state = run, target, saved, saved.model
        self.strict, self.module_only = strict, module_only
        self.with_optimizer, self.with_scheduler = with_optimizer, with_scheduler
        self.custom_load_fn, self.elsewhere = custom_load_fn, elsewhere
        self.restore, self.masters, self.schedule, self.resumed = None, set(), None, None
        self.client_state = None

    def check(self):
        """Reads all but the values of tensors, and raises for whatever does not fit."""
        run, state = self.run, self.state
        if not self.module_only and "global_steps" not in state:
            raise ValueError(
                f"{self.saved.origin()} has no 'global_steps': it is no checkpoint of an engine. Load its weights with "
                "load_module_only=True"
            )
        self._find_masters()
        check_weights(run, self.saved, self.strict, self.custom_load_fn, self.masters, self.elsewhere)
        if self.restore is not None:
            self.restore.check(masters=bool(self.masters), states=self.with_optimizer)
        if self.with_scheduler and run.scheduler is not None and state.get("lr_scheduler") is not None:
            self.schedule = plain(state["lr_scheduler"])
            self.target.rehearse(self.schedule)
        if self.with_optimizer:
            self.resumed = read_run(run, self.saved)
        hidden = {"module"} if self.module_only else set(names.ENGINE_KEYS)
        hidden |= {"lr_scheduler"} if self.with_scheduler else set()
        hidden |= {"optimizer"} if self.with_optimizer else set()
        self.client_state = {key: plain(value) for key, value in state.items() if key not in hidden}

    def _find_masters(self):
        """fp32 masters decide where there are any."""
        run, saved = self.run, self.saved
        if run.states is None:
            return
        options = winning_options(run, saved, self.with_scheduler) if self.with_optimizer else None
        self.restore = self.target.restoring(saved, options)
        if not self.module_only and (run.config.zero_config.load_from_fp32_weights or saved.masters_only):
            self.masters = {name for name in self.restore.names if saved.pieces(name, "fp32")}

    def fill(self, ranks):
        """Weights, masters and states."""
        load_weights(self.run, self.target, self.saved, self.custom_load_fn, self.masters, self.elsewhere)
        section = self.run.config.zero_config
        if section.pipeline_loading_checkpoint and self.with_optimizer and self.run.config.zero_enabled:
            in_turn(ranks, self._fill_states)
        else:
            self._fill_states()

    def _fill_states(self):
        if self.masters:
            self.restore.masters()
        if self.with_optimizer:
            self.restore.states()
            self.restore.extra()

    def found(self):
        """The ``LoadedRun``: all that is not in place yet."""
        state = self.state
        own = {key: self.client_state[key] for key in names.OWN_KEYS if key in self.client_state}
        found = LoadedRun(self.saved.model_path, self.client_state, own, self.schedule, state.get("dp_world_size"))
        if not self.module_only:
            found.counters = counters_in(self.run, state)
        if self.with_optimizer:
            add_resumed(self.run, self.saved, self.resumed, found)
        return found
