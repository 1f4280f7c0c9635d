"""The cost of whole-parameter optimizers: Muon's orthogonalisation in two forms and in torch's words, LAMB beside
AdamW.

    python benchmarks/python/muon_lamb.py [--rounds 7] [--threads 1 2] [--device cpu] [--json FILE]

`gram` and `standard` are the two forms of the native iteration; `torch` is the standard form written with torch
operators in fp32, as published. LAMB and AdamW step 1,024 tensors of 16,384 elements. All candidates take turns within
each round; ratios are medians over the rounds of `time of the other / time of ours` (Muon: of `gram`; LAMB: of LAMB).
"""

import argparse
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch  # noqa: E402

from common import machine  # noqa: E402  (the line above finds it from any directory)
from deepspeed.ops.adam import FusedAdam  # noqa: E402
from deepspeed.ops.lamb import FusedLamb  # noqa: E402
from deepspeed.ops.muon import muon_update  # noqa: E402

SHAPES = [(512, 512), (512, 2048), (2048, 512), (256, 2560)]


def by_torch(grad, momentum):
    momentum.lerp_(grad, 0.05)
    x = torch.lerp(grad, momentum, 0.95)
    rows, columns = x.shape
    x = x.t() if rows > columns else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.t() if rows > columns else x
    return x * max(1, rows / columns) ** 0.5


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def in_turns(candidates, rounds, device):
    times = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, run in candidates.items():
            wait(device)
            start = time.perf_counter()
            run()
            wait(device)
            if turn:  # the first turn warms up
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def summarize(times, own):
    figures = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        if name != own:
            figures[f"{name}_over_{own}"] = statistics.median([a / b for a, b in zip(values, times[own], strict=True)])
    return figures


def measure_muon(shape, rounds, device):
    grad = torch.randn(shape, device=device)
    buffers = {name: torch.zeros_like(grad) for name in ("gram", "standard", "torch")}
    candidates = {
        name: lambda name=name: muon_update(grad, buffers[name], ns_method=name) for name in ("gram", "standard")
    }
    candidates["torch"] = lambda: by_torch(grad, buffers["torch"])
    found = {name: run() for name, run in candidates.items()}
    bound = 1e-3 if device == "cpu" else 0.1  # bf16 products on a GPU
    for name, value in found.items():
        gap = float((value - found["torch"]).norm() / found["torch"].norm())
        assert gap < bound, f"{name} differs from torch by {gap:.2g}"
    return summarize(in_turns(candidates, rounds, device), "gram")


def measure_lamb(rounds, device):
    params = [torch.nn.Parameter(torch.randn(16384, device=device)) for _ in range(1024)]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    candidates = {"lamb": FusedLamb(params, lr=1e-3).step, "adamw": FusedAdam(params, lr=1e-3).step}
    return summarize(in_turns(candidates, rounds, device), "lamb")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count()}))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    figures = {}
    for threads in args.threads if args.device == "cpu" else args.threads[:1]:
        torch.set_num_threads(threads)
        for shape in SHAPES:
            figures[f"muon_{shape[0]}x{shape[1]}_{threads}_threads"] = measure_muon(shape, args.rounds, args.device)
        figures[f"lamb_1024_tensors_{threads}_threads"] = measure_lamb(args.rounds, args.device)
    for title, values in figures.items():
        print(title + ": " + ", ".join(f"{key} {value:.3f}" for key, value in values.items()))
    if args.json:
        machine.write_json(args.json, "muon_lamb", figures, device=args.device)


if __name__ == "__main__":
    main()
