"""Step time of a GPT on several ranks: our engine, at each ZeRO stage, against a loop written by hand.

    python benchmarks/python/step_time.py [--python PATH] [--ranks 2] [--stages 0,1,2,3] [--model 10m] [--json FILE]

The hand-written loop is torch's DistributedDataParallel with torch.optim.AdamW (default, foreach and, on torch 2.x,
fused). All run in the same processes, on the same data, in interleaved blocks of steps, so that whatever else the
machine is doing meets all of them alike; the ratio is the median over the rounds of (ours / theirs).
The floor beside them is forward and backward alone, without any communication or update: what no engine can go below.
``--python`` names the interpreter of any environment with a ``deepspeed`` to measure that one.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time

from common import ranks

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


OPTIONS = (
    "ranks",
    "device",
    "dtype",
    "rounds",
    "block",
    "rows",
    "accumulation",
    "clip",
    "stages",
    "model",
    "zero",
)
MODELS = {
    "10m": {},
    "100m": {"layers": 12, "heads": 12, "width": 768, "vocab_size": 16384},
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the deepspeed to measure")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=4, help="timed steps of each contender in a round")
    parser.add_argument("--rows", type=int, default=4, help="sequences of 128 tokens for each rank")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0, help="gradient clipping, in all contenders; 0: none")
    parser.add_argument("--stages", default="0,1,2,3", help="ZeRO stages of our engine, one contender each")
    parser.add_argument("--model", choices=sorted(MODELS), default="10m", help="size: the quickstart's model, or 100m")
    parser.add_argument("--zero", default="{}", metavar="JSON", help="more keys of zero_optimization")
    parser.add_argument("--threads", type=int, help="compute threads of each rank; default: cores / ranks")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(args):
    """Starts the ranks with plain environment variables: any deepspeed can join them. Returns rank 0's figures."""
    threads = args.threads or max(1, len(os.sched_getaffinity(0)) // args.ranks)
    return ranks.measure(__file__, args, OPTIONS, args.ranks, threads, args.python)


class Ours:
    """The loop of the quickstart."""

    def __init__(self, args, stage, model, deepspeed, parameter_groups):
        config = {
            "train_micro_batch_size_per_gpu": args.rows,
            "gradient_accumulation_steps": args.accumulation,
            "gradient_clipping": args.clip,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage, **json.loads(args.zero)},
            "bf16": {"enabled": args.dtype == "bf16"},
        }
        self.engine = deepspeed.initialize(model=model, model_parameters=parameter_groups(model, 0.1), config=config)[0]

    def step(self, batches):
        for x, y in batches:
            loss = self.engine(x, y)
            self.engine.backward(loss)
            self.engine.step()
        return loss


class ByHand:
    """The same training without this library: DistributedDataParallel and AdamW."""

    def __init__(self, args, model, parameter_groups, torch, **kind):
        self.torch = torch
        self.clip = args.clip
        self.accumulation = args.accumulation
        self.model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95), **kind)

    def step(self, batches):
        for x, y in batches[:-1]:
            with self.model.no_sync():
                (self.model(x, y) / self.accumulation).backward()
        x, y = batches[-1]
        loss = self.model(x, y)
        (loss / self.accumulation).backward()
        if self.clip:
            self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


class Floor:
    """Forward and backward of ranks that know nothing of each other."""

    def __init__(self, model):
        self.model = model

    def step(self, batches):
        for x, y in batches:
            loss = self.model(x, y)
            loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss


def work(args):
    """One rank: builds the contenders, lets them take turns, and, as rank 0, writes what it measured."""
    sys.path[:0] = [os.path.join(ROOT, "examples", "quickstart"), HERE]
    import copy

    import torch

    import deepspeed
    from common import machine
    from model import GPT, Shape, parameter_groups

    getattr(deepspeed, "logger", logging.getLogger()).setLevel(logging.WARNING)
    rank = int(os.environ["RANK"])
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    deepspeed.init_distributed(dist_backend="nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(0)
    shape = Shape(**MODELS[args.model])
    model = GPT(shape).to(device)
    torch_dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    kinds = {"AdamW": {}, "AdamW foreach": {"foreach": True}}
    if int(torch.__version__.split(".")[0]) >= 2:
        kinds["AdamW fused"] = {"fused": True}
    stages = [int(stage) for stage in args.stages.split(",")]
    contenders = {
        f"stage {stage}": Ours(args, stage, copy.deepcopy(model), deepspeed, parameter_groups) for stage in stages
    }
    for name, kind in kinds.items():
        contenders["DDP + " + name] = ByHand(
            args, copy.deepcopy(model).to(torch_dtype), parameter_groups, torch, **kind
        )

    contenders["floor"] = Floor(copy.deepcopy(model).to(torch_dtype))
    random = torch.Generator().manual_seed(rank)

    def batches():
        for _ in range(args.accumulation):
            rows = torch.randint(0, shape.vocab_size, (args.rows, shape.context + 1), generator=random).to(device)
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def timed_block(contender, steps):
        data = [list(batches()) for _ in range(steps)]
        torch.distributed.barrier()
        if args.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for step in data:
            contender.step(step)
        if args.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    for contender in contenders.values():
        timed_block(contender, 3)
    times = {name: [] for name in contenders}
    order = list(contenders)
    for round_number in range(args.rounds):
        turn = round_number % len(order)
        for name in order[turn:] + order[:turn]:
            times[name].append(timed_block(contenders[name], args.block))
    if rank == 0:
        figures = {"step_s": {}, "ratio": {}}
        figures["parameters"] = sum(p.numel() for p in model.parameters())
        for name, values in times.items():
            figures["step_s"][name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            if name.startswith("DDP"):
                figures["ratio"][name] = {
                    one: statistics.median(a / b for a, b in zip(times[one], values))
                    for one in (*(f"stage {stage}" for stage in stages), "floor")
                }
        setting = {
            k: getattr(args, k)
            for k in ("ranks", "device", "dtype", "rows", "accumulation", "clip", "model", "zero", "rounds", "block")
        }
        figures["setting"] = setting
        conditions = {
            "deepspeed": deepspeed.__version__,
            "threads_per_rank": torch.get_num_threads(),
            "blas": machine.blas_libraries(),
        }
        machine.write_json(args.json, "step_time", figures, **conditions)
    torch.distributed.barrier()


def show(result):
    figures, about = result["figures"], result["machine"]
    setting = figures["setting"]
    print(
        f"step time of a GPT of {figures['parameters'] / 1e6:.0f}M parameters, {setting['ranks']} ranks, "
        f"{setting['rows']} x 128 tokens each, accumulation {setting['accumulation']}, {setting['dtype']}, "
        f"{about['threads_per_rank']} threads a rank, torch {about['torch']}, {about['cpu']}"
    )
    for name, t in figures["step_s"].items():
        print(f"  {name:22s} {t['median'] * 1e3:8.1f} ms median {t['min'] * 1e3:8.1f} best")
    for name, ratios in figures["ratio"].items():
        print(f"  ours / {name}: " + ", ".join(f"{stage} {ratio:.3f}" for stage, ratio in ratios.items()))


def main():
    args = parse_arguments()
    if args.worker:
        work(args)
        return
    result = launch(args)
    show(result)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
