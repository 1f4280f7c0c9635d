"""Runs experiments on the hosts, as many at once as there are free slots."""

import collections
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time

from deepspeed.autotuning.settings import MINIMISED, argument, config_argument
from deepspeed.autotuning.utils import (
    as_base64,
    get_path,
    get_val_by_key,
    read_json,
    write_json,
    write_text,
)
from deepspeed.host.recorded_names import path_below
from deepspeed.log import logger
from deepspeed.registry import load_target

METRICS = "metrics.json"
# Options of the launcher that say where a job runs, which an experiment decides itself; those that are no words of it.
_PLACES = ("hostfile", "include", "exclude", "num_nodes", "num_gpus", "master_port")
_OWN = ("autotuning", "device_ids", "user_script", "user_args")
_POLL_S = 0.05
_GRACE_S = 20.0  # between the signals SIGTERM and SIGKILL


class ResourceManager:
    """The slots of the hosts, the experiments that wait for some, and those that run.

    An experiment is a dict, and a file of it in ``exps_dir``: ``name``, ``ds_config``, ``num_nodes``, ``num_gpus``
    (slots on each of its nodes), and ``result_file``. It succeeds if it ends with exit code 0 and has written that
    file; ``reason`` says why not. ``exp.json`` in its folder below ``results_dir`` keeps how it ended.
    """

    timeout = math.inf

    def __init__(self, args, hosts, num_gpus_per_node, results_dir, exps_dir, arg_mappings):
        """``hosts``: names, in a list or between commas, or {host: [slot, ...]}."""
        self.args, self.results_dir, self.exps_dir = args, results_dir, exps_dir
        hosts = [host.strip() for host in hosts.split(",")] if isinstance(hosts, str) else hosts
        self.slots = hosts if isinstance(hosts, dict) else {host: list(range(num_gpus_per_node)) for host in hosts}
        self.num_gpus_per_node = num_gpus_per_node
        self.arg_mappings = {key.strip(): str(flag).strip() for key, flag in (arg_mappings or {}).items()}
        self.free = {host: list(slots) for host, slots in self.slots.items()}
        self.experiment_queue, self.running_experiments = collections.deque(), {}
        self.finished_experiments = {}

    # ---- what is to be run -------------------------------------------------------------------------------------------
    def schedule_experiments(self, exp_paths):
        """Takes experiments from their files. One that has ended already, with the same configuration, is not run
        again."""
        for path in exp_paths:
            exp = read_json(path)
            if exp is None:
                raise ValueError(f"autotuning: {path} is not an experiment: it holds no JSON")
            old = read_json(os.path.join(self.folder(exp["name"]), "exp.json")) or {}
            if all(old.get(key) == value for key, value in exp.items()):
                if "exit_code" in old:
                    exp = old
                elif self._result(exp) is not None:  # it ended, and the tuner before it could write that down
                    exp = {**old, "exit_code": 0, "reason": self._reason(exp, 0)}
                    write_json(os.path.join(self.folder(exp["name"]), "exp.json"), exp)
            if "exit_code" in exp:
                self.finished_experiments[exp["name"]] = exp
            else:
                self.experiment_queue.append(exp)

    def folder(self, name):
        """The folder for what the experiment ``name`` writes. The name may come from a file."""
        return path_below(self.results_dir, name, "an experiment", "entry")

    def _result(self, exp):
        found = read_json(
            path_below(self.folder(exp["name"]), exp.get("result_file", METRICS), "an experiment", "entry")
        )
        return found if isinstance(found, dict) else None

    def resource_request(self, exp):
        """``{host: [slot, ...]}`` for an experiment, which are free no longer; None where too few are free."""
        fitting = [host for host, free in self.free.items() if len(free) >= exp["num_gpus"]][: exp["num_nodes"]]
        if len(fitting) < exp["num_nodes"]:
            return None
        return {host: [self.free[host].pop(0) for _ in range(exp["num_gpus"])] for host in fitting}

    def capacity(self, exp):
        """Number of such experiments that can run at once."""
        each = sum(len(slots) // exp["num_gpus"] for slots in self.slots.values())
        return max(1, each // exp["num_nodes"])

    # ---- one experiment ----------------------------------------------------------------------------------------------
    def run_job(self, exp: dict, reservations):
        """Starts an experiment on slots that ``resource_request`` has given."""
        folder = self.folder(exp["name"])
        os.makedirs(folder, exist_ok=True)
        config, result = (
            os.path.join(folder, "ds_config.json"),
            path_below(folder, exp.get("result_file", METRICS), "an experiment", "entry"),
        )
        if os.path.exists(result):
            os.unlink(result)
        write_json(config, exp["ds_config"])
        hostfile = os.path.join(folder, "hostfile")
        write_text(hostfile, "".join(f"{host} slots={max(slots) + 1}\n" for host, slots in reservations.items()))
        places = [f"{host}:{','.join(map(str, slots))}" for host, slots in reservations.items()]
        port = self._port()
        words = [
            f"--hostfile={hostfile}",
            f"--include={'@'.join(places)}",
            *([f"--master_port={port}"] if port else []),
        ]
        command = self.command(exp["ds_config"], config, words)
        write_text(os.path.join(folder, "cmd.txt"), shlex.join(command) + "\n")
        write_json(os.path.join(folder, "exp.json"), exp)
        environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
        start = load_target("deepspeed.launcher.linux:child")
        program = [sys.executable, "-m", "deepspeed.launcher", *command[1:]]
        with (
            open(os.path.join(folder, "stdout.log"), "wb") as out,
            open(os.path.join(folder, "stderr.log"), "wb") as err,
        ):
            process = start(program, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        self.running_experiments[exp["name"]] = [exp, process, reservations, port, time.monotonic(), None]

    def _port(self):
        """A port that no running experiment has, from ``--master_port`` on; without that option the launcher finds
        one."""
        if self.args.master_port is None:
            return None
        used = {port for _, _, _, port, _, _ in self.running_experiments.values()}
        return next(port for port in range(self.args.master_port, 65536) if port not in used)

    def command(self, ds_config, config_file, places=()):
        """The command line of a job: the user's, with another configuration, and other ``places`` if they are given."""
        defaults = vars(load_target("deepspeed.launcher.arguments:parse_args")(["script"]))
        words, own = ["deepspeed", *places], (*_OWN, *_PLACES) if places else _OWN
        for name, value in vars(self.args).items():
            if name not in own and value != defaults.get(name):
                words.append(f"--{name}" if value is True else f"--{name}={value}")
        return [*words, self.args.user_script, *self.script_arguments(ds_config, config_file)]

    def script_arguments(self, ds_config, config_file):
        """The arguments of the script: the configuration in the form that the user chose, and mapped arguments."""
        words = list(self.args.user_args)
        at, prefix, given = config_argument(words)
        is_file = not isinstance(given, dict) and os.path.isfile(given)
        words[at] = prefix + (config_file if is_file else as_base64(ds_config))
        for key, flag in self.arg_mappings.items():
            value, found = get_path(ds_config, key, get_val_by_key(ds_config, key)), argument(words, flag)
            if value is None or value == "auto":
                continue
            if found is None:
                words += [flag, str(value)]
            else:
                words[found[0]] = f"{found[1]}{value}"
        return words

    # ---- until all have ended ----------------------------------------------------------------------------------------
    def run(self):
        """Runs what is scheduled, to the end."""
        try:
            while self.experiment_queue or self.running_experiments:
                while self.experiment_queue:
                    reservations = self.resource_request(self.experiment_queue[0])
                    if reservations is None:
                        break
                    self.run_job(self.experiment_queue.popleft(), reservations)
                if not self.running_experiments:
                    exp = self.experiment_queue[0]
                    raise ValueError(
                        f"autotuning: an experiment needs {exp['num_nodes']} node(s) with {exp['num_gpus']} slot(s) "
                        f"each, and there are {self.slots}: lower --num_nodes or --num_gpus"
                    )
                self.experiment_check(None)
        finally:
            self.clear()

    def experiment_check(self, pbar):
        """Looks once at the running experiments, and waits a moment. ``pbar``: an object whose ``update(n)`` is told
        how many have ended, or None."""
        ended = []
        for name, (exp, process, reservations, _, start, ending) in list(self.running_experiments.items()):
            late = time.monotonic() - start - self.timeout
            if process.poll() is None:
                if late > 0 and ending is None:
                    self.running_experiments[name][-1] = time.monotonic()
                    process.send_signal(signal.SIGTERM)
                elif ending is not None and time.monotonic() - ending > _GRACE_S:
                    process.kill()
                continue
            ended.append(name)
            del self.running_experiments[name]
            for host, slots in reservations.items():
                self.free[host] = sorted([*self.free[host], *slots])
            exp = {**exp, "exit_code": process.returncode, "seconds": time.monotonic() - start}
            timed_out = (
                f"timeout after {self.timeout:g} s (autotuning.experiment_timeout)" if ending is not None else ""
            )
            exp["reason"] = timed_out or self._reason(exp, process.returncode)
            write_json(os.path.join(self.folder(exp["name"]), "exp.json"), exp)
            self.finished_experiments[name] = exp
            logger.info(f"autotuning: {name}: {exp['reason'] or 'measured'}")
        if pbar is not None and ended:
            pbar.update(len(ended))
        time.sleep(_POLL_S)

    def _reason(self, exp, code):
        """The reason for which an experiment has failed, or an empty text."""
        result = self._result(exp)
        if result is not None and "failure" in result:
            return str(result["failure"])
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return "memory: killed by SIGKILL, as the system does when memory runs out"
        if code:
            return f"exit code {code}: {self._last_line(exp)}"
        return "" if result is not None else f"the script wrote no {exp.get('result_file', METRICS)}"

    def _last_line(self, exp):
        folder = self.folder(exp["name"])
        for log in (os.path.join(folder, "stderr.log"), os.path.join(folder, "stdout.log")):
            with open(log, encoding="utf-8", errors="replace") as file:
                lines = [line.strip() for line in file if line.strip() and not line.startswith(("deepspeed:", "----"))]
            if lines:
                return lines[-1]
        return "no output"

    def value(self, exp, metric):
        """The metric of an experiment that has ended, or None; then its ``reason`` says why."""
        found = (self._result(exp) or {}).get(metric)
        if exp["exit_code"] == 0 and not exp["reason"]:
            if isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found):
                return float(found)
            exp["reason"] = f"{METRICS} has no number {metric!r}"
        return None

    def parse_results(self, metric):
        """``(experiment, value)`` with the best value of ``metric`` among those that have ended; ``(None, None)`` where
        none has one."""
        found = [(self.value(exp, metric), exp) for exp in self.finished_experiments.values()]
        found = [(value, exp) for value, exp in found if value is not None]
        best = min if metric in MINIMISED else max
        return best(found, key=lambda one: one[0])[::-1] if found else (None, None)

    def status(self):
        """A sentence: how many experiments wait, run and have ended, and what is free."""
        return (
            f"{len(self.experiment_queue)} experiments wait, {len(self.running_experiments)} run, "
            f"{len(self.finished_experiments)} have ended; free slots: {self.free}"
        )

    def clear(self):
        """Ends what runs, and forgets what waits."""
        for _, process, *_ in self.running_experiments.values():
            process.terminate()
        for _, process, *_ in self.running_experiments.values():
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.experiment_queue.clear()
        self.running_experiments.clear()
        self.free = {host: list(slots) for host, slots in self.slots.items()}

    def save_exp_results_to_database(self, message, ranks=None, path=None):
        """Appends ``message`` and the host's name as a line of JSON to ``path``. ``ranks``: accepted; the tuner is one
        process."""
        if path is not None:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"hostname": os.uname().nodename, "message": message}) + "\n")
