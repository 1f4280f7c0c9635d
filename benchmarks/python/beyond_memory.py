"""Training a model that is larger than the memory it is given: everything rests in files (ZeRO-Infinity). Exit code 1
where the plan and the peak are more than 10 % apart.

    python benchmarks/python/beyond_memory.py [--width 2048] [--layers 48] [--limit-gb 1.0] [--steps 3] [--folder DIR]
        [--plain] [--json FILE]

A stack of ``--layers`` linear layers of ``--width`` squared bf16 parameters is built inside ``zero.Init`` and trained
with AdamW in a memory cgroup of ``--limit-gb`` (or, where no cgroup can be made, under RLIMIT_DATA). Its parameters,
masters, gradients and states take 18 bytes each. What is printed: the peak of private memory beside the plan, which is
the memory before the model, and the buffers that the configuration allows; time per step; bytes per second to and from
the drive. ``--plain``: the same without offload, which the limit does not allow. ``--growth N``: N steps, and by how
much memory has grown after the first tenth of them.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import resource
import shutil
import sys
import tempfile
import time

from common.memory import Peak, private_bytes

ELEMENTS = 1 << 23  # of a bucket of the step and of a reduction


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--growth", type=int, default=0)
    parser.add_argument("--limit-gb", type=float, default=1.0, help="0: no limit")
    parser.add_argument("--folder", help="on the drive; default: a temporary one")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def limit(gigabytes):
    """Puts this process into a cgroup of so much memory; returns what does it."""
    wanted = int(gigabytes * 2**30)
    for root, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = os.path.join(root, f"beyond_memory_{os.getpid()}")
        with contextlib.suppress(OSError):
            os.mkdir(folder)
            with open(os.path.join(folder, name), "w", encoding="ascii") as file:
                file.write(str(wanted))
            with open(os.path.join(folder, "cgroup.procs"), "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
            return folder
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, wanted))
    return "RLIMIT_DATA"


def configuration(args, folder):
    layer = args.width * args.width
    zero = {
        "stage": 3,
        "sub_group_size": ELEMENTS,
        "reduce_bucket_size": ELEMENTS,
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": 2 * layer,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 2 * args.width,
    }
    if not args.plain:
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": folder,
            "max_in_cpu": 0,
            "buffer_count": 4,
            "buffer_size": layer,
        }
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "fast_init": True}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 2},
        "zero_optimization": zero,
    }


def planned(args, before):
    """Bytes: what there was before the model, and what the configuration lets be in memory at one time."""
    layer = args.width * args.width
    numel = layer * args.layers
    bucket = min(max(min(ELEMENTS, max(1 << 20, numel // 16)), layer), numel)  # as the engine cuts them
    always = {
        "before the model": before,
        "buffers of parameters": 4 * layer * 2,
        "a gathered layer that is kept, and two buckets of gradients": layer * 2 + 2 * bucket * 2,
    }
    backward = {
        "gathered layers, one of them ahead": 2 * layer * 2,
        "gradients: autograd's, and a bucket on its way": layer * 2 + bucket * 2,
        "activations": 8 * args.layers * args.batch * args.width * 2,
    }
    # Memory of the bucket that is worked on and of the next one: masters and two states in fp32, gradients in bf16.
    step = {"buffers of the step": 2 * bucket * (3 * 4 + 2)}
    return {**always, **max(backward, step, key=lambda part: sum(part.values()))}  # one after the other


def work(args, folder):
    import torch

    import deepspeed

    deepspeed.logger.setLevel("WARNING")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # an engine leaves malloc as it is
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # big tensors go back to the system when they are freed
    deepspeed.init_distributed(dist_backend="gloo")
    config = configuration(args, folder)

    class Block(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16)

        def forward(self, x):
            return x + torch.tanh(self.linear(x))

    def built_of(width, layers):
        with deepspeed.zero.Init(config_dict_or_path=config):
            return torch.nn.Sequential(*[Block(width) for _ in range(layers)])

    def stepped(engine, x):
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    # Memory that a process has anyway: libraries, threads, their arenas.
    small = deepspeed.initialize(model=built_of(64, 2), config=config)[0]
    for _ in range(2):
        stepped(small, torch.randn(2, 64, dtype=torch.bfloat16))
    small.destroy()
    del small
    gc.collect()
    before = private_bytes()
    peak = Peak()
    peak.start()
    model = built_of(args.width, args.layers)
    built = peak.highest
    engine = deepspeed.initialize(model=model, config=config)[0]
    placed = peak.highest
    torch.manual_seed(1)
    x = torch.randn(args.batch, args.width, dtype=torch.bfloat16)
    times, losses, growth = [], [], []
    steps = args.growth or args.steps
    for step in range(steps):
        began = time.perf_counter()
        losses.append(stepped(engine, x))
        times.append(time.perf_counter() - began)
        if step in (steps // 10, steps - 1):
            gc.collect()
            growth.append(private_bytes())
    peak.stop = True
    plan = planned(args, before)
    numel = args.layers * args.width * args.width
    found = {
        "parameters": numel,
        "bytes of all states": 18 * numel,
        "limit": int(args.limit_gb * 2**30),
        "peak": peak.highest,
        "peak while it is built": built,
        "peak until it is placed": placed,
        "plan": sum(plan.values()),
        "peak / plan": round(peak.highest / sum(plan.values()), 3),
        "parts of the plan": plan,
        "seconds per step": round(sorted(times[1:] or times)[len(times[1:]) // 2], 3),
        "losses": [round(value, 6) for value in losses[:3] + losses[-1:]],
        "in files": engine.core.storage.usage()["file"],
    }
    if args.growth:
        found["growth in bytes"] = growth[-1] - growth[0]
    engine.destroy()
    return found


def main():
    args = parse_arguments()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    folder = args.folder or tempfile.mkdtemp(prefix="beyond_memory_")
    by = limit(args.limit_gb) if args.limit_gb else "nothing"
    try:
        found = {"limited by": by, **work(args, folder)}
    finally:
        if os.path.isdir(by):  # leaves the cgroup, which has to be empty to be removed
            with contextlib.suppress(OSError):
                with open(os.path.join(os.path.dirname(by), "cgroup.procs"), "w", encoding="ascii") as file:
                    file.write(str(os.getpid()))
                os.rmdir(by)
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(found, indent=1)
    print(text)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return 0 if args.plain or args.growth or 0.9 <= found["peak / plan"] <= 1.1 else 1


if __name__ == "__main__":
    sys.exit(main())
