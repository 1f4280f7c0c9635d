"""Memory of a save: by how much a rank grows while it writes a checkpoint of states that rest in files, on the host or
on the device.

    python benchmarks/python/checkpoint_offloaded.py [--width 1024] [--layers 32] [--stage 2] [--ranks 2] [--dir DIR]
        [--json FILE]

A stack of ``--layers`` linear layers of ``--width`` squared bf16 parameters makes one step with AdamW and is saved;
12 bytes of each element of a rank are masters and states. What is printed by place: the bytes that rank 0 has written,
the growth of its private memory (the most while it saves, less what it was before; samples of a few milliseconds), and
seconds. A save that streams grows by some rows of a bucket (a sixteenth of the model, or reduce_bucket_size where that
is less) and the writer's buffers; states that rest in memory are put into the saved layout there at stages 1 and 2.
"""

import argparse
import ctypes
import gc
import os
import shutil
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import machine, ranks  # noqa: E402  (the line above finds it from any directory)
from common.memory import Peak, private_bytes  # noqa: E402

PLACES = ("none", "cpu", "nvme")
OPTIONS = ("width", "layers", "stage", "dir", "place")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dir", default="/var/tmp", help="where files of states and checkpoints go")
    parser.add_argument("--place", choices=PLACES, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def written_by_rank(folder, rank):
    """Bytes of the files of a checkpoint that are this rank's."""
    found = 0
    for root, _, names in os.walk(folder):
        found += sum(os.path.getsize(os.path.join(root, name)) for name in names if f"zero_pp_rank_{rank}_" in name)
    return found


def work(args):
    import torch

    import deepspeed

    deepspeed.logger.setLevel("WARNING")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # an engine leaves malloc as it is
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # big tensors go back to the system when they are freed
    deepspeed.init_distributed(dist_backend="gloo")
    offload = {"device": args.place, "nvme_path": args.dir} if args.place != "none" else {"device": "none"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": args.stage, "offload_optimizer": offload},
    }
    layers = [torch.nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)]
    engine = deepspeed.initialize(model=torch.nn.Sequential(*layers), config=config)[0]
    del layers
    x = torch.ones(1, args.width, dtype=torch.bfloat16)
    engine.backward(engine(x).float().square().mean())
    engine.step()
    found = {}
    folder = os.path.join(args.dir, f"checkpoint_offloaded_{os.environ['MASTER_PORT']}")  # the same of all ranks
    try:
        for save in ("first", "second"):  # what a first one makes stays
            gc.collect()
            torch.distributed.barrier()
            before, peak = private_bytes(), Peak()
            peak.start()
            began = time.perf_counter()
            engine.save_checkpoint(folder, tag=save)
            seconds = time.perf_counter() - began
            peak.stop = True
            peak.join()
            found[save] = {
                "bytes of rank 0": written_by_rank(os.path.join(folder, save), 0),
                "growth in bytes": peak.highest - before,
                "seconds": round(seconds, 3),
            }
    finally:
        torch.distributed.barrier()
        if engine.global_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    engine.destroy()
    return found


def main():
    args = parse_arguments()
    if args.worker:
        found = work(args)
        if os.environ["RANK"] == "0":
            machine.write_json(args.json, "checkpoint_offloaded", found)
        return
    results = {}
    for place in PLACES:
        args.place = place
        results[place] = ranks.measure(__file__, args, OPTIONS, args.ranks)["figures"]
    conditions = {name: getattr(args, name) for name in ("width", "layers", "stage", "ranks", "dir")}
    made = {"name": "checkpoint_offloaded", "machine": {**machine.describe(), **conditions}, "figures": results}
    ranks.show(made, args.json)


if __name__ == "__main__":
    main()
