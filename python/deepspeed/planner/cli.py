"""``ds_plan``: what a job will take, before there is one. Needs no accelerator and no weights."""

import argparse
import functools
import importlib
import inspect
import itertools
import json
import os
import subprocess
import sys

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.config import choose_config
from deepspeed.config.config import LEFT_TO_TRAINER, resolve
from deepspeed.config.errors import raise_if_broken
from deepspeed.host.command_line import check_output, program
from deepspeed.host.packages import is_installed
from deepspeed.host.user_files import function_in_file
from deepspeed.module_inject.auto_ep_presets.registry import preset_name_for_hf_model_type
from deepspeed.pipe.module import PipelineModule
from deepspeed.planner import timeline
from deepspeed.planner.child import PlanError, run_apart
from deepspeed.planner.machine import Machine, kept_path
from deepspeed.planner.plans import GIB, folders_in, plan
from deepspeed.planner.search import Search, Split, sequence_ranks
from deepspeed.planner.world import World
from deepspeed.profiling.report import Run, beside_plan
from deepspeed.utils.init_on_device import OnDevice

# Beginnings of traceback lines of frames whose code is torch's or ours.
_LIBRARIES = tuple(
    f'File "{os.path.dirname(os.path.dirname(one))}' for one in (torch.__file__, os.path.dirname(__file__))
)
_MOST_RANKS = 1 << 24
_TOKENS = 2048  # of a sequence, at most, where no sample is given


def _function(target, option):
    try:
        function = function_in_file(target)
    except ValueError as error:
        raise ValueError(f"{option} {target!r}: {error}") from None

    @functools.wraps(function)
    def call(*args, **keywords):
        try:
            return function(*args, **keywords)
        except SystemExit as error:
            raise ValueError(f"{option} {target!r} ends the program (exit code {error.code!r})") from error

    return call


def _of_transformers(folder):
    """Makers of the model of a folder with ``config.json``, and of its inputs; and the type of the model."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"--model {folder!r} is neither FILE.py:function nor a folder with a config.json of a model")
    if not is_installed("transformers"):
        raise ValueError(f"--model {folder}: the models of such folders need transformers: pip install transformers")
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    of_config = transformers.AutoModelForCausalLM.from_config  # imported here once, not by each rank that is planned
    kinds = getattr(transformers.AutoModelForCausalLM, "_model_mapping", {})
    kind = kinds[type(config)] if type(config) in kinds else None  # it is imported when it is asked for
    has_positions = kind is not None and "position_ids" in inspect.signature(kind.forward).parameters
    tokens = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)

    def model():
        return of_config(config)

    def sample(batch):
        ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
        positions = {"position_ids": ids} if has_positions else {}  # ranks that share a sequence ask for them
        return {"input_ids": ids, "labels": ids, "use_cache": False, **positions}

    return model, sample, getattr(config, "model_type", None)


class _Job:
    """Model and inputs as the command line names them."""

    def __init__(self, args, machine):
        self.of_transformers = ".py:" not in args.model
        if self.of_transformers:
            self.make, self.sample, self.model_type = _of_transformers(args.model)
        else:
            self.make, self.sample, self.model_type = _function(args.model, "--model"), None, None
        if args.sample:
            made = _function(args.sample, "--sample")
            takes_batch = bool(inspect.signature(made).parameters)
            self.sample = made if takes_batch else lambda batch: made()
        if self.sample is None:
            raise ValueError("--sample FILE.py:function is needed: the inputs of one micro-batch of the model")
        self._world = args.world, machine

    def splits(self, config):
        """The ways to share the model that a search tries: those that the function of the model or the configuration
        has names for. Experts and sequences are shared by at most 8 ranks of a host."""
        (world, machine), own = self._world, sequence_ranks(config)
        every = [size for size in range(1, world + 1) if world % size == 0]
        some = [size for size in every if size <= min(machine.ranks_of_host or world, 8)]
        asks = inspect.signature(self.make).parameters
        auto = preset_name_for_hf_model_type(self.model_type) or (config.get("expert_parallel") or {}).get("enabled")
        shares = self.of_transformers or "sequence_parallel" in config or "sequence_parallel_size" in config
        sizes = {
            "num_stages": every if "num_stages" in asks else (None,),
            "ep_size": some if "ep_size" in asks else (None,),
            "autoep_size": some if auto else (None,),
            "sequence": [size if size != own else None for size in some] if shares else (None,),
        }
        return [Split(*values) for values in itertools.product(*sizes.values())]

    @functools.cached_property
    def can_recompute(self):
        """Whether recomputation can be switched on. It is asked by a search alone, because the model is made for it."""
        return run_apart(_can_recompute, self.make, *self._world)

    def model(self, recompute=False, **split):
        made = self.make(**split)  # the planner has it made on meta
        if recompute and isinstance(made, PipelineModule):
            made.set_checkpoint_interval(1)
        elif recompute:
            made.gradient_checkpointing_enable()
        return made.train()


def _can_recompute(make, world, machine):
    """Whether the model that ``make`` makes can recompute activations. It is made in a job, because a
    ``PipelineModule`` needs one."""
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
    add("--timeline", metavar="FILE", help="write the planned step for chrome://tracing: host, compute, communication")
    add("--png", metavar="FILE", help="draw the bytes of the peak by owner (needs matplotlib)")
    add("--hostfile", metavar="FILE", help="hosts of --profile-machine, as for deepspeed (default: this one, N ranks)")
    add("--profile-machine", action="store_true", help="measure this machine, and the drive of nvme_path, for a file")
    return parser


@program("ds_plan", code=2)
def main(given=None):
    """Returns the exit code: 0 where the job fits, 1 where it does not, 2 for a wrong argument."""
    args = _parser().parse_args(given)
    try:
        return _profile(args) if args.profile_machine else _plan(args)
    except PlanError as error:
        told, _, trace = str(error).partition("\n")
        where = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
        own = [line for line in where if not line.startswith(_LIBRARIES)]
        raise PlanError(" ".join([told, *(f"({line})" for line in own[-1:])])) from error


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
    if args.config:
        Machine.read(path).with_drives(folders_in(_values_of(args.config)).values()).save(path)
    print(f"{path}\n{Machine.read(path)}")
    return 0


def _values_of(given):
    config = choose_config(None, given, None)
    if isinstance(config, dict):
        return config
    with open(config, encoding="utf-8") as file:
        return json.load(file)


def _plan(args):
    if not args.config or not args.model:
        raise ValueError("a configuration and --model are needed; ds_plan --help shows an example")
    if args.world % args.nodes:
        raise ValueError(f"--world {args.world}: the ranks cannot be spread evenly over --nodes {args.nodes}")
    if min(args.world, args.nodes) < 1 or args.world > _MOST_RANKS:
        raise ValueError(f"--world {args.world} and --nodes {args.nodes}: both are at least 1, at most {_MOST_RANKS}")
    check_output(args.png, "--png")
    check_output(args.timeline, "--timeline")
    config, machine = _values_of(args.config), Machine.of_jobs(args.machine)
    resolved = resolve(config, world_size=args.world, given_as="--world")[0]
    if any(one["severity"] == "error" and one["code"] != LEFT_TO_TRAINER for one in resolved.issues()):
        raise_if_broken(resolved)
    job = _Job(args, machine)
    if args.nodes > 1:
        machine.ranks_of_host = args.world // args.nodes
    micro_batch = int(config.get("train_micro_batch_size_per_gpu") or 1)
    how = {"imbalance": args.imbalance, "measure": args.measure}
    sample = job.sample(micro_batch)
    made = plan(job.model, config, args.world, args.memory, sample, machine, timeline=bool(args.timeline), **how)
    if args.timeline:
        timeline.write(args.timeline, made.ranks)
    search = None
    if args.search or not made.fits:
        search = Search(
            job.model, config, args.world, args.memory, job.sample, machine, job.can_recompute,
            job.splits(config), **how,
        )  # fmt: skip
    change = None if made.fits else search.cheapest_change()
    fastest = search.fastest() if args.search else []
    if args.png:
        draw(made, args.png)
    against = _against(made, args.against) if args.against else []
    if args.json:
        rows = [{"settings": one.words, "config": one.config, **one.plan.as_dict()} for one in fastest]
        told = {**made.as_dict(), "change": change and {"settings": change.words, "config": change.config}}
        told["against"] = [dict(zip(("phase", "planned", "measured"), row)) for row in against]
        print(json.dumps({**told, **({"search": rows} if args.search else {})}, indent=1))
    else:
        print(made)
        for phase, planned, measured in against:
            print(f"  {phase:14s} planned {planned * 1e3:10.2f} ms, measured {measured * 1e3:10.2f} ms")
        if not made.fits:
            print(f"cheapest change that fits: {change.words}" if change else "no change makes it fit")
        if args.search:
            print(f"the fastest of {len(search.all)} settings:")
            for one in fastest:
                print(f"  {one.samples_per_second:10.1f} samples/s {one.plan.peak_bytes / GIB:8.2f} GiB  {one.words}")
    return 0 if made.fits else 1


def _against(made, path):
    run = Run(path)
    if not run.steps:
        raise ValueError(f"--against {path}: there is no step in this file; step_log.file writes such files")
    return beside_plan(run, made.as_dict())


def draw(made, path):
    """Bars of the bytes at the peak of each planned rank, by owner."""
    if not is_installed("matplotlib"):
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
