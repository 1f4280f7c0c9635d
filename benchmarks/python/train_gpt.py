"""Step time and peak memory of bf16 GPTs: our engine at each ZeRO stage against plain torch.

    python benchmarks/python/train_gpt.py [--device cuda] [--models 125m,1.3b] [--stages 0,1,2,3] [--json FILE]

Every contender runs in processes of its own, so that a peak is its own; the contenders take turns for ``--rounds``
rounds. With ``--together`` they take turns in one process of each rank: ``--contenders masters,fsdp2,0,3,2+cpu`` names
them (common/contenders.py). The device is waited for once in a turn of ``--steps`` steps, and the time of the host, the
share of the peak of matrix products (MFU) and medians of the ratios to the first contender are printed, too. A peak is
then without the memory in which the other contenders rest. Plain torch is (a) bf16 weights with fp32 masters that a
fused AdamW updates and ``copy_`` casts back, the same arithmetic as ours, and (b) fp32 weights under bf16 autocast with
fused AdamW. All use ``scaled_dot_product_attention``. A run without an optimizer measures the activations. The
prediction for the peak is (2 + 2 + 12) bytes for each parameter, for weights, gradients and masters with moments
(``--grad-dtype fp32``: 2 + 4 + 12), plus those activations. On the CPU memory is the growth of the resident set.
"""

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from common import contenders  # noqa: E402  (the line above finds it)
from common.contenders import MODELS  # noqa: E402

MASTERS = "torch, bf16 + fp32 masters, fused AdamW"
AUTOCAST = "torch, fp32 under autocast, fused AdamW"
BARE = "no optimizer"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}; default: 125m,1.3b on a GPU, tiny on the CPU")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step on each rank")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--grad-dtype", choices=("bf16", "fp32"), default="bf16", help="of accumulated gradients")
    parser.add_argument("--together", action="store_true", help="all contenders in one process, in turns")
    parser.add_argument("--contenders", default="masters,fsdp2,0,1,2,3", help="of --together")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step, with --together")
    parser.add_argument("--compile", action="store_true", help="compiled models, with --together")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    return parser.parse_args()


def device_of(args):
    import torch

    if args.device == "cpu":
        return torch.device("cpu")
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def batch(args, shape, device):
    import torch

    random = torch.Generator().manual_seed(int(os.environ["RANK"]))
    rows = torch.randint(0, shape["vocab_size"], (args.rows, shape["context"] + 1), generator=random).to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def work(args):
    """One contender, one turn: prints a JSON line with its figures."""
    import psutil
    import torch

    device = device_of(args)
    size, name = args.contender.split("|")
    shape = MODELS[size]
    before = psutil.Process().memory_info().rss
    model = contenders.model_of(shape, device)
    numel = sum(p.numel() for p in model.parameters())
    kind = {BARE: "bare", MASTERS: "masters", AUTOCAST: "autocast"}.get(name) or name.split()[1]
    contender = contenders.make(kind, model, args.rows, grad_dtype=args.grad_dtype)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    x, y = batch(args, shape, device)

    def wait():
        if args.device == "cuda":
            torch.cuda.synchronize()

    for _ in range(5):
        contender.step(x, y)
    wait()
    reserved = torch.cuda.memory_reserved() if args.device == "cuda" else 0
    times = []
    for _ in range(args.steps):
        start = time.perf_counter()
        contender.step(x, y)
        wait()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else psutil.Process().memory_info().rss - before
    grown = torch.cuda.memory_reserved() - reserved if args.device == "cuda" else 0
    figures = {"step_s": statistics.median(times), "peak_bytes": peak, "reserved_growth_bytes": grown, "numel": numel}
    with open(os.environ["FIGURES"] + os.environ["RANK"], "w", encoding="utf-8") as file:
        json.dump(figures, file)


def turn(args, size, name):
    """Runs one contender on all ranks and returns the worst rank's figures, or a text that says why there are none."""
    figures = ranks(args, ["--contender", f"{size}|{name}"])
    if figures is None:
        return f"{name} failed on {size}; its message is above"
    return {key: max(one[key] for one in figures) for key in figures[0]}


def _free_port():
    """A port without a listener, which the system chooses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks(args, more):
    """The figures of each rank of this program; None where one has failed."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, os.path.abspath(__file__), *more]
        for option in ("device", "rows", "steps", "rounds", "grad-dtype", "accumulation", "contenders"):
            command += [f"--{option}", str(getattr(args, option.replace("-", "_")))]
        command += ["--compile"] * args.compile
        processes, port = [], _free_port()
        for rank in range(args.ranks):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.ranks, "LOCAL_SIZE": args.ranks}
            world.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, FIGURES=os.path.join(scratch, "rank"))
            env = dict(os.environ, **{key: str(value) for key, value in world.items()})
            processes.append(subprocess.Popen(command, env=env))
        if any([process.wait() for process in processes]):
            return None
        figures = []
        for rank in range(args.ranks):
            with open(os.path.join(scratch, f"rank{rank}"), encoding="utf-8") as file:
                figures.append(json.load(file))
        return figures


def measure(args, size):
    names = [BARE, MASTERS, AUTOCAST] + [f"stage {stage}" for stage in args.stages.split(",")]
    found = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            result = turn(args, size, name)
            if isinstance(result, str):
                sys.exit(result)
            found[name].append(result)
    figures = {"numel": found[BARE][0]["numel"], "contenders": {}}
    numel = figures["numel"]
    activations = max(0, found[BARE][0]["peak_bytes"] - 4 * numel)  # beside its bf16 weights and gradients
    predicted = (2 + (2 if args.grad_dtype == "bf16" else 4) + 12) * numel + activations
    figures.update(activation_bytes=activations, predicted_bytes=predicted)
    for name in names:
        ratios = [ours["step_s"] / theirs["step_s"] for ours, theirs in zip(found[name], found[MASTERS])]
        figures["contenders"][name] = {
            "step_s": statistics.median(one["step_s"] for one in found[name]),
            "ratio_to_masters": statistics.median(ratios),
            "peak_bytes": max(one["peak_bytes"] for one in found[name]),
            "reserved_growth_bytes": max(one["reserved_growth_bytes"] for one in found[name]),
        }
    print(
        f"GPT of {numel / 1e6:.0f}M, {args.rows} x {MODELS[size]['context']} tokens, {args.ranks} rank(s) on "
        f"{args.device}: predicted peak {predicted / 2**30:.2f} GiB, of which activations {activations / 2**30:.2f}"
    )
    for name, one in figures["contenders"].items():
        print(
            f"  {name:40s} {one['step_s'] * 1e3:9.1f} ms  {one['ratio_to_masters']:.3f} x  peak "
            f"{one['peak_bytes'] / 2**30:7.2f} GiB"
        )
    return figures


# ---- all contenders in one process -----------------------------------------------------------------------------------
class Together:
    """A contender that shares its process and its device with others."""

    def __init__(self, args, name, size, device):
        self.args, self.device, self.turns = args, device, []
        before = self.allocated()
        model = contenders.model_of(MODELS[size], device)
        self.numel = sum(one.numel() for one in model.parameters())
        self.loop = contenders.make(name, model, args.rows, args.accumulation, args.grad_dtype, args.compile)
        del model
        self.x, self.y = batch(args, MODELS[size], device)
        for _ in range(3):
            self.loop.step(self.x, self.y)
        self.wait()
        gc.collect()
        self.rests = self.allocated() - before

    def allocated(self):
        if self.device.type == "cuda":
            import torch

            return torch.cuda.memory_allocated()
        return 0

    def wait(self):
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def turn(self):
        """Some steps, with one wait for the device."""
        import torch

        cuda = self.device.type == "cuda"
        others = self.allocated() - self.rests
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        self.wait()
        begin, host = time.perf_counter(), time.process_time()
        for _ in range(self.args.steps):
            self.loop.step(self.x, self.y)
        launched = time.perf_counter() - begin
        host = time.process_time() - host
        self.wait()
        took = time.perf_counter() - begin
        self.rests = self.allocated() - others
        peak = torch.cuda.max_memory_allocated() - others if cuda else 0
        steps = self.args.steps
        self.turns.append(
            {"step_ms": took / steps * 1e3, "host_ms": host / steps * 1e3, "launched_ms": launched / steps * 1e3,
             "peak_bytes": peak}
        )  # fmt: skip


def work_together(args, size):
    """The work of a rank: ``{contender: figures}``."""
    import torch

    import deepspeed
    from deepspeed.profiling.peak import peak_flops

    device, names, made, left_out = device_of(args), args.contenders.split(","), {}, {}
    deepspeed.logger.setLevel("WARNING")
    deepspeed.init_distributed()
    for name in names:
        if why := contenders.lacks(name):
            left_out[name] = why
        else:
            made[name] = Together(args, name, size, device)
    for _ in range(args.rounds):
        for one in made.values():
            one.turn()
    peak = peak_flops(device, torch.bfloat16)
    shape, found = MODELS[size], {}
    first = next(iter(made.values()))
    tokens = args.rows * args.accumulation * shape["context"]
    flops = tokens * (6 * first.numel + 12 * shape["layers"] * shape["width"] * shape["context"])
    for name, one in made.items():
        turns = one.turns
        found[name] = {key: statistics.median(each[key] for each in turns) for key in turns[0]}
        found[name]["mfu"] = flops / (found[name]["step_ms"] / 1e3) / peak
        found[name]["ratio"] = statistics.median(
            ours["step_ms"] / theirs["step_ms"] for ours, theirs in zip(turns, first.turns)
        )
    for one in made.values():
        one.loop.end()
    figures = {"numel": first.numel, "contenders": found, "left_out": left_out}
    with open(os.environ["FIGURES"] + os.environ["RANK"], "w", encoding="utf-8") as file:
        json.dump(figures, file)


def measure_together(args, size):
    """Figures of rank 0, printed."""
    figures = ranks(args, ["--together", "--contender", size])
    if figures is None:
        sys.exit(f"a contender failed on {size}; its message is above")
    made = figures[0]
    rows = f"{args.rows} x {MODELS[size]['context']} tokens" + f" x {args.accumulation}" * (args.accumulation > 1)
    compiled = ", compiled" if args.compile else ""
    print(f"GPT of {made['numel'] / 1e6:.0f}M, {rows}, {args.ranks} rank(s) on {args.device}{compiled}")
    for name, why in made["left_out"].items():
        print(f"  {name} is left out: {why}")
    print(f"  {'':10s} {'step ms':>10s} {'host ms':>10s} {'launched':>10s} {'peak GiB':>10s} {'MFU':>8s} {'ratio':>8s}")
    for name, one in made["contenders"].items():
        print(
            f"  {name:10s} {one['step_ms']:10.2f} {one['host_ms']:10.2f} {one['launched_ms']:10.2f} "
            f"{one['peak_bytes'] / 2**30:10.2f} {one['mfu']:8.1%} {one['ratio']:8.3f}"
        )
    return made


def main():
    args = parse_arguments()
    if args.contender:
        work_together(args, args.contender) if args.together else work(args)
        return
    models = (args.models or ("125m,1.3b" if args.device == "cuda" else "tiny")).split(",")
    if args.together:
        figures = {size: measure_together(args, size) for size in models}
    else:
        figures = {size: measure(args, size) for size in models}
    if args.json:
        from common import machine

        given = ("device", "ranks", "rows", "steps", "rounds", "grad_dtype", "together", "accumulation", "compile")
        setting = {key: getattr(args, key) for key in given}
        machine.write_json(args.json, "train_gpt", {"models": figures, "setting": setting})


if __name__ == "__main__":
    main()
