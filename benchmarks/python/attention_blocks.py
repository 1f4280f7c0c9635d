"""Blocks of attention by the kernels of csrc/kernels/attention.h and by torch's operations, in one run, on the CPU.

    python benchmarks/python/attention_blocks.py [--threads 2] [--rounds 7] [--json FILE]

``see``: queries see a block of keys, the first of two and the second; ``gradients``: of one block. Both forms take
turns; what is reported are the best times, and their ratio. Each is checked before it is timed.
"""

import argparse
import json
import time

# heads, key/value heads, tokens, size
CASES = [(4, 4, 17, 8), (8, 8, 64, 64), (8, 2, 256, 64), (8, 8, 512, 64), (4, 4, 1024, 128), (2, 1, 2048, 64)]
MASKS = ("none", "causal", "looks")  # looks: a tenth of the pairs are masked, at random


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def once(torch, blocks, tensors, causal, looks):
    """Seconds of both directions, and what they give."""
    query, key, value, grad = tensors
    rows = blocks.Rows(query, key.shape[1], blocks.ScoreRules(0.125))
    start = time.perf_counter()
    for _ in range(2):
        rows.see(key, value, causal, looks=looks)
    see = (time.perf_counter() - start) / 2
    output, lse = rows.result()
    row_sum = (grad.float() * output.float()).sum(-1, keepdim=True)
    start = time.perf_counter()
    found = blocks.block_gradients(query, key, value, grad, row_sum, lse, blocks.ScoreRules(0.125), causal, looks=looks)
    return (see, time.perf_counter() - start), (lse, *found)


def main():
    args = parse_arguments()
    import torch

    from deepspeed.ops.attention import blocks

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    forms, found = {"torch": lambda *_: False, "kernel": blocks.on_host}, []
    for dtype in (torch.float32, torch.bfloat16):
        for heads, kv, tokens, size in CASES:
            tensors = [torch.randn(1, n, tokens, size).to(dtype) for n in (heads, kv, kv, heads)]
            for mask in MASKS:
                looks = torch.rand(1, 1, tokens, tokens) > 0.1 if mask == "looks" else None
                best, results = {}, {}
                for _ in range(args.rounds):
                    for name, form in forms.items():
                        blocks.on_host = form
                        took, results[name] = once(torch, blocks, tensors, mask == "causal", looks)
                        best[name] = [min(pair) for pair in zip(best.get(name, took), took)]
                for one, other in zip(results["torch"], results["kernel"]):
                    # 16-bit outputs may be rounded to neighbours, and their products with the gradient differ by that
                    gap = 1e-5 if dtype == torch.float32 else 1e-2
                    assert float((one - other).abs().max()) <= gap * float(one.abs().max())
                ratio = [a / b for a, b in zip(best["torch"], best["kernel"])]
                case = {"dtype": str(dtype), "heads": [heads, kv], "tokens": tokens, "size": size, "mask": mask}
                found.append({**case, "seconds": best, "torch_over_kernel": ratio})
                print(
                    f"{str(dtype)[6:]:8} {heads}/{kv} heads of {size:3}, {tokens:4} tokens, mask {mask:6}   see "
                    f"{best['torch'][0] * 1e3:8.3f} ms by torch {best['kernel'][0] * 1e3:8.3f} by kernel "
                    f"({ratio[0]:5.2f} x)   gradients {best['torch'][1] * 1e3:8.3f} {best['kernel'][1] * 1e3:8.3f} "
                    f"({ratio[1]:5.2f} x)",
                    flush=True,
                )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "threads": args.threads, "cases": found}, file, indent=1)


if __name__ == "__main__":
    main()
