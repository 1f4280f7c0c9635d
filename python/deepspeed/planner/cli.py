"""``ds_plan``: what a job will take, before there is one. Needs no accelerator and no weights."""

import argparse
import functools
import importlib.util
import inspect
import json
import os
import statistics
import subprocess
import sys

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfigError, choose_config
from deepspeed.host.user_files import function_in_file
from deepspeed.pipe.module import PipelineModule
from deepspeed.planner.child import PlanError, run_apart
from deepspeed.planner.machine import Machine, kept_path
from deepspeed.planner.plans import GIB, plan
from deepspeed.planner.search import Search
from deepspeed.planner.world import World
from deepspeed.profiling.report import Run
from deepspeed.utils.init_on_device import OnDevice

_TOKENS = 2048  # of a sequence, at most, where no sample is given


def _function(target, option):
    try:
        return function_in_file(target)
    except ValueError as error:
        raise ValueError(f"{option} {target!r}: {error}") from None


def _of_transformers(folder):
    """Makers of the model of a folder with ``config.json``, and of its inputs."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"--model {folder!r} is neither FILE.py:function nor a folder with a config.json of a model")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"--model {folder}: the models of such folders need transformers: pip install transformers")
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    of_config = transformers.AutoModelForCausalLM.from_config  # imported here once, not by each rank that is planned
    kinds = getattr(transformers.AutoModelForCausalLM, "_model_mapping", {})
    if type(config) in kinds:
        kinds[type(config)]  # its class, which is imported when it is asked for
    tokens = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)

    def model():
        return of_config(config)

    def sample(batch):
        ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    return model, sample


class _Job:
    """Model and inputs as the command line names them."""

    def __init__(self, args, machine):
        if ".py:" in args.model:
            self.make, self.sample = _function(args.model, "--model"), None
        else:
            self.make, self.sample = _of_transformers(args.model)
        if args.sample:
            made = _function(args.sample, "--sample")
            takes_batch = bool(inspect.signature(made).parameters)
            self.sample = made if takes_batch else lambda batch: made()
        if self.sample is None:
            raise ValueError("--sample FILE.py:function is needed: the inputs of one micro-batch of the model")
        self._world = args.world, machine
        asks = "num_stages" in inspect.signature(self.make).parameters
        self.pipes = [size for size in range(1, args.world + 1) if args.world % size == 0] if asks else (None,)

    @functools.cached_property
    def can_recompute(self):
        """Whether recomputation can be switched on. It is asked by a search alone, because the model is made for it."""
        return run_apart(_can_recompute, self.make, *self._world)

    def model(self, recompute=False, *num_stages):
        made = self.make(**dict(zip(["num_stages"], num_stages)))  # the planner has it made on meta
        if recompute and isinstance(made, PipelineModule):
            made.set_checkpoint_interval(1)
        elif recompute:
            made.gradient_checkpointing_enable()
        return made.train()


def _can_recompute(make, world, machine):
    """Of a model that ``make`` makes in a job, because a ``PipelineModule`` needs one."""
    World(0, world, 1 << 62, machine)
    with OnDevice(dtype=torch.get_default_dtype(), device="meta"):
        made = make()
    return isinstance(made, PipelineModule) or callable(getattr(made, "gradient_checkpointing_enable", None))


def _parser():
    parser = argparse.ArgumentParser(prog="ds_plan", description=__doc__)
    add = parser.add_argument
    add("config", nargs="?", help="configuration: a file, or base64 of JSON")
    add("--model", metavar="FILE.py:FUNCTION", help="makes the model; or a folder with config.json of transformers")
    add("--sample", metavar="FILE.py:FUNCTION", help="makes the inputs of a micro-batch; it may take its size")
    add("--world", type=int, default=1, metavar="N", help="ranks (default 1)")
    add("--nodes", type=int, default=1, metavar="M", help="hosts (default 1)")
    add("--memory", metavar="SIZE", help="of a device, such as 80GB or 40GiB (default: no limit)")
    add("--machine", metavar="FILE", help="rates (default: the file of --profile-machine, else this machine)")
    add(
        "--imbalance",
        type=float,
        default=1.0,
        metavar="F",
        help="the busiest rank gets F x the mean of rows (default 1)",
    )
    add("--measure", action="store_true", help="run each operator on this machine's device, which is more exact")
    add("--search", action="store_true", help="plan other settings and list the ten fastest that fit")
    add("--against", metavar="RUN.jsonl", help="compare with a step log, phase by phase")
    add("--json", action="store_true", help="print JSON")
    add("--png", metavar="FILE", help="draw the bytes of the peak by owner (needs matplotlib)")
    add("--hostfile", metavar="FILE", help="hosts of --profile-machine, as for deepspeed (default: this one, N ranks)")
    add("--profile-machine", action="store_true", help="measure this machine, and keep its rates in a file")
    return parser


def main(given=None):
    """Returns the exit code: 0 where the job fits, 1 where it does not, 2 for a wrong argument."""
    args = _parser().parse_args(given)
    try:
        if args.profile_machine:
            return _profile(args)
        return _plan(args)
    except (ValueError, DeepSpeedConfigError, PlanError, OSError) as error:
        print(f"ds_plan: {error}", file=sys.stderr)
        return 2


def _profile(args):
    path = args.machine or kept_path()
    if not path:
        raise ValueError("--profile-machine: there is no home folder to keep the file in: name one with --machine")
    accelerator = get_accelerator()
    two = 2 if accelerator.device_name() == "cpu" else min(2, accelerator.device_count())  # of which links are measured
    hosts = ["--hostfile", args.hostfile] if args.hostfile else ["--num_gpus", str(max(two, args.world))]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *hosts]
    code = subprocess.run([*command, "--module", "deepspeed.planner.measure", os.path.abspath(path)]).returncode
    if code:
        raise ValueError(f"--profile-machine: the ranks that measure ended with exit code {code}; see above")
    print(f"{path}\n{Machine.read(path)}")
    return 0


def _plan(args):
    if not args.config or not args.model:
        raise ValueError("a configuration and --model are needed; ds_plan --help shows an example")
    if args.world % args.nodes:
        raise ValueError(f"--world {args.world}: the ranks cannot be spread evenly over --nodes {args.nodes}")
    config, machine = choose_config(None, args.config, None), Machine.of_jobs(args.machine)
    job = _Job(args, machine)
    if not isinstance(config, dict):
        with open(config, encoding="utf-8") as file:
            config = json.load(file)
    if args.nodes > 1:
        machine.ranks_of_host = args.world // args.nodes
    micro_batch = int(config.get("train_micro_batch_size_per_gpu") or 1)
    how = {"imbalance": args.imbalance, "measure": args.measure}
    made = plan(job.model, config, args.world, args.memory, job.sample(micro_batch), machine, **how)
    search = None
    if args.search or not made.fits:
        search = Search(
            job.model, config, args.world, args.memory, job.sample, machine, job.can_recompute, job.pipes, **how
        )
    change = None if made.fits else search.cheapest_change()
    fastest, tried = search.fastest() if args.search else ([], 0)
    if args.png:
        draw(made, args.png)
    against = compared(made, args.against) if args.against else []
    if args.json:
        rows = [{"settings": one.words, "config": one.config, **one.plan.as_dict()} for one in fastest]
        told = {**made.as_dict(), "change": change and {"settings": change.words, "config": change.config}}
        told["against"] = [dict(zip(("phase", "planned", "measured"), (phase, *both))) for phase, both in against]
        print(json.dumps({**told, **({"search": rows} if args.search else {})}, indent=1))
    else:
        print(made)
        for phase, (planned, measured) in against:
            print(f"  {phase:14s} planned {planned * 1e3:10.2f} ms, measured {measured * 1e3:10.2f} ms")
        if not made.fits:
            print(f"cheapest change that fits: {change.words}" if change else "no change makes it fit")
        if args.search:
            print(f"the fastest of {tried} settings:")
            for one in fastest:
                print(f"  {one.samples_per_second:10.1f} samples/s {one.plan.peak_bytes / GIB:8.2f} GiB  {one.words}")
    return 0 if made.fits else 1


# Phases of the plan -> those of the step log.
_PHASES = {
    "forward": ("forward",),
    "backward": ("backward",),
    "step": ("optimizer", "offload"),
    "communication": ("communication", "gathers"),
}


def compared(made, path):
    """``[(phase, (planned, measured))]`` in seconds: medians of the steps of a step log, without the first tenth."""
    rows = Run(path).steps
    if not rows:
        raise ValueError(f"--against {path}: there is no step in this file; step_log.file writes such files")
    rows = rows[len(rows) // 10 :]
    measured = {
        phase: statistics.median(sum(row["phases"].get(name, 0.0) for name in names) for row in rows)
        for phase, names in _PHASES.items()
    }
    planned = {phase: made.fullest.seconds.get(phase, 0.0) for phase in _PHASES}
    whole = made.seconds, statistics.median(row["wall"] for row in rows)
    return [*((phase, (planned[phase], measured[phase])) for phase in _PHASES), ("whole step", whole)]


def draw(made, path):
    """Bars of the bytes at the peak of each planned rank, by owner."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs the package matplotlib: pip install matplotlib")
    agg = importlib.import_module("matplotlib.backends.backend_agg")
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 4))
    agg.FigureCanvasAgg(figure)
    axes, owners = figure.subplots(), sorted({owner for rank in made.ranks for owner in rank.owners})
    base = [0.0] * len(made.ranks)
    for owner in owners:
        sizes = [rank.owners.get(owner, 0) / GIB for rank in made.ranks]
        axes.bar([f"rank {rank.rank}" for rank in made.ranks], sizes, bottom=base, label=owner)
        base = [low + size for low, size in zip(base, sizes)]
    axes.set_ylabel("GiB at the peak")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
