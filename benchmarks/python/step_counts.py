"""Counts of the host's work in a training step of a GPT: at each ZeRO stage, beside plain torch, DDP and FSDP2.

    python benchmarks/python/step_counts.py [--layers 12,24] [--check] [--device cuda] [--json FILE]

``plans``: steps of 1, 2 and 8 ranks that the planner makes (docs/tutorials/planning.md), on any machine: calls of
torch's dispatcher, launches, kernels of this library, collectives, and waits of the host. ``steps``: steps that run, of
a GPT that is narrow, so that its device has little to do. Other ranks do not exist: their calls return at once. On the
stand-in device (tests/device), if it is built, queued work does not run; on a GPU torch's profiler counts. Host time is
the processor time of all threads of the process; contenders take turns, and a figure is the median of the turns.

``--check`` compares with the bounds in step_counts.json, and exits with 1 if a count is larger. Bounds are on counts
and never on times. Those of calls and launches are beside the forward and the backward of plain torch, so that they
mean the same with every version of torch. ``--lower`` writes today's counts where they are smaller than the bounds.
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "tests", "device")]

from common import contenders  # noqa: E402  (the line above finds it)

BOUNDS = os.path.join(HERE, "step_counts.json")
STAGES, WORLDS = range(4), (1, 2, 8)
WIDE = {12: {"heads": 12, "width": 768}, 24: {"heads": 16, "width": 2048}}  # planned: 125M and 1.3B
NARROW = {"heads": 2, "width": 32, "vocab_size": 256, "context": 16}
FAKE = "torch.testing._internal.distributed.fake_pg"  # a group of torch whose other ranks do not exist
BESIDE_TORCH = ("dispatched", "launches")
STABLE = ("collectives", "events", "stream waits", "host waits", "polls")
COUNTED = {  # names of the stand-in and of torch's profiler -> ours
    "operations": "launches", "kernels": "launches", "copies": "launches", "events": "events",
    "stream waits": "stream waits", "host waits": "host waits", "polls": "polls", "allocations": "allocations",
    "cudaLaunchKernel": "launches", "cudaLaunchKernelExC": "launches", "cuLaunchKernel": "launches",
    "cuLaunchKernelEx": "launches", "cudaMemcpyAsync": "launches", "cudaMemsetAsync": "launches",
    "cudaEventRecord": "events", "cudaEventRecordWithFlags": "events", "cudaStreamWaitEvent": "stream waits",
    "cudaStreamSynchronize": "host waits", "cudaEventSynchronize": "host waits", "cudaDeviceSynchronize": "host waits",
    "cudaMemcpy": "host waits", "cudaEventQuery": "polls", "cudaStreamQuery": "polls",
}  # fmt: skip


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="12,24")
    parser.add_argument(
        "--device", choices=("cpu", "standin", "cuda"), help="of steps (default: the stand-in, if built)"
    )
    parser.add_argument("--ranks", type=int, help="of planned steps and of steps that run (default: 1, 2 and 8)")
    parser.add_argument("--only", default="plans,steps", help="parts (default: plans,steps)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender; 0: no times")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a count is above its bound")
    parser.add_argument("--lower", action="store_true", help="lower the bounds to the counts of today")
    parser.add_argument("--bounds", metavar="FILE", default=BOUNDS, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", nargs=2, metavar=("LAYERS", "RANKS"), type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- plans -----------------------------------------------------------------------------------------------------------
def planned(layers, worlds):
    """``{contender: counts}`` of planned steps of a GPT with its usual width."""
    import torch

    import deepspeed
    from deepspeed.planner import Machine

    machine = Machine(
        "a GPU", {"float32": 6e13, "bfloat16": 6e14}, 4e12, 3000, (15_000, 350e9), (15_000, 45e9), 0, 0, 0
    )
    shape = {"layers": layers, "vocab_size": 50304, "context": 1024, **WIDE.get(layers, WIDE[12])}
    ids, found = torch.zeros(1, 1024, dtype=torch.int64, device="meta"), {}
    for world in worlds:
        for name, zero in [(f"stage {stage}", {"stage": stage}) for stage in STAGES] + compressed(world):
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": contenders.CLIP,
                "steps_per_print": None,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": contenders.RATE}},
                "zero_optimization": zero,
            }
            made = deepspeed.plan(
                lambda: contenders.model_of(shape, torch.device("meta")).bfloat16(), config, world, sample=(ids, ids),
                machine=machine, ranks=[0],
            )  # fmt: skip
            one = made.ranks[0]
            phases = one.counts.values()
            found[_named(name, world)] = {
                **{key.replace("_", " "): sum(counts[key] for counts in phases) for key in one.counts["step"]},
                "exposed": one.seconds["communication"] / one.step_seconds,
                "peak GiB": one.peak_bytes / 2**30,
            }
    return {_title("bare", 1): _of_torch(layers), **found}


def compressed(world):
    """Stage 3 with each part of ZeRO++."""
    keys = {"zero_quantized_weights": True, "zero_hpz_partition_size": world // 2, "zero_quantized_gradients": True}
    return [(f"stage 3, {key}", {"stage": 3, key: value}) for key, value in keys.items() if world > 2]


def _of_torch(layers):
    """Counts of a forward and a backward on the CPU, as those of a plan."""
    import torch

    from deepspeed.profiling.op_costs import CountedOps

    counts = collections.Counter()

    class Counted(CountedOps):
        def call(self, func, args, kwargs):
            counts["dispatched"] += 1
            return func(*args, **kwargs)

    def seen(name, cost, operands, out):
        counts["launches"] += bool(cost.flops or cost.bytes)

    torch.set_num_threads(1)
    run = Run("bare", layers, torch.device("cpu"), None)
    with Counted(seen):
        run.step()
    return dict(counts)


def _named(name, world):
    return f"{name}, {world} rank{'s' if world > 1 else ''}"


# ---- steps that run --------------------------------------------------------------------------------------------------
def work(args, layers, world):
    """The work of a process, which is one rank of ``world``: prints ``{contender: counts}``."""
    found, told = {}, []
    import torch

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
    )  # fmt: skip
    torch.set_num_threads(1)
    device = _device(args.device)
    mesh = _join(world, device)
    names = ["bare", "masters"] if world == 1 else ["ddp"]
    runs = {}
    for name in [*names, "fsdp2", *map(str, STAGES)]:
        why = contenders.lacks(name)
        try:
            if not why:
                runs[name] = Run(name, layers, device, mesh)
        except Exception as error:  # torch's own code may not know a device
            if name[0].isdigit():
                raise
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        if why:
            told.append(f"{_title(name, world)} is left out on {device.type}: {why}")
    if device.type == "standin":
        import standin

        standin.choose(null=True)  # before, ranks tell each other more than runs in that mode
    for name, run in runs.items():
        run.step()
        found[_title(name, world)] = run.counts()
    if args.rounds:
        for run in runs.values():
            run.time()
        for _ in range(args.rounds):
            for run in runs.values():
                run.times.append(run.time())
        for name, run in runs.items():
            found[_title(name, world)]["host ms"] = statistics.median(run.times) * 1e3
    print("FIGURES " + json.dumps({"counts": found, "told": told, "device": device.type}), flush=True)
    os._exit(0)  # the end of a process waits for the other ranks of its job


def _title(name, world):
    titles = {"bare": "forward and backward", "masters": "torch, masters", "ddp": "DDP, masters", "fsdp2": "FSDP2"}
    return _named(titles.get(name, f"stage {name}"), world)


def _device(kind):
    import torch

    import deepspeed

    if kind == "standin":
        import standin

        standin.load()
        deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
        return torch.device("standin", 0)
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def _join(world, device):
    """A job whose other ranks do not exist, for torch and for this library; torch's mesh over its ranks, None where
    torch has none."""
    import torch.distributed as dist

    from deepspeed import _native
    from deepspeed.comm import group_communicators, mesh
    from deepspeed.comm.timed import call_log

    if importlib.util.find_spec(FAKE) is None:
        return None  # and there is one rank
    importlib.import_module(FAKE)
    kinds = ",".join(f"{kind}:fake" for kind in dict.fromkeys(("cpu", device.type)))
    dist.init_process_group(kinds, store=dist.HashStore(), rank=0, world_size=world)
    core = _native._C

    def counted(rank, size, name):
        return core.counted_communicator(rank, size, call_log, name, None, core.LinkCost(), None, None)

    def of_group(group):
        return counted(dist.get_rank(group), dist.get_world_size(group), "torch.distributed")

    group_communicators.native_backends["fake"] = of_group
    backend = dist.get_backend(dist.group.WORLD)
    mesh.made_here().jobs[backend] = core.Job(0, world, lambda key, ranks, _: counted(ranks.index(0), len(ranks), key))
    return dist.init_device_mesh(device.type, (world,)) if hasattr(dist, "init_device_mesh") else None


class Run:
    """A contender of a process, and its steps. Sizes by which the engine decides are as small as the model."""

    def __init__(self, name, layers, device, mesh):
        import torch

        small = (NARROW["width"] / WIDE[12]["width"]) ** 2
        zero = {
            "stage3_param_persistence_threshold": 8 * NARROW["width"],
            "stage3_prefetch_bucket_size": int(5e7 * small),
            "reduce_bucket_size": int(5e8 * small),
        }
        model = contenders.model_of({**NARROW, "layers": layers}, torch.device("cpu")).to(device)
        self.device, self.times = device, []
        self.x = torch.zeros(1, NARROW["context"], dtype=torch.int64, device=device)
        self.loop = contenders.make(name, model, rows=1, mesh=mesh, zero=zero)
        for _ in range(3):
            self.step()

    def step(self):
        self.loop.step(self.x, self.x)

    def wait(self):
        import deepspeed

        deepspeed.get_accelerator().synchronize()

    def time(self, steps=4):
        """Seconds of the processor in a step."""
        self.wait()
        begin = time.process_time()
        for _ in range(steps):
            self.step()
        return (time.process_time() - begin) / steps

    def counts(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        from deepspeed import _native
        from deepspeed.comm import timed

        found = collections.Counter(dispatched=0, collectives=0)

        class Counted(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                found["dispatched"] += 1
                found["collectives"] += func.namespace == "c10d"
                return func(*args, **(kwargs or {}))

        recorder = _native._C.CallRecorder(False)
        timed.listen(recorder)
        with Counted():
            self.step()
        timed.stop_listening(recorder)
        found["collectives"] += len(recorder.take())
        with counted_on(self.device) as counts:
            self.step()
        return {**found, **counts}


@contextlib.contextmanager
def counted_on(device):
    """Gives a dict that has the calls to the device at the end of the context; empty on the CPU."""
    counts = collections.Counter()
    if device.type == "cpu":
        yield counts
    elif device.type == "standin":
        import standin

        standin.reset_counts()
        yield counts
        counts.update({COUNTED[key]: 0 for key in COUNTED if key in standin.counts()})
        for key, number in standin.counts().items():
            if key in COUNTED:
                counts[COUNTED[key]] += number
    else:
        import torch

        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            yield counts
        counts.update(launches=0, polls=0, **{"host waits": 0, "events": 0, "stream waits": 0})
        counts["allocations"] = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        for event in profile.key_averages():
            if event.key in COUNTED:
                counts[COUNTED[event.key]] += event.count
        counts["host waits"] -= 1  # the profiler's own


def steps(args, layers, worlds):
    """``{contender: counts}`` of steps that run, each number of ranks in a process of its own, and lines about what is
    left out."""
    found, told = {}, []
    if importlib.util.find_spec(FAKE) is None and set(worlds) - {1}:
        worlds, told = (1,), ["steps of several ranks are left out: this torch has no group without other ranks"]
    for world in worlds:
        command = [sys.executable, os.path.abspath(__file__), "--worker", str(layers), str(world)]
        command += ["--device", args.device, "--rounds", str(args.rounds)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        if args.device == "standin":
            import standin_kernels

            env["DS_STANDIN_KERNELS"] = standin_kernels.library_path()
        ran = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("FIGURES ")]
        if ran.returncode or not lines:
            sys.exit(f"a step of {world} ranks on {args.device} failed; its message is above")
        made = json.loads(lines[0].removeprefix("FIGURES "))
        found.update({f"{name} on {made['device']}": counts for name, counts in made["counts"].items()})
        told += made["told"]
    return found, told


# ---- bounds ----------------------------------------------------------------------------------------------------------
def beside_torch(found):
    """The counts that have bounds: calls and launches are beside those of the forward and the backward alone."""
    made = {}
    for part, rows in found.items():
        for name, counts in rows.items():
            if not name.startswith("stage "):
                continue
            plain = rows.get(f"forward and backward, 1 rank{name[name.index(' on ') :] if ' on ' in name else ''}")
            less = {key: plain.get(key, 0) for key in BESIDE_TORCH} if plain else {}
            whole = {key: number for key, number in counts.items() if isinstance(number, int)}
            if part == "steps":  # others differ a little from run to run
                whole = {key: number for key, number in whole.items() if key in STABLE}
            made[f"{part}: {name}"] = {key: number - less.get(key, 0) for key, number in whole.items()}
    return made


def above(bounds, found):
    """Lines about counts that are above their bounds."""
    lines = []
    for name, counts in found.items():
        for key, number in counts.items():
            most = bounds.get(name, {}).get(key)
            if most is not None and number > most:
                lines.append(f"{name}: {number} {key}, and the bound is {most}")
    return lines


def lowered(bounds, found):
    made = {name: dict(counts) for name, counts in bounds.items()}
    for name, counts in found.items():
        for key, number in counts.items():
            made.setdefault(name, {})[key] = min(number, made.get(name, {}).get(key, number))
    return made


# ---- the program -----------------------------------------------------------------------------------------------------
def show(title, rows):
    keys = list(dict.fromkeys(key for counts in rows.values() for key in counts))
    print(title)
    print(f"  {'':34s}" + "".join(f"{key:>14s}" for key in keys))
    for name, counts in rows.items():
        cells = [counts.get(key, "") for key in keys]
        words = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
        print(f"  {name:34s}" + "".join(f"{word:>14s}" for word in words))


def _standin():
    """Returns why the stand-in device cannot be used here, or "" where it can."""
    try:
        import standin
    except ImportError:
        return "only a source tree has it"
    if not standin.supported():
        return "it needs torch 2.9 or newer"
    return "" if os.path.exists(standin.library_path()) else "it is not built (tools/build.sh tests)"


def main():
    args = parse_arguments()
    if args.worker:
        work(args, *args.worker)
        return 0
    why = _standin()
    if args.device is None:
        args.device = "cpu" if why else "standin"
        if why:
            print(f"steps on the stand-in device are left out: {why}")
    found, told, worlds, parts = {}, [], (args.ranks,) if args.ranks else WORLDS, args.only.split(",")
    for layers in map(int, args.layers.split(",")):
        one = found[f"{layers} layers"] = {}
        if "plans" in parts:
            one["plans"] = planned(layers, worlds)
            show(f"planned steps of {layers} layers", one["plans"])
        if "steps" in parts:
            one["steps"], lines = steps(args, layers, worlds)
            told += lines
            show(f"steps of {layers} layers, one process", one["steps"])
    print("\n".join(dict.fromkeys(told)))
    if args.json:
        from common import machine

        machine.write_json(args.json, "step_counts", found, device=args.device)
    return judge(args, {layers: beside_torch(one) for layers, one in found.items()})


def judge(args, found):
    if not (args.check or args.lower):
        return 0
    with open(args.bounds, encoding="utf-8") as file:
        bounds = json.load(file)
    lines = [f"{layers}, {line}" for layers, one in found.items() for line in above(bounds.get(layers, {}), one)]
    print("\n".join(lines) or "no count is above its bound")
    if args.lower:
        bounds.update({layers: lowered(bounds.get(layers, {}), one) for layers, one in found.items()})
        with open(args.bounds, "w", encoding="utf-8") as file:
            json.dump(bounds, file, indent=1, sort_keys=True)
            file.write("\n")
    return 1 if args.check and lines else 0


if __name__ == "__main__":
    sys.exit(main())
