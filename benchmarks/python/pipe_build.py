"""Memory of building a pipeline of ``LayerSpec``s: every rank builds the layers of its own stage only.

    python benchmarks/python/pipe_build.py [--ranks 4] [--layers 12] [--width 1664] [--plain] [--json FILE]

The peaks of all ranks' resident memory (VmHWM, with Python, torch and all libraries, whose pages each rank counts) are
added up while a GPT of about 400 million fp32 parameters is built; beside the sum the bound: 1.1 times the model and
200 MB a rank.
``--plain`` gives the pipeline modules that are built already, on every rank, for comparison.
"""

import os
import sys

from common import built_model, ranks

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def resident(what):
    """Bytes of this process: VmRSS, or VmHWM, the most since clear_refs was written."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(what))


def work(args):
    sys.path[:0] = [os.path.join(ROOT, "examples", "quickstart"), HERE]
    import torch

    import deepspeed
    from common import machine
    from common.memory import private_bytes
    from deepspeed.pipe import LayerSpec, PipelineModule
    from model import Block, Shape

    deepspeed.logger.setLevel("WARNING")
    deepspeed.init_distributed(dist_backend="gloo")
    shape = Shape(layers=args.layers, heads=13, width=args.width, vocab_size=4096)
    torch.distributed.barrier()
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    layers = [Block(shape) if args.plain else LayerSpec(Block, shape) for _ in range(args.layers)]
    module = PipelineModule(layers, num_stages=args.ranks, partition_method="uniform")
    own = sum(one.numel() for one in module.parameters())
    peak = resident("VmHWM")
    torch.distributed.barrier()
    figures = torch.tensor([peak, before, own, private_bytes()], dtype=torch.float64)
    torch.distributed.all_reduce(figures)
    if int(os.environ["RANK"]) == 0:
        peak, started, parameters, once = figures.tolist()
        machine.write_json(
            args.json,
            "pipe_build",
            {
                "ranks": args.ranks,
                "parameters": int(parameters),
                "model_mb": 4 * parameters / 2**20,
                "peak_mb": peak / 2**20,
                "before_the_model_mb": started / 2**20,
                "afterwards_shared_pages_once_mb": once / 2**20,
                "bound_mb": 1.1 * 4 * parameters / 2**20 + 200 * args.ranks,
                "layer_specs": not args.plain,
            },
        )
    torch.distributed.barrier()


def main():
    args = built_model.parse_arguments(__doc__, "LayerSpec")
    ranks.run(__file__, args, work, built_model.OPTIONS, args.ranks)


if __name__ == "__main__":
    main()
