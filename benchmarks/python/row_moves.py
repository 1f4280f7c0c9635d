"""The speed at which rows of tokens move to experts and back, beside a copy of as many bytes on the same device.

    python benchmarks/python/row_moves.py [--device cpu|cuda] [--tokens 65536] [--rounds 20] [--json FILE]

``dispatch`` reads and writes a row for each of a token's ``k`` assignments, in random order; ``combine`` writes for
each token the sum of its ``k`` rows. A share is the bytes that are read and written in a second, over those of
``Tensor.copy_`` with as many bytes as the rows have, which is the limit: medians of the rounds, in which they take
turns, each CALLS times. Before it is timed each result is compared with torch's indexing.
"""

import argparse
import json
import statistics
import time

CALLS = 10  # the host sends the next call while the device has work
CASES = [("bf16", 1024, 1), ("bf16", 4096, 1), ("bf16", 4096, 2), ("fp32", 1024, 2), ("bf16", 1000, 2)]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, choices=(1,), default=1, help="this measures one device")
    parser.add_argument("--tokens", type=int, help="default: 65536 on a GPU, 4096 on the CPU")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    args.tokens = args.tokens or (65536 if args.device == "cuda" else 4096)
    return args


def seconds_of(call, device):
    import torch

    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - begin) / CALLS
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS / 1e3


def measure(args, dtype, width, k):
    import torch

    from deepspeed.ops.token_rows import ops, positions_of

    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    torch.manual_seed(0)
    tokens = torch.randn(args.tokens, width, device=args.device).to(kind)
    sources = torch.randperm(args.tokens * k, device=args.device).int()
    slots = positions_of(sources, args.tokens * k).view(args.tokens, k)
    rows = ops().permute_rows(tokens, sources, divisor=k)
    assert torch.equal(rows, tokens[sources.long() // k]), "dispatch is wrong"
    sums = rows[slots.long()].float().sum(1)
    assert torch.allclose(ops().combine_rows(rows, slots).float(), sums, rtol=1e-2, atol=1e-2), "combine is wrong"

    size = tokens.numel() * tokens.element_size()
    moved = {"dispatch": 2 * k * size, "combine": (k + 1) * size, "copy": 2 * k * size}
    into = torch.empty_like(rows)
    calls = {
        "dispatch": lambda: ops().permute_rows(tokens, sources, divisor=k),
        "combine": lambda: ops().combine_rows(rows, slots),
        "copy": lambda: into.copy_(rows),
    }
    times = {name: [] for name in calls}
    for turn in range(2 + args.rounds):
        for name, call in calls.items():
            taken = seconds_of(call, args.device)
            if turn >= 2:
                times[name].append(taken)
    rates = {name: moved[name] / statistics.median(times[name]) / 1e9 for name in calls}
    return {"gb_per_s": rates, **{name: rates[name] / rates["copy"] for name in ("dispatch", "combine")}}


def main():
    args = parse_arguments()
    from common import machine

    found = {f"{dtype} {width} wide, k={k}": measure(args, dtype, width, k) for dtype, width, k in CASES}
    print(json.dumps(found, indent=1))
    if args.json:
        machine.write_json(args.json, "row_moves", {"device": args.device, "tokens": args.tokens, "shares": found})


if __name__ == "__main__":
    main()
