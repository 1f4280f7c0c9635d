"""DeepSpeedCPUAdam against the memory's speed and against torch.optim.AdamW, on one large and on 1,024 small tensors.

    python benchmarks/python/cpu_adam.py [--numel 67108864] [--rounds 9] [--threads 1 2] [--json FILE]

The memory bound is a native kernel with Adam's loads and stores (4 and 3 of 4 bytes per element, in place) and one
multiply-add per store. All candidates take turns within each round, so that the machine's moods meet them alike; the
ratios are medians over the rounds of `time of the other / time of ours`. Exit code 1 when ours reaches less than
--limit of the memory bound on the one large tensor.
"""

import argparse
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch  # noqa: E402

from common import machine  # noqa: E402  (the line above finds it from any directory)
from deepspeed._native import _C  # noqa: E402
from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: E402

HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
BYTES_PER_ELEMENT = 28


def torch_variants():
    """name -> keyword arguments of torch.optim.AdamW; fused only where this torch has it for the CPU."""
    variants = {"torch_loop": {"foreach": False}, "torch_foreach": {"foreach": True}}
    probe = torch.nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    try:
        torch.optim.AdamW([probe], fused=True).step()
        variants["torch_fused"] = {"fused": True}
    except (TypeError, RuntimeError):
        pass
    return variants


def make_params(numel, count):
    params = [torch.nn.Parameter(torch.randn(numel // count)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn(p.shape) * 1e-3
    return params


def verify():
    """Ours equals torch's before anything is timed."""
    ours, theirs = make_params(100003, 1), make_params(100003, 1)
    theirs[0].data.copy_(ours[0].data)
    theirs[0].grad.copy_(ours[0].grad)
    first, second = DeepSpeedCPUAdam(ours, **HYPER), torch.optim.AdamW(theirs, **HYPER)
    for _ in range(3):
        first.step()
        second.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)


def measure(numel, count, threads, rounds):
    """Milliseconds of each candidate in each round: {name: [ms, ...]}."""
    torch.set_num_threads(threads)
    params = make_params(numel, count)
    # The candidates share parameters and gradients, and have moments of their own, as in training.
    candidates = {"ours": DeepSpeedCPUAdam(params, **HYPER).step}
    for name, options in torch_variants().items():
        candidates[name] = torch.optim.AdamW(params, **HYPER, **options).step
    kernel = _C.UpdateRunner("adam", "bound")
    grad, exp_avg, exp_avg_sq = (torch.zeros(numel) for _ in range(3))
    target = params[0].detach() if count == 1 else torch.zeros(numel)
    candidates["memory_bound"] = lambda: kernel.memory_bound(target, grad, [exp_avg, exp_avg_sq], threads)
    times = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, step in candidates.items():
            start = time.perf_counter()
            step()
            if turn:  # the first turn allocates states and touches their memory
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def summarize(times, numel):
    ours = times["ours"]
    median = statistics.median(ours)
    figures = {"ours_ms": median, "ours_GBps": numel * BYTES_PER_ELEMENT / median / 1e6}
    for name, values in times.items():
        if name != "ours":
            figures[f"{name}_ms"] = statistics.median(values)
            ratios = [other / own for other, own in zip(values, ours, strict=True)]
            figures[f"{name}_over_ours"] = statistics.median(ratios)
    figures["of_memory_bound"] = figures.pop("memory_bound_over_ours")
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count()}))
    parser.add_argument("--limit", type=float, default=0.9)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    verify()
    isa = _C.kernel_info("cpu")["isa"]
    print(f"Adam, {args.numel:,} fp32 elements, torch {torch.__version__}, kernels for {isa}")
    figures = {}
    for threads in args.threads:
        for label, count in (("one_tensor", 1), ("1024_tensors", 1024)):
            result = summarize(measure(args.numel, count, threads, args.rounds), args.numel)
            figures[f"{label}_{threads}_threads"] = result
            ratios = {key[:-10]: value for key, value in result.items() if key.endswith("_over_ours")}
            rivals = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
            print(
                f"{label:>13}, {threads} thread(s): {result['ours_ms']:.1f} ms, {result['ours_GBps']:.1f} GB/s, "
                f"{result['of_memory_bound']:.2f} of the memory bound; time of others over ours: {rivals}"
            )
    machine.write_json(args.json, "cpu_adam", {**figures, "isa": isa, "limit": args.limit}, numel=args.numel)
    missed = [k for k, v in figures.items() if k.startswith("one_tensor") and v["of_memory_bound"] < args.limit]
    if missed:
        sys.exit(f"less than {args.limit} of the memory bound: {', '.join(missed)}")


if __name__ == "__main__":
    main()
