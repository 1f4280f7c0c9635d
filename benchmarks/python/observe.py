"""Whether the step log finds where the time of a step goes, and what it costs.

    python benchmarks/python/observe.py [--part sums|cost|causes] [--ranks 1,2] [--steps 50] [--runs 20] [--json FILE]
    python benchmarks/python/observe.py --device cuda [--ranks 1] [--json FILE]    # sums

sums: the phases of ``--steps`` steps of a GPT of 10 million parameters (on a GPU 92 million in bf16) over their wall
    time, at each ZeRO stage, with offload of the optimizer, and on two ranks of the CPU in a pipeline. Of several ranks
    the one that is furthest from 1.
cost: of a step: the phases of the log times the time of one, and its row; the rows of a trace times the time of one.
    Blocks of steps in turn: everything on (the log with its file, a CSV monitor, timers, a report) over everything off,
    and while a trace records over everything on.
causes: a small model on two ranks, of which one is 50 ms late: in its loader, in its backward, at the other end of a
    link, in a read of its optimizer states. ``found``: the number of ``--runs`` steps that have 45 to
    55 ms more in that phase of that rank than the median of the steps between them, and the log calls that rank the
    slowest where it is.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time

from common import machine, ranks

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[1:1] = [os.path.join(ROOT, "tests", "dist"), os.path.join(ROOT, "examples", "quickstart")]
CALLS = 20000  # of which the time of one is the mean
NEAR = 0.005  # seconds


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", help="some of them (default: all; on a GPU sums)")
    parser.add_argument("--ranks", help="numbers of ranks (default: 1,2; on a GPU 1)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=4, help="steps of each contender in a round")
    parser.add_argument("--rows", type=int, default=4, help="sequences of 128 tokens for each rank")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.part = args.part or ("sums,cost,causes" if args.device == "cpu" else "sums")
    args.ranks = args.ranks or ("1,2" if args.device == "cpu" else "1")
    if args.device == "cuda" and args.part != "sums":
        parser.error("--device cuda measures --part sums only")
    return args


def engine_of(model, rows, **more):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def gpt(args, **more):
    """An engine, and a function that takes a step with it."""
    import torch

    from model import GPT, Shape

    torch.manual_seed(0)
    shape = Shape()
    if args.device == "cuda":
        shape = Shape(vocab_size=8192, layers=12, heads=12, width=768)
        more["bf16"] = {"enabled": True}
    engine = engine_of(GPT(shape), args.rows, **more)
    tokens = torch.randint(0, shape.vocab_size, (args.rows, 129)).to(engine.device)

    def step():
        engine.backward(engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        engine.step()

    return engine, step


def pipeline(args):
    import torch

    from deepspeed.pipe import PipelineModule
    from model import Block, Shape

    torch.manual_seed(0)
    shape = Shape()

    def loss_of(logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    ends = torch.nn.Embedding(shape.vocab_size, shape.width), torch.nn.Linear(shape.width, shape.vocab_size)
    layers = [ends[0], *(Block(shape) for _ in range(shape.layers)), ends[1]]
    module = PipelineModule(layers, num_stages=2, loss_fn=loss_of)
    engine = engine_of(module, 1, gradient_accumulation_steps=args.rows)
    tokens = torch.randint(0, shape.vocab_size, (1, 129))
    batches = itertools.repeat((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return engine, lambda: engine.train_batch(batches)


def together(value):
    """A list of the values of all ranks. torch gathers them, because its calls are no phase of a step."""
    from torch import distributed

    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


# ---- sums ------------------------------------------------------------------------------------------------------------
def sums(args, world, folder):
    cases = {f"stage {stage}": {"stage": stage} for stage in range(4)}
    cases["stage 2, optimizer on the host"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    cases["stage 3, optimizer in files"] = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": folder},
    }
    makers = {name: lambda zero=zero: gpt(args, zero_optimization=zero) for name, zero in cases.items()}
    if world == 2 and args.device == "cpu":
        makers["pipeline of two stages"] = lambda: pipeline(args)
    found = {}
    for name, make in makers.items():
        engine, step = make()
        for _ in range(2):
            step()
        engine.step_log()
        begin = time.perf_counter()
        for _ in range(args.steps):
            step()
        wall = time.perf_counter() - begin
        rows = engine.step_log()[-args.steps :]
        spent = {phase: sum(row["phases"][phase] for row in rows) for phase in rows[0]["phases"]}
        shares = together(sum(spent.values()) / wall)
        found[name] = {
            "phases / wall": max(shares, key=lambda share: abs(share - 1)),
            "wall_ms": wall / args.steps * 1e3,
            "phases_ms": {phase: seconds / args.steps * 1e3 for phase, seconds in spent.items() if seconds},
        }
        engine.destroy()
    return found


# ---- cost ------------------------------------------------------------------------------------------------------------
def mean_time(call, count=CALLS):
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def time_of_a_phase():
    from deepspeed.profiling.phases import Phases

    phases = Phases()
    phases.clock.turn(True)
    outer = phases.enter("backward")
    found = mean_time(lambda: phases.leave(phases.enter("communication")))
    phases.leave(outer)
    return found


def time_of_a_row():
    """Times a row of a trace."""
    import torch

    from deepspeed.profiling.phases import Phases
    from deepspeed.profiling.trace import Recorder

    module = torch.nn.Identity()
    recorder = Recorder(module, Phases(), None)
    recorder.begin()
    begin, end = recorder._entered("a.layer"), recorder._left("a.layer")
    found = mean_time(lambda: (begin(module, None), end(module, None, None)))
    recorder.end()
    return found


def in_turn(ours, others):
    """The median of the ratios of blocks of one round, which meet the same load of the machine."""
    return statistics.median(sum(mine) / sum(other) for mine, other in zip(ours, others))


@contextlib.contextmanager
def unobserved(engine):
    """The calls of other engines cost what they cost without the log of this one."""
    from deepspeed.comm.timed import call_log

    call_log.remove(engine._step_log._waits)
    try:
        yield
    finally:
        call_log.add(engine._step_log._waits)


def cost(args, world, folder):
    from deepspeed import comm

    zero = {"stage": 2 if world > 1 else 0}
    everything = {
        "step_log": {"file": os.path.join(folder, "run.jsonl"), "peak_tflops": 1.0},
        "report": {"path": os.path.join(folder, "run.html")},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "observe"},
        "wall_clock_breakdown": True,
    }
    on, step_on = gpt(args, zero_optimization=zero, **everything)
    off, step_off = gpt(args, zero_optimization=zero, step_log={"enabled": False})
    path = os.path.join(folder, "trace.json")
    times = {"off": [], "on": [], "trace": []}

    def block(step, into):
        if world > 1:
            comm.barrier()
        into.append([])
        for _ in range(args.block):
            begin = time.perf_counter()
            step()
            into[-1].append(time.perf_counter() - begin)

    def untraced():
        block(step_on, times["on"])

    def traced():
        on.trace(args.block + 1, path)  # the last one writes the file
        block(step_on, times["trace"])
        step_on()

    def nothing():
        with unobserved(on):
            block(step_off, times["off"])

    contenders = [nothing, untraced, traced]
    for contender in contenders:
        contender()
    for into in times.values():
        into.clear()
    for turn in range(args.rounds):
        for contender in contenders[turn % 3 :] + contenders[: turn % 3]:
            contender()
    rows = 0
    if comm.get_rank() == 0:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        rows = sum(one["ph"] == "X" and one["pid"] == 0 for one in events) / (args.block + 1)
    clock = on._step_log.phases.clock
    begun = clock.totals()[3]
    for _ in range(args.block):
        step_on()
    begun = (clock.totals()[3] - begun) / args.block
    steps = {name: sum(rounds, []) for name, rounds in times.items()}
    step = statistics.median(steps["off"])
    with unobserved(on):
        log_row = mean_time(on._step_log.after_step, 500)
    phase, row = time_of_a_phase(), time_of_a_row()
    on.destroy()
    off.destroy()
    return {
        "step_ms": step * 1e3,
        "step log": {
            "phases of a step": begun,
            "us of a phase": phase * 1e6,
            "us of a line": log_row * 1e6,
            "share": (begun * phase + log_row) / step,
        },
        "trace": {
            "rows of a step": rows,
            "us of a row": row * 1e6,
            "share": rows * row / step,
            "trace / everything, in turn": in_turn(times["trace"], times["on"]),
        },
        "everything / nothing, in turn": in_turn(times["on"], times["off"]),
        "quarters_ms": {name: [one * 1e3 for one in statistics.quantiles(all_, n=4)] for name, all_ in steps.items()},
    }


# ---- causes ----------------------------------------------------------------------------------------------------------
class Cause:
    """A small engine, of which rank 1 can be late for a step. ``phase``: where it is late."""

    def __init__(self, phase, folder):
        from injected_delays import LateLink, LateReads
        from models import two_layers

        self.phase, self.late = phase, False
        zero = {"stage": 1}
        if phase == "offload":
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
        with LateLink() if phase == "communication" else contextlib.nullcontext() as link:
            self.engine = engine_of(two_layers(64, 64, 8), 2, steps_per_print=1, zero_optimization=zero)
            self.batches = iter(self.engine.deepspeed_io(Samples(self), num_local_io_workers=0))
            self.engine.module[0].weight.register_hook(lambda grad: self.wait("backward"))
            self.switch = {"communication": link}.get(phase, self)
            self.step()  # opens what is opened at first use
        if phase == "offload":
            self.switch = LateReads()

    def wait(self, phase):
        if self.late and self.phase == phase:
            self.late = False
            time.sleep(0.05)

    def step(self, late=False):
        """Seconds of the phase on each rank."""
        if late and self.engine.global_rank == 1:
            self.switch.late = 1
        self.engine.backward(self.engine(next(self.batches)).square().mean())
        self.engine.step()
        return together(self.engine.step_log()[-1]["phases"][self.phase])


class Samples:
    """The data of a ``Cause``."""

    def __init__(self, cause):
        self.cause = cause

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        import torch

        self.cause.wait("data")
        return torch.ones(64)


def causes(args, world, folder):
    found = {}
    for name, phase in CAUSES.items():
        cause = Cause(phase, folder)
        usual, late, named = [], [], 0
        for _ in range(args.runs):
            usual.append(cause.step())
            late.append(cause.step(late=True))
            slowest = cause.engine._step_log.rank_times
            named += (slowest["slowest_rank"], slowest["slowest_phase"]) == (1, phase)
        normal = [statistics.median(rank) for rank in zip(*usual)]
        more = [row[1] - normal[1] for row in late]
        found[name] = {
            "found": sum(abs(one - 0.05) < NEAR for one in more),
            "of": args.runs,
            "more_ms": [round(one * 1e3, 2) for one in more],
            "usual_ms": normal[1] * 1e3,
        }
        if phase != "communication":  # all ranks of a collective wait for the link
            found[name]["called the slowest rank and phase"] = named
            others = [row[0] - normal[0] for row in late]
            found[name]["found on rank 0"] = sum(abs(one) > NEAR for one in others)
        cause.engine.destroy()
    return found


CAUSES = {"loader": "data", "rank": "backward", "link": "communication", "disk": "offload"}
PARTS = {"sums": sums, "cost": cost, "causes": causes}


def work(args):
    import torch

    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    world = int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed(dist_backend="gloo" if args.device == "cpu" else None)
    found = {}
    for name in args.part.split(","):
        if name == "causes" and world != 2:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[name] = PARTS[name](args, world, folder)
            together(None)  # nobody uses the folder any more
    if int(os.environ["RANK"]) == 0:
        machine.write_json(args.json, "observe", found, threads_per_rank=torch.get_num_threads())
    together(None)


def misses(figures, limit_of_sums):
    """Sentences about the figures that miss their targets."""
    for world, found in figures.items():
        for name, case in found.get("sums", {}).items():
            if abs(case["phases / wall"] - 1) > limit_of_sums:
                yield f"{world}: phases of {name} are {case['phases / wall']:.4f} of the wall time"
        if "cost" in found:
            cost = found["cost"]
            for figure, value, limit in (
                ("the step log", cost["step log"]["share"], 0.005),
                ("a trace", cost["trace"]["share"], 0.05),
                ("a trace, in turn", cost["trace"]["trace / everything, in turn"] - 1, 0.05),
                ("everything, in turn", cost["everything / nothing, in turn"] - 1, 0.02),
            ):
                if value > limit:
                    yield f"{world}: {figure} costs {value:.2%} of a step, more than {limit:.1%}"
        for name, case in found.get("causes", {}).items():
            least = min(case["found"], case.get("called the slowest rank and phase", case["of"]))
            if least < case["of"] or case.get("found on rank 0"):
                yield f"{world}: the late {name} was found in {least} of {case['of']} steps"


def main():
    args = parse_arguments()
    os.environ["DS_ACCELERATOR"] = args.device
    if args.worker:
        work(args)
        return 0
    figures, result = {}, None
    options = ("device", "part", "steps", "runs", "rounds", "block", "rows")
    with tempfile.TemporaryDirectory() as folder:
        if "causes" in args.part:
            from injected_delays import build_late_reads

            library = build_late_reads(folder)
            if library is None:
                sys.exit("observe.py needs a C compiler (cc) for reads that are late")
            os.environ["LD_PRELOAD"] = library
        for world in map(int, args.ranks.split(",")):
            threads = max(1, len(os.sched_getaffinity(0)) // world)
            result = ranks.measure(__file__, args, options, world, threads=threads)
            figures[f"{world} ranks" if world > 1 else "1 rank"] = result["figures"]
        os.environ.pop("LD_PRELOAD", None)
    limit_of_sums = 0.01 if args.device == "cpu" else 0.03
    result["figures"] = {**figures, "missed": list(misses(figures, limit_of_sums))}
    ranks.show(result, args.json)
    return 1 if result["figures"]["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
