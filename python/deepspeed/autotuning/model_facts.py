"""Facts about the model, the forecasts for it, and the records of experiments."""

import os

from deepspeed.autotuning.settings import MBS, TuningSettings
from deepspeed.autotuning.utils import read_json
from deepspeed.log import logger

# Rules of thumb for the bytes of a parameter: weight, gradient, and with Adam the rest; with fp16 and without.
_BYTES = {True: (2, 2, 12), False: (4, 4, 8)}
_PLATEAU = 0.05


class ModelFacts(TuningSettings):
    """``model_info``: the dict of ``model_info.json``, None before it is known; ``plans``: {name: forecast}."""

    def __init__(self, args, active_resources):
        super().__init__(args, active_resources)
        self.model_info, self.plans, self.records = None, {}, {}

    def take_facts(self, exp, folder):
        """Reads what a run has found out; returns whether it has."""
        if exp["exit_code"] or exp["reason"]:
            logger.warning(f"autotuning: {exp['name']}: {exp['reason']}. Experiments alone tell what fits")
            return False
        self.model_info = read_json(os.path.join(folder, "model_info.json"))
        self.plans.update(read_json(os.path.join(folder, "plans.json")) or {})
        return True

    def fits(self, name):
        """Whether a configuration fits: True or False by forecast, None where there is none."""
        return self.plans.get(name, {}).get("fits")

    def forecast(self, name):
        """Seconds of a step by forecast, or None."""
        return self.plans.get(name, {}).get("seconds")

    def get_model_num_params(self):
        """The number of parameters, or None."""
        return (self.model_info or {}).get("num_params")

    def get_gpu_memory_info(self):
        """Bytes of each device, or None."""
        return (self.model_info or {}).get("memory_per_gpu")

    def get_activation_memory_per_gpu(self):
        """Bytes that a rank keeps for backward, of the micro-batch of the run that has found it out; or None."""
        return (self.model_info or {}).get("activation_mem_per_gpu")

    def get_instantiation_memory_required_per_gpu(self, zero_stage):
        """Bytes of weights, gradients and optimizer states of a rank, by rules of thumb; None without a number of
        parameters. The planner knows better."""
        if self.get_model_num_params() is None:
            return None
        weight, grad, states = (one * self.get_model_num_params() for one in _BYTES[self.fp16_enabled()])
        ranks = self.exp_num_nodes * self.exp_num_gpus
        whole = [one for stage, one in ((3, weight), (2, grad), (1, states)) if zero_stage not in range(stage, 4)]
        return (sum(whole) + (weight + grad + states - sum(whole)) / ranks) / self.mp_size()

    # ---- records -----------------------------------------------------------------------------------------------------
    def update_records(self, space_name, exp, metric_val, num_exps):
        """Notes the result of an experiment, the ``num_exps``-th one, once. ``metric_val`` is None where it failed."""
        rows = self.records.setdefault(space_name, [])
        if all(exp["name"] != row[0]["name"] for row in rows):
            rows.append((exp, metric_val, num_exps))

    def get_best_space_record(self, space_name):
        """``(experiment, value, number)`` of the best one of a space, or None."""
        rows = [row for row in self.records.get(space_name, ()) if row[1] is not None]
        return max(rows, key=lambda row: self.goodness(row[1]), default=None)

    def get_best_space_records(self):
        """``{space: best record}`` of all spaces with one, and that of all of them as ``"global"``."""
        found = {name: self.get_best_space_record(name) for name in self.records}
        found = {name: row for name, row in found.items() if row is not None}
        best = max(found.values(), key=lambda row: self.goodness(row[1]), default=None)
        return {**found, "global": best} if best is not None else found

    def get_plateau_mbs(self, tuning_space_name):
        """The micro-batch from which on larger ones gain less than 5 % in a space; 0 where nothing ran."""
        rows = [row for row in self.records.get(tuning_space_name, ()) if row[1] is not None]
        best = {}
        for exp, value, _ in rows:
            size = exp["ds_config"][MBS]
            best[size] = max(best.get(size, -float("inf")), self.goodness(value))
        sizes = sorted(best)
        for size, larger in zip(sizes, sizes[1:], strict=False):
            if best[larger] < best[size] + _PLATEAU * abs(best[size]):
                return size
        return sizes[-1] if sizes else 0
