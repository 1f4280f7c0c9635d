"""The tuner: what ``deepspeed --autotuning tune|run`` does."""

import copy
import datetime
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

from deepspeed.autotuning.model_facts import ModelFacts
from deepspeed.autotuning.scheduler import ResourceManager
from deepspeed.autotuning.search import ORDERS, prior
from deepspeed.autotuning.settings import BATCH, GAS, MBS, MINIMISED
from deepspeed.autotuning.space import STAGE, base_and_ranges, candidates, features, more_ranges
from deepspeed.autotuning.table import summary
from deepspeed.autotuning.utils import get_path, set_path, write_json, write_text
from deepspeed.host.recorded_names import path_below

_PLATEAU = 0.02  # a larger micro-batch that gains less is not followed by a still larger one
_PROFILE = "profile_model_info"


class Autotuner(ModelFacts):
    """Finds the fastest configuration for a script.

    ``tune()`` asks the planner, in one short run of the script, what fits and how fast it is; then it runs
    configurations for some steps, in the order of ``tuner_type``. ``records``: ``{space: [(experiment, value of the
    metric or None, number of the experiment), ...]}``, where a space is a ZeRO stage.
    """

    def __init__(self, args, active_resources):
        super().__init__(args, active_resources)
        self.exps_dir, self.results_dir = (os.path.abspath(self.section[key]) for key in ("exps_dir", "results_dir"))
        self.rm = ResourceManager(
            args, active_resources, self.exp_num_gpus, self.results_dir, self.exps_dir, self.arg_mappings
        )
        self.rm.timeout = self.section["experiment_timeout"]
        self.records, self.skipped = {}, {}
        self.optimal_ds_config = self.optimal_cmd = None
        self._best, self._names, self._seconds, self._begun = None, set(), 0.0, None

    # ---- the whole ---------------------------------------------------------------------------------------------------
    def tune(self):
        """Searches, and leaves the best configuration and its command in ``results_dir``. ChildProcessError where no
        experiment has a metric."""
        self._begin()
        base, ranges = base_and_ranges(self)
        self._tune(base, ranges)
        if self._best is not None and not self.fast_enabled():
            self._tune_more(ranges)
        self._seconds = time.monotonic() - self._begun
        if self._best is None:
            self.print_tuning_results()
            raise ChildProcessError(
                f"autotuning: none of {len(self._names)} experiments has a metric; the table says why, and "
                f"{self.results_dir} has the output of each"
            )
        self.write_optimal_config()

    def _begin(self):
        """Makes the folders. With ``overwrite`` experiments of an earlier search go, and nothing else in them."""
        if self._begun is not None:
            return
        self._begun = time.monotonic()
        for key, folder in (("exps_dir", self.exps_dir), ("results_dir", self.results_dir)):
            try:
                os.makedirs(folder, exist_ok=True)
                for entry in os.scandir(folder) if self.section["overwrite"] else ():
                    if os.path.exists(os.path.join(entry.path, "exp.json")):
                        shutil.rmtree(entry.path)
                tempfile.TemporaryFile(dir=folder).close()
            except OSError as error:
                raise ValueError(f"autotuning.{key}: {error}. Name a folder that can be written to.") from None

    def _tune(self, base, ranges):
        """Searches among the combinations of ``ranges``; returns ``[(experiment, value or None)]``."""
        sizes = ranges.get(MBS)
        allowed = self._doubling(1 + self.max_train_micro_batch_size_per_gpu()) if sizes is None else sizes
        every = self._candidates(base, {**ranges, MBS: allowed})
        if not every:
            raise ValueError(
                f"autotuning: no configuration is left: {BATCH} {base.get(BATCH)} is a multiple of none of {allowed} "
                f"times {self.copies()} copies of the model"
            )
        self.learn_model(every)
        if sizes is None:
            every = self._some_sizes(base, ranges, every)
        return self._search(every, {**ranges, MBS: None})

    def _candidates(self, base, ranges):
        return candidates(base, ranges, self.copies(), self.arg_mappings)

    def _doubling(self, end):
        size = self.min_train_micro_batch_size_per_gpu()
        sizes = [size << shift for shift in range(32) if size << shift < end]
        if not sizes:
            raise ValueError(
                f"autotuning: the smallest micro-batch {size} is above the largest {end - 1}: look at the keys "
                "min_train_batch_size, max_train_batch_size and those of micro-batches"
            )
        return sizes

    def _some_sizes(self, base, ranges, every):
        """Returns ``num_tuning_micro_batch_sizes`` micro-batch sizes of each stage: the best by forecast. Where nothing
        is known, those below the largest that fits, which experiments find."""
        start, largest = self.min_train_micro_batch_size_per_gpu(), self.max_train_micro_batch_size_per_gpu()
        chosen, count = {}, self.num_tuning_micro_batch_sizes()
        for stage in ranges[STAGE]:
            rows = {name: one for name, one in every.items() if get_path(one, STAGE) == stage}
            fitting = {name: one for name, one in rows.items() if self.fits(name)}
            self.skipped.update({name: self.plans[name]["why"] for name in rows if self.fits(name) is False})
            if fitting and all(self.plans[name]["seconds"] for name in fitting):
                speed = {name: self._prior(name, one)[1] for name, one in fitting.items()}
                sizes = sorted(
                    {one[MBS] for one in fitting.values()},
                    key=lambda size: -max(speed[name] for name, one in fitting.items() if one[MBS] == size),
                )[:count]
            elif fitting:
                sizes = self.get_tuning_micro_batch_size_list(start, max(one[MBS] for one in fitting.values()), count)
            elif self.plans and all(self.fits(name) is False for name in rows):
                continue
            else:
                low, high = self.get_min_max_micro_batch_size(stage, start, largest)
                if low < 0:
                    continue
                sizes, start = self.get_tuning_micro_batch_size_list(low, high, count), high
            chosen.update(self._candidates(base, {**ranges, STAGE: [stage], MBS: sizes}))
        return chosen

    def _tune_more(self, ranges):
        """``fast: false``: other keys of the best configuration; with them, the next larger micro-batch, too."""
        best = copy.deepcopy(self._best[0]["ds_config"])
        more, size = more_ranges(best), best.pop(MBS)
        del best["autotuning"]
        fixed = {STAGE: [get_path(best, STAGE)], GAS: [best.pop(GAS)]}
        sizes = (
            [size]
            if ranges.get(MBS)
            else [
                one
                for one in self._doubling(1 + min(2 * size, self.max_train_micro_batch_size_per_gpu()))
                if one >= size
            ]
        )
        every = self._candidates(best, {**fixed, MBS: sizes, **more})
        self.learn_model(every, f"{_PROFILE}_more")
        self._search(every, {**fixed, MBS: None, **more})

    # ---- experiments -------------------------------------------------------------------------------------------------
    def _prior(self, name, config):
        samples = config[MBS] * config[GAS] * self.copies()
        return prior(samples, config[MBS], self.forecast(name), self.metric() in MINIMISED)

    def _search(self, every, ranges):
        """Runs configurations until all have run, or what the user allows is used up."""
        never = {name: self.plans[name]["why"] for name in every if self.fits(name) is False}
        self.skipped.update(never)
        every = {name: one for name, one in every.items() if name not in never}
        order = ORDERS[self.section["tuner_type"]](
            {name: features(one, ranges) for name, one in every.items()},
            {name: self._prior(name, one) for name, one in every.items()},
        )
        results, stale, stops_at = [], 0, self.section["tuner_early_stopping"]
        while order.left and not (stops_at and stale >= stops_at):
            room = self.section["tuner_num_trials"] - len(self._names)
            names = order.next(min(room, self.rm.capacity(self._experiment("", {}))))
            if not names:
                break
            before = self._best
            results += self._run({name: every[name] for name in names})
            for exp, value in results[-len(names) :]:
                order.learn(exp["name"], self.goodness(math.log(value)) if value and value > 0 else None)
                if exp["reason"].startswith("memory"):
                    dropped = order.drop_larger(exp["name"])
                    self.skipped.update({name: f"{exp['name']} ran out of memory" for name in dropped})
                else:
                    stale += 1
            stale = stale if self._best is before else 0
        return results

    def _experiment(self, name, ds_config, **more):
        return {
            "name": name,
            "ds_config": ds_config,
            "num_nodes": self.exp_num_nodes,
            "num_gpus": self.exp_num_gpus,
            **more,
        }

    def _start(self, exps):
        """Runs experiments to their end; returns them as they have ended."""
        paths = [path_below(self.exps_dir, f"{exp['name']}.json", "an experiment", "entry") for exp in exps]
        for exp, path in zip(exps, paths, strict=True):
            write_json(path, exp)
        self.rm.schedule_experiments(paths)
        self.rm.run()
        return [self.rm.finished_experiments[exp["name"]] for exp in exps]

    def _run(self, configs):
        """``[(experiment, value or None)]`` of ``{name: configuration}``."""
        exps = []
        for name, config in configs.items():
            own = {key: self.section[key] for key in ("start_profile_step", "end_profile_step", "metric")}
            own |= {"enabled": True, "metric_path": os.path.join(self.rm.folder(name), "metrics.json")}
            exps.append(self._experiment(name, {**config, "autotuning": own}))
        found = [(exp, self.rm.value(exp, self.metric())) for exp in self._start(exps)]
        for exp, value in found:
            if exp["exit_code"] == 0 and self._best is None and value is None:
                self._refuse_script(exp)
            self._names.add(exp["name"])
            self.update_records(f"z{get_path(exp['ds_config'], STAGE)}", exp, value, len(self._names))
            if value is not None and (self._best is None or self.goodness(value) > self.goodness(self._best[1])):
                self._best = exp, value
        return found

    def _refuse_script(self, exp):
        if exp["reason"].startswith(("the script wrote no", "metrics.json has no")):
            raise ValueError(
                f"autotuning: {exp['reason']} and ended with exit code 0. It must train for at least "
                f"{self.section['end_profile_step']} steps with an engine of deepspeed.initialize that has the "
                f'configuration of its arguments, or write {{"{self.metric()}": number}} to the file that this names '
                f"as autotuning.metric_path. Its output is in {self.rm.folder(exp['name'])}"
            )

    def run_ds_config(self, ds_config, exp_name):
        """Runs one configuration; ``(experiment, value of the metric or None)``."""
        self._begin()
        return self._run({exp_name: ds_config})[0]

    def learn_model(self, every, name=_PROFILE):
        """Fills ``model_info`` and ``plans`` by a run of the script with ``every`` configuration as a candidate."""
        given = self.section["model_info"] or {}
        if given.get("num_params") and not given.get("profile"):
            self.model_info = given
            return
        first = next(iter(every.values()))
        stages = sorted({get_path(one, STAGE) for one in every.values()})
        for stage in dict.fromkeys((stages[-1], stages[0])):  # the least memory first; not every script can have it
            config = {**copy.deepcopy(first), MBS: min(one[MBS] for one in every.values())}
            set_path(config, STAGE, stage)
            config.pop(BATCH, None)
            if self._profile(name, config, every):
                return

    def model_info_profile_run(self):
        """Facts about the model by a run of the script, as a dict; None where that fails."""
        self._begin()
        base, ranges = base_and_ranges(self)
        self.learn_model(self._candidates(base, {MBS: [self.min_train_micro_batch_size_per_gpu()], **ranges}))
        return self.model_info

    def _profile(self, name, config, every):
        folder = self.rm.folder(name)
        info = {"enabled": True, "model_info": {"profile": True}}
        info["model_info_path"] = os.path.join(folder, "model_info.json")
        info["experiment_timeout"] = self.section["experiment_timeout"]
        os.makedirs(folder, exist_ok=True)
        write_json(os.path.join(folder, "candidates.json"), every)
        exp = self._experiment(
            name, {**config, "autotuning": info}, result_file="model_info.json", candidates=list(every)
        )
        return self.take_facts(self._start([exp])[0], folder)

    # ---- micro-batches -----------------------------------------------------------------------------------------------
    def get_min_max_micro_batch_size(self, stage, min_micro_batch_size, calculated_max_micro_batch_size):
        """``(smallest, largest)`` micro-batch of a stage that is worth a try: experiments double it until one fails or
        gains little. ``(-1, -1)`` where the smallest fails."""
        base, ranges = base_and_ranges(self)
        size, best, largest = min_micro_batch_size, None, -1
        while size <= calculated_max_micro_batch_size and len(self._names) < self.section["tuner_num_trials"]:
            one = {**{path: values[:1] for path, values in ranges.items()}, STAGE: [stage], MBS: [size]}
            for name, config in self._candidates(base, one).items():
                value = self.run_ds_config(config, name)[1]
                if value is None:
                    return (min_micro_batch_size, largest) if largest > 0 else (-1, -1)
                if best is not None and self.goodness(value) < best + _PLATEAU * abs(best):
                    return min_micro_batch_size, largest
                best, largest = self.goodness(value), size
            size *= 2
        return (min_micro_batch_size, largest) if largest > 0 else (-1, -1)

    def get_tuning_micro_batch_size_list(
        self, min_micro_batch_size, max_micro_batch_size, num_tuning_micro_batch_sizes
    ):
        """Sizes to try: the largest and halves of it; for a metric that is to be small the smallest and its doubles."""
        sizes, size = [], max_micro_batch_size
        if self.metric() in MINIMISED:
            sizes = [min_micro_batch_size << shift for shift in range(num_tuning_micro_batch_sizes)]
            return [one for one in sizes if one <= max_micro_batch_size]
        while size >= min_micro_batch_size and len(sizes) < num_tuning_micro_batch_sizes:
            sizes.append(size)
            size //= 2
        return sizes[::-1]

    def run_tuning_micro_batch_sizes(
        self,
        tuning_micro_batch_sizes,
        max_train_batch_size_per_gpu,
        min_micro_batch_size,
        stage,
        tuning_micro_batch_sizes_overwritten,
    ):
        """Runs an experiment for each size of a stage, and returns the fastest size, or None. Sizes outside of the two
        bounds are left out, unless the user has named them (``tuning_micro_batch_sizes_overwritten``)."""
        base, ranges = base_and_ranges(self)
        allowed = range(min_micro_batch_size, max_train_batch_size_per_gpu + 1)
        sizes = [one for one in tuning_micro_batch_sizes if tuning_micro_batch_sizes_overwritten or one in allowed]
        one = {**{path: values[:1] for path, values in ranges.items()}, STAGE: [stage], MBS: sizes}
        found = [self.run_ds_config(config, name) for name, config in self._candidates(base, one).items()]
        found = [(self.goodness(value), exp["ds_config"][MBS]) for exp, value in found if value is not None]
        return max(found)[1] if found else None

    def tune_space(self, tuning_space, prev_max_mbs=0, prev_best_mbs=0, prev_best_metric_val=0):
        """Searches below ``tuning_space``, a configuration in which lists are ranges, on top of the user's. Returns
        ``(largest micro-batch that ran, fastest one, its metric)``; those of before where nothing is better."""
        self._begin()
        whole = copy.deepcopy(self.user_config)
        for key, value in tuning_space.items():
            whole[key] = {**whole.get(key, {}), **value} if isinstance(value, dict) else value
        own, self.user_config = self.user_config, whole
        try:
            found = [(value, exp["ds_config"][MBS]) for exp, value in self._tune(*base_and_ranges(self)) if value]
        finally:
            self.user_config = own
        if not found:
            return prev_max_mbs, prev_best_mbs, prev_best_metric_val
        largest = max(prev_max_mbs, *(size for _, size in found))
        value, size = max(found, key=lambda one: self.goodness(one[0]))
        if prev_best_mbs and self.goodness(prev_best_metric_val) >= self.goodness(value):
            return largest, prev_best_mbs, prev_best_metric_val
        return largest, size, value

    # ---- results -----------------------------------------------------------------------------------------------------
    def print_tuning_results(self):
        """Prints the table of experiments and the time they took, and leaves both in ``summary.txt``."""
        text = summary(self, datetime.timedelta(seconds=self._seconds))
        write_text(os.path.join(self.results_dir, "summary.txt"), text)
        print(text, end="", flush=True)

    def write_optimal_config(self):
        """Leaves the best configuration in ``ds_config_optimal.json``, the command with it in ``cmd_optimal.txt``."""
        if self._best is None:
            return
        config = {key: value for key, value in self._best[0]["ds_config"].items() if key != "autotuning"}
        path = os.path.join(self.results_dir, "ds_config_optimal.json")
        write_json(path, config)
        self.optimal_ds_config, self.optimal_cmd = config, self.rm.command(config, path)
        write_text(os.path.join(self.results_dir, "cmd_optimal.txt"), shlex.join(self.optimal_cmd) + "\n")

    def run_after_tuning(self):
        """Trains with the best configuration. Raises SystemExit with the exit code of a job that fails."""
        if self.optimal_cmd is not None:
            print(f"autotuning: {shlex.join(self.optimal_cmd)}", flush=True)
            code = subprocess.call([sys.executable, "-m", "deepspeed.launcher", *self.optimal_cmd[1:]])
            if code:
                raise SystemExit(code)
