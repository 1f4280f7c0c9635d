"""Reading a checkpoint: this tree beside another one, in turns, on the same files.

    python benchmarks/python/checkpoint_read.py --before ../main/python [--gigabytes 2] [--rounds 5] [--folder DIR]
                                                [--json FILE]

One file of torch.save with a model and the states of Adam, in the page cache. Each reading is a process of its own:
everything (``load``), into memory that is there (``restore``: what an engine does with its masters and states), the
structure alone (``lazy``), and the structure of a file of many small tensors (``small``).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch  # noqa: E402

from common import machine  # noqa: E402  (the line above finds it from any directory)

READ = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import torch
import deepspeed
try:
    from deepspeed.checkpoint.layouts.saved_state import Range, SavedState
    from deepspeed.formats.torch_archive import load

    def read_into(target, pieces, offset):
        return SavedState().read_into(target, pieces, offset, "the tensor")

except ImportError:  # a tree from before these rooms
    from deepspeed.utils.torch_archive import load
    from deepspeed.zero.saved_state import Range, read_into

what, large, small = sys.argv[2:5]
load(small, lazy=True)  # what is imported on first use
if what == "restore":
    tensors = [t for part in load(large, lazy=True).values() for t in part.values()]
    targets = [torch.zeros(t.shape, dtype=t.dtype) for t in tensors]
start = time.perf_counter()
if what == "load":
    found = load(large)
elif what == "lazy":
    found = load(large, lazy=True)
elif what == "small":
    found = load(small, lazy=True)
else:
    for target, tensor in zip(targets, tensors):
        read_into(target, [(0, tensor.numel(), Range(tensor))], 0)
seconds = time.perf_counter() - start
check = sum(float(t.reshape(-1)[-1]) for t in targets) if what == "restore" else None
if what == "load":
    check = sum(float(t.reshape(-1)[-1]) for part in found.values() for t in part.values())
print(json.dumps({"seconds": seconds, "check": check}))
"""


def make_files(folder, gigabytes):
    """The model in bf16, masters and two states in fp32, 48 layers; and 20,000 small tensors."""
    width = int((gigabytes * 1e9 / 14 / 48 / 12) ** 0.5)
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,), (width,)] * 48
    generator = torch.Generator().manual_seed(1)
    value = {
        part: {str(i): torch.rand(shape, generator=generator) for i, shape in enumerate(shapes)}
        for part in ("module", "masters", "exp_avg", "exp_avg_sq")
    }
    value["module"] = {name: tensor.bfloat16() for name, tensor in value["module"].items()}
    large, small = os.path.join(folder, "large.pt"), os.path.join(folder, "small.pt")
    torch.save(value, large)
    torch.save({f"layer.{i}.weight": torch.full((3, 5), float(i)) for i in range(20000)}, small)
    return large, small


def read_once(python, what, files):
    done = subprocess.run(
        [sys.executable, "-c", READ, python, what, *files], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", required=True, help="the folder python/ of another checkout, built")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where the files go")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python")
    trees = {"before": os.path.abspath(args.before), "after": os.path.abspath(here)}
    results = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        files = make_files(folder, args.gigabytes)
        size = os.path.getsize(files[0])
        with open(files[0], "rb", buffering=0) as file:
            while file.read(1 << 24):  # into the page cache
                pass
        for what in ("load", "restore", "lazy", "small"):
            found = {name: [] for name in trees}
            for _ in range(args.rounds):
                for name, python in trees.items():
                    found[name].append(read_once(python, what, files))
            checks = {entry["check"] for entries in found.values() for entry in entries}
            assert len(checks) == 1, checks
            times = {name: [entry["seconds"] for entry in entries] for name, entries in found.items()}
            median = {name: statistics.median(values) for name, values in times.items()}
            ratio = statistics.median(b / a for b, a in zip(times["before"], times["after"]))
            results[what] = {"seconds": times, "median": median, "times_faster": ratio}
            line = f"before {median['before']:.3f} s, after {median['after']:.3f} s: {ratio:.2f} times faster"
            print(f"{what:8} {line}", flush=True)
    machine.write_json(args.json, "checkpoint_read", results, bytes=size, rounds=args.rounds)


if __name__ == "__main__":
    main()
