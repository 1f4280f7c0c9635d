"""Memory of building a model inside ``zero.Init``.

    python benchmarks/python/zero_init.py [--ranks 4] [--layers 12] [--width 1664] [--json FILE]

Every rank builds a GPT of about 400 million fp32 parameters layer by layer; what is printed is the growth of the
rank's peak memory while it does, beside the bound: a quarter of the model (its share on four ranks), its largest layer,
and 200 MB. ``--plain`` builds it without the context, for comparison.
"""

import json
import os
import sys
import time

from common import built_model, ranks
from common.memory import Peak, private_bytes

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def work(args):
    sys.path[:0] = [os.path.join(ROOT, "examples", "quickstart"), HERE]
    import contextlib
    import ctypes

    import torch

    import deepspeed
    from model import GPT, Shape

    deepspeed.logger.setLevel("WARNING")
    deepspeed.init_distributed(dist_backend="gloo")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # an engine leaves malloc as it is
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # big tensors go back to the system when they are freed
    shape = Shape(layers=args.layers, heads=13, width=args.width, vocab_size=4096)
    with deepspeed.zero.Init():  # what is imported and allocated once
        torch.nn.Linear(2048, 512)
    torch.distributed.barrier()
    before = private_bytes()
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    with contextlib.nullcontext() if args.plain else deepspeed.zero.Init():
        model = GPT(shape)
    seconds = time.perf_counter() - start
    peak.stop = True
    peak.join()
    numels = [getattr(p, "ds_numel", p.numel()) for p in model.parameters()]
    figures = torch.tensor([peak.highest - before, private_bytes() - before], dtype=torch.float64)
    torch.distributed.all_reduce(figures, op=torch.distributed.ReduceOp.MAX)
    if int(os.environ["RANK"]) == 0:
        numel = sum(numels)
        largest = max(numels)
        found = {
            "parameters": numel,
            "ranks": args.ranks,
            "peak_growth_bytes": figures[0].item(),
            "held_bytes": figures[1].item(),
            "bound_bytes": 4 * numel / args.ranks + 4 * largest + 200e6,
            "model_bytes": 4 * numel,
            "seconds": seconds,
            "init": not args.plain,
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file)
    torch.distributed.barrier()


def main():
    args = built_model.parse_arguments(__doc__, "zero.Init")
    if args.worker:
        work(args)
        return
    found = ranks.measure(__file__, args, built_model.OPTIONS, args.ranks)
    print(
        f"{found['parameters'] / 1e6:.0f}M fp32 parameters on {found['ranks']} ranks, "
        f"{'inside zero.Init' if found['init'] else 'plain'}: "
        f"peak growth of a rank {found['peak_growth_bytes'] / 1e6:.0f} MB, "
        f"held {found['held_bytes'] / 1e6:.0f} MB; model {found['model_bytes'] / 1e6:.0f} MB, "
        f"bound {found['bound_bytes'] / 1e6:.0f} MB; {found['seconds']:.1f} s"
    )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
