"""A tuner over experiments that are a formula, and one over experiments of the launcher."""

import json
import os
import pathlib
import subprocess
import sys

from deepspeed.autotuning import Autotuner
from deepspeed.autotuning.scheduler import ResourceManager
from deepspeed.autotuning.utils import get_path
from deepspeed.launcher.arguments import parse_args
from places import PYTHON

MBS = "train_micro_batch_size_per_gpu"


def words(folder, config, options=("--num_gpus", "2"), how="tune", script="train.py", extra=()):
    """The arguments of the launcher, with the configuration in a file of ``folder``."""
    section = {"enabled": True, "exps_dir": f"{folder}/exps", "results_dir": f"{folder}/results"}
    config = {**config, "autotuning": {**section, **config.get("autotuning", {})}}
    path = pathlib.Path(folder, "ds.json")
    path.write_text(json.dumps(config))
    return ["--autotuning", how, *options, script, *extra, "--deepspeed_config", str(path)]


def tuner_of(folder, config, hosts=None, **more):
    return Autotuner(parse_args(words(folder, config, **more)), hosts or {"localhost": [0, 1]})


class Formula(ResourceManager):
    """Experiments that take no time: ``formula(configuration)`` is the metric, or a text: why it fails. ``plans`` gives
    what the planner says: a function of the configuration, or None. ``ran``: names in their order."""

    formula = plans = None

    def run(self):
        while self.experiment_queue:
            exp = self.experiment_queue.popleft()
            folder = self.folder(exp["name"])
            os.makedirs(folder, exist_ok=True)
            self.ran.append(exp["name"])
            path, config, code = os.path.join(folder, "metrics.json"), exp["ds_config"], 0
            if exp.get("result_file"):
                self._tell_facts(folder)
            else:
                found = self.formula(config)
                code = 1 if found == "exit" else 0
                is_text = isinstance(found, str)
                values = {"failure": found} if is_text else {config["autotuning"]["metric"]: found}
                if found != "exit":
                    pathlib.Path(path).write_text(json.dumps(values))
            for name in ("stdout.log", "stderr.log"):
                pathlib.Path(folder, name).write_text("it broke\n")
            exp = {**exp, "exit_code": code, "seconds": 1.0, "reason": self._reason(exp, code)}
            pathlib.Path(folder, "exp.json").write_text(json.dumps(exp))
            self.finished_experiments[exp["name"]] = exp

    def _tell_facts(self, folder):
        facts = {"num_params": 1000, "activation_mem_per_gpu": 50, "memory_per_gpu": 10**6, MBS: 1}
        pathlib.Path(folder, "model_info.json").write_text(json.dumps(facts))
        if self.plans:
            every = json.loads(pathlib.Path(folder, "candidates.json").read_text())
            rows = {name: {"peak_bytes": 1, "why": "", **self.plans(one)} for name, one in every.items()}
            pathlib.Path(folder, "plans.json").write_text(json.dumps(rows))


def by_formula(folder, config, formula, plans=None, **more):
    """A tuner whose experiments are ``formula``; ``tuner.rm.ran`` lists them."""
    tuner = tuner_of(folder, config, **more)
    own = tuner.rm
    tuner.rm = Formula(own.args, own.slots, own.num_gpus_per_node, own.results_dir, own.exps_dir, own.arg_mappings)
    tuner.rm.formula, tuner.rm.plans, tuner.rm.ran = formula, plans, []
    return tuner


def stage(config):
    return get_path(config, "zero_optimization.stage")


def launched(folder, config, script, **more):
    """The process of ``deepspeed --autotuning`` on a script, whose text is given."""
    pathlib.Path(folder, "train.py").write_text(script)
    command = [sys.executable, "-m", "deepspeed.launcher", *words(folder, config, **more)]
    environment = {**os.environ, "PYTHONPATH": PYTHON, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
