"""Step time and peak memory of bf16 GPTs: our engine at each ZeRO stage against plain torch.

    python benchmarks/python/train_gpt.py [--device cuda] [--models 125m,1.3b] [--stages 0,1,2,3] [--json FILE]

Every contender runs in processes of its own, so that a peak is its own; the contenders take turns for ``--rounds``
rounds. Plain torch is (a) bf16 weights with fp32 masters that a fused AdamW updates and ``copy_`` casts back, the same
arithmetic as ours, and (b) fp32 weights under bf16 autocast with fused AdamW. All use
``scaled_dot_product_attention``. A run without an optimizer measures the activations. The prediction for the peak is
(2 + 2 + 12) bytes for each parameter, for weights, gradients and masters with moments (``--grad-dtype fp32``: 2 + 4 +
12), plus those activations. On the CPU memory is the growth of the resident set.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

MODELS = {
    "tiny": {"layers": 2, "heads": 4, "width": 128, "vocab_size": 1024, "context": 128},
    "125m": {"layers": 12, "heads": 12, "width": 768, "vocab_size": 50304, "context": 1024},
    "1.3b": {"layers": 24, "heads": 16, "width": 2048, "vocab_size": 50304, "context": 1024},
}
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
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    return parser.parse_args()


class Ours:
    def __init__(self, args, stage, model):
        import deepspeed

        deepspeed.logger.setLevel("WARNING")
        config = {
            "train_micro_batch_size_per_gpu": args.rows,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": args.grad_dtype},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage},
        }
        self.engine = deepspeed.initialize(model=model, config=config)[0]

    def step(self, x, y):
        self.engine.backward(self.engine(x, y))
        self.engine.step()


class Plain:
    """bf16 weights with fp32 masters, or fp32 weights under autocast."""

    def __init__(self, model, masters):
        import torch

        self.torch = torch
        self.model = model.bfloat16() if masters else model
        self.params = list(self.model.parameters())
        self.masters = [p.detach().float().clone() for p in self.params] if masters else None
        fused = {"fused": True} if int(torch.__version__.split(".")[0]) >= 2 else {}
        self.optimizer = torch.optim.AdamW(self.masters or self.params, lr=1e-4, weight_decay=0.1, **fused)

    def step(self, x, y):
        torch = self.torch
        if self.masters is None:
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                loss = self.model(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.params, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return
        self.model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for master, param in zip(self.masters, self.params):
            master.grad = param.grad.float()
            param.grad = None
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters) if hasattr(torch, "_foreach_copy_") else [
                p.copy_(m) for p, m in zip(self.params, self.masters)
            ]
        self.optimizer.zero_grad(set_to_none=True)


class Bare:
    def __init__(self, model):
        self.model = model.bfloat16()

    def step(self, x, y):
        self.model(x, y).backward()
        for param in self.model.parameters():
            param.grad = None


def work(args):
    """One contender, one turn: prints a JSON line with its figures."""
    sys.path[:0] = [os.path.join(ROOT, "examples", "quickstart"), HERE]
    import psutil
    import torch

    from model import GPT, Shape

    device = torch.device(args.device, int(os.environ["LOCAL_RANK"])) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    size, name = args.contender.split("|")
    torch.manual_seed(0)
    shape = Shape(**MODELS[size])
    before = psutil.Process().memory_info().rss
    model = GPT(shape).to(device)
    numel = sum(p.numel() for p in model.parameters())
    if name.startswith("stage "):
        model = model.bfloat16()
        contender = Ours(args, int(name.split()[1]), model)
    else:
        contender = Bare(model) if name == BARE else Plain(model, name == MASTERS)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    random = torch.Generator().manual_seed(int(os.environ["RANK"]))
    rows = torch.randint(0, shape.vocab_size, (args.rows, shape.context + 1), generator=random).to(device)
    x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

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


def turn(args, size, name, port):
    """Runs one contender on all ranks and returns the worst rank's figures, or a text that says why there are none."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, os.path.abspath(__file__), "--contender", f"{size}|{name}"]
        for option in ("device", "rows", "steps", "grad-dtype"):
            command += [f"--{option}", str(getattr(args, option.replace("-", "_")))]
        ranks = []
        for rank in range(args.ranks):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.ranks, "LOCAL_SIZE": args.ranks}
            world.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, FIGURES=os.path.join(scratch, "rank"))
            env = dict(os.environ, **{key: str(value) for key, value in world.items()})
            ranks.append(subprocess.Popen(command, env=env))
        if any([process.wait() for process in ranks]):
            return f"{name} failed on {size}; its message is above"
        figures = []
        for rank in range(args.ranks):
            with open(os.path.join(scratch, f"rank{rank}"), encoding="utf-8") as file:
                figures.append(json.load(file))
        return {key: max(one[key] for one in figures) for key in figures[0]}


def measure(args, size):
    names = [BARE, MASTERS, AUTOCAST] + [f"stage {stage}" for stage in args.stages.split(",")]
    found = {name: [] for name in names}
    for round_number in range(args.rounds):
        for index, name in enumerate(names):
            result = turn(args, size, name, 29700 + (round_number * len(names) + index) % 200)
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


def main():
    args = parse_arguments()
    if args.contender:
        work(args)
        return
    models = (args.models or ("125m,1.3b" if args.device == "cuda" else "tiny")).split(",")
    figures = {size: measure(args, size) for size in models}
    if args.json:
        sys.path.insert(0, HERE)
        from common import machine

        setting = {key: getattr(args, key) for key in ("device", "ranks", "rows", "steps", "rounds", "grad_dtype")}
        machine.write_json(args.json, "train_gpt", {"models": figures, "setting": setting})


if __name__ == "__main__":
    main()
