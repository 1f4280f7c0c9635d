"""Export of a checkpoint to fp32 weights: time, throughput and peak memory beside its bound.

    python benchmarks/python/export.py [--gigabytes 6] [--ranks 4] [--stage 3] [--folder DIR] [--json FILE]

A checkpoint of that size is made (one tensor in four is a tenth of it), then the script that a checkpoint folder gets
exports it in a process of its own, once per format. Each result is checked against what went in. Twice the size is
needed on the disk.
"""

import argparse
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch  # noqa: E402

from common import machine  # noqa: E402  (the line above finds it from any directory)
from deepspeed.checkpoint.convert.export import write_script  # noqa: E402
from deepspeed.formats.safetensors_file import read_safetensors  # noqa: E402
from deepspeed.formats.torch_archive import load  # noqa: E402

BOUND_MB = 1000
MEASURE = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("PEAK", next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def shapes_of(gigabytes):
    """name -> numel: tenths and fortieths of the whole, in turns."""
    total, found = int(gigabytes * 1e9) // 4, {}
    while total > 0:
        share = int(gigabytes * 1e9) // 4 // (10 if len(found) % 4 == 0 else 40)
        found[f"layer{len(found)}.weight"] = min(share, total)
        total -= share
    return found


def value_at(index, start, numel):
    return torch.arange(start, start + numel, dtype=torch.float32).remainder_(8191).add_(index)


def make_checkpoint(folder, shapes, ranks, stage):
    """One file after the other, so that making it takes no more memory than one rank's shard."""
    tag = os.path.join(folder, "step")
    os.makedirs(tag)
    group = {name: torch.Size((numel,)) for name, numel in shapes.items()}
    for rank in range(ranks if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        state = {"module": {}, "buffer_names": [], "param_shapes": [group], "shared_params": {}, "ds_version": "0"}
        torch.save(state, os.path.join(tag, f"{name}_model_states.pt"))
    size = -(-sum(shapes.values()) // ranks)
    for rank in range(ranks):
        parts, offset = [], 0
        for index, numel in enumerate(shapes.values()):
            part = -(-numel // ranks)
            low, high = (
                (rank * part, (rank + 1) * part) if stage == 3 else (rank * size - offset, (rank + 1) * size - offset)
            )
            low, high = max(low, 0), high if stage == 3 else min(high, numel)
            if low < high:
                parts.append(value_at(index, low, high - low))
            offset += numel
        flat = torch.cat(parts)
        del parts
        part = {"zero_stage": stage, "partition_count": ranks if stage == 3 else [ranks]}
        part["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] = [flat]
        torch.save({"optimizer_state_dict": part}, os.path.join(tag, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    with open(os.path.join(folder, "latest"), "w", encoding="utf-8") as file:
        file.write("step")


def check(out, shapes):
    found = {}
    for path in glob.glob(os.path.join(out, "*model*")):
        if path.endswith(".bin"):
            found.update(load(path, lazy=True))
        elif path.endswith(".safetensors"):
            found.update(read_safetensors(path)[0])
    assert set(found) == set(shapes), "names are missing"
    for index, (name, numel) in enumerate(shapes.items()):
        for start in range(0, numel, 1 << 26):
            count = min(1 << 26, numel - start)
            assert torch.equal(found[name].read_range(start, count), value_at(index, start, count)), name


def export(folder, options):
    out = os.path.join(folder, "out")
    script = write_script(folder)
    start = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-I", "-c", MEASURE, script, folder, out, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    assert ran.returncode == 0, ran.stderr
    return out, seconds, int(ran.stdout.split("PEAK")[1]) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stage", type=int, default=3, choices=[1, 2, 3])
    parser.add_argument("--folder", help="where there is room (default: the temporary folder)")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    shapes, figures = shapes_of(args.gigabytes), {}
    folder = tempfile.mkdtemp(prefix="ds_export_", dir=args.folder)
    try:
        make_checkpoint(folder, shapes, args.ranks, args.stage)
        for name, options in (("bin", []), ("safetensors", ["--safe_serialization"])):
            out, seconds, peak = export(folder, options)
            check(out, shapes)
            shutil.rmtree(out)
            figures[name] = {"seconds": seconds, "mb_per_s": args.gigabytes * 1e3 / seconds, "peak_mb": peak}
            print(
                f"{name}: {args.gigabytes:g} GB in {seconds:.1f} s ({args.gigabytes * 1e3 / seconds:.0f} MB/s), "
                f"peak {peak:.0f} MB (bound {BOUND_MB} MB, largest tensor {max(shapes.values()) * 4e-6:.0f} MB)"
            )
            assert peak < BOUND_MB, f"{peak:.0f} MB is more than {BOUND_MB} MB"
    finally:
        shutil.rmtree(folder)
    if args.json:
        machine.write_json(args.json, "export", figures, gigabytes=args.gigabytes, ranks=args.ranks, stage=args.stage)


if __name__ == "__main__":
    main()
