"""``ds_nvme_tune``, first part: measures many settings of a handle, and logs each."""

import argparse
import itertools
import json
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from deepspeed.host.command_line import program
from deepspeed.nvme.perf_generate_param import generate_main
from deepspeed.nvme.transfer_rate import Bench, Setting, bytes_of

# The values of each argument of aio_handle that are tried without --sweep_config.
SPACE = {
    "block_size": ["1M", "8M"],
    "queue_depth": [32, 128],
    "overlap_events": [True, False],
    "io_parallel": [1, 2, 4],
    "single_submit": [False],
}
# Names of keys in a file of --sweep_config, those of ds_io's flags among them -> fields of Setting.
NAMES = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "overlap_events": "overlap_events",
    "single_submit": "single_submit",
    "io_parallel": "intra_op_parallelism",
    "intra_op_parallelism": "intra_op_parallelism",
}
# Keys of published files that have no effect here, with the reason.
WITHOUT_EFFECT = {
    "sequential_requests": "requests of a transfer are always at increasing offsets; overlap_events says whether they "
    "wait for each other",
}


# Flags -> how argparse is to treat them.
OPTIONS = {
    "--nvme_dir": dict(nargs="+", required=True, metavar="DIR", help="folders on the drives to tune for"),
    "--sweep_config": dict(metavar="FILE", help="JSON with lists to try: " + ", ".join(SPACE)),
    "--no_read": dict(action="store_true", help="tune writes only"),
    "--no_write": dict(action="store_true", help="tune reads only"),
    "--io_size": dict(default="400M", help="bytes of a tensor (default 400M)"),
    "--gpu": dict(action="store_true", help="tensors of the GPU"),
    "--gds": dict(action="store_true", help="GPUDirect storage, for tensors of the GPU"),
    "--flush_page_cache": dict(action="store_true", help="drop the page cache before each setting (needs root)"),
    "--log_dir": dict(default="_aio_bench_logs", metavar="DIR", help="what was measured (default _aio_bench_logs)"),
    "--loops": dict(type=int, default=3, help="transfers of each setting (default 3)"),
    "--verbose": dict(action="store_true", help="print each setting as it is measured"),
}


def parse_sweep_arguments(argv=None):
    """The command line of ``ds_nvme_tune``."""
    parser = argparse.ArgumentParser(
        prog="ds_nvme_tune",
        description="Finds the settings of aio_handle that read and write fastest in a folder, and prints them as the "
        "section `aio` of a DeepSpeed configuration.",
    )
    for flag, settings in OPTIONS.items():
        parser.add_argument(flag, **settings)
    args = parser.parse_args(argv)
    for wrong, why in (
        (args.no_read and args.no_write, "--no_read and --no_write leave nothing to tune"),
        (args.gds and not args.gpu, "--gds is for tensors of the GPU: give --gpu, too"),
        (args.loops < 1, "--loops is at least 1"),
    ):
        if wrong:
            parser.error(why)
    return args


def settings_of(path):
    """All settings to try: the product of the lists in a JSON file, or of the default ones (``path`` None)."""
    lists = {NAMES[name]: values for name, values in SPACE.items()}
    if path is not None:
        given = json.loads(Path(path).read_text("utf-8"))
        for name in WITHOUT_EFFECT.keys() & given.keys():
            del given[name]
            print(f"ds_nvme_tune: {path}: {name} has no effect here: {WITHOUT_EFFECT[name]}.", file=sys.stderr)
        unknown = sorted(set(given) - set(NAMES))
        if unknown:
            raise ValueError(f"{path}: {unknown[0]!r} is nothing to tune; the keys are {', '.join(NAMES)}")
        for name, values in given.items():
            values = values if isinstance(values, list) else [values]
            lists[NAMES[name]] = [{"true": True, "false": False}.get(str(v).lower(), v) for v in values]
    lists["block_size"] = [bytes_of(size) for size in lists["block_size"]]
    return [Setting(**dict(zip(lists, values))) for values in itertools.product(*lists.values())]


def drop_page_cache():
    """Writes out dirty pages, and makes the kernel forget clean ones. Raises OSError where this is not root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1", "ascii")


def sweep_main(args):
    """Measures every setting, and writes one JSON file for each operation and setting to ``args.log_dir``.

    Raises:
        OSError, RuntimeError, ValueError: a folder, a file or a key that is not usable; the text names it.
    """
    settings, io_size = settings_of(args.sweep_config), bytes_of(args.io_size)
    os.makedirs(args.log_dir, exist_ok=True)
    device = "cuda" if args.gpu else "cpu"
    operations = [name for name, off in (("write", args.no_write), ("read", args.no_read)) if not off]
    for operation in operations:  # results of an older run would win
        for old in Path(args.log_dir).glob(f"{operation}_*.json"):
            old.unlink()
    for number, folder in enumerate(args.nvme_dir):
        with Bench(folder, io_size, device, args.gds) as bench:
            for operation, (i, setting) in itertools.product(operations, enumerate(settings)):
                if args.flush_page_cache:
                    drop_page_cache()
                rates = bench.rates(setting, operation == "read", args.loops)
                result = {
                    "op": operation, "folder": folder, "gb_per_s": statistics.median(rates), "loops": rates,
                    "aio": setting.section(args.gds), "io_size": io_size, "device": device,
                }  # fmt: skip
                path = os.path.join(args.log_dir, f"{operation}_{number}_{i:04}.json")
                Path(path).write_text(json.dumps(result, indent=1), "utf-8")
                if args.verbose:
                    print(f"{folder}: {operation} {result['gb_per_s']:.3f} GB/s with {asdict(setting)}", flush=True)


@program("ds_nvme_tune")
def main(argv=None):
    """The program ``ds_nvme_tune``: measures, then prints the best settings."""
    args = parse_sweep_arguments(argv)
    sweep_main(args)
    generate_main(args.log_dir)
