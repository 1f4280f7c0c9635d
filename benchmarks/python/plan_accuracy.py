"""How near ``deepspeed.plan`` is to runs: peak of the device's allocator, collectives and time of a step.

    python benchmarks/python/plan_accuracy.py [--ranks 2] [--device standin] [--json FILE]

A GPT is trained with 40 configurations: sizes x stages x dtypes x accumulation x places of states and parameters.
The same ranks ask for the plan of each. The figures are ratios of planned to measured. ``--device``: of the runs; the
CPU has no allocator that counts, so peaks are those of ``cuda`` or of ``standin``, the stand-in device of the tests
(torch 2 and the CUDA kernels on the CPU), whose times mean nothing. Times are compared on the CPU and on GPUs. The
limit of times on two cores: equal runs differ by up to 8 %.
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
COUNT, STEPS, ROWS = 40, 3, 2
PLACES = {
    "device": {},
    "optimizer on the host": {"offload_optimizer": {"device": "cpu"}},
    "parameters on the host": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
MODELS = {"1m": {"layers": 2, "heads": 2, "width": 128}, "10m": {}, "30m": {"layers": 8, "heads": 8, "width": 512}}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda", "standin"), default="cpu")
    parser.add_argument("--count", type=int, default=COUNT, help=f"configurations (default {COUNT})")
    parser.add_argument("--sizes", default=",".join(MODELS), help=f"of the model, of {', '.join(MODELS)}")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def configurations(count, sizes):
    """Every k-th of all that there are, so that each setting comes with each other one."""
    rows = [
        row
        for row in itertools.product(sizes, range(4), ("fp32", "bf16"), (1, 2), PLACES)
        if (row[4] == "device" or row[1] > 0) and (row[4] != "parameters on the host" or row[1] == 3)
    ]
    step = max(1, len(rows) // count)
    return rows[::step][:count]


def config_of(row):
    _, stage, dtype, accumulation, place = row
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, **PLACES[place]},
        "bf16": {"enabled": dtype == "bf16"},
        "steps_per_print": None,
    }


def run(deepspeed, model, inputs, row):
    """Returns ``(calls by verb, peak, seconds)``."""
    from deepspeed import _native
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.timed import call_log

    accumulation = row[3]
    gc.collect()  # engines refer to themselves
    before = get_accelerator().memory_allocated()
    engine = deepspeed.initialize(model=model, config=config_of(row))[0]
    accelerator, recorder = get_accelerator(), _native._C.CallRecorder(False)
    seconds = []
    for number in range(1 + STEPS):
        if number == STEPS:
            call_log.add(recorder)
            accelerator.reset_peak_memory_stats()
        accelerator.synchronize()
        begin = time.perf_counter()
        for _ in range(accumulation):
            loss = engine(*inputs(engine.device))
            engine.backward(loss)
            del loss
            engine.step()
        accelerator.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak, calls = accelerator.max_memory_allocated() - before, {}
    call_log.remove(recorder)
    for call in recorder.take():
        count, size = calls.get(call.op, (0, 0))
        calls[call.op] = count + 1, size + call.bytes
    engine.destroy()
    return calls, peak, statistics.median(seconds[1:])


def work(args):
    sys.path[:0] = [os.path.join(ROOT, "examples", "quickstart"), HERE]
    if args.device == "standin":
        sys.path[:0] = [os.path.join(ROOT, "tests", "device"), os.path.join(ROOT, "tests", "device", "package")]
        import standin_kernels

        os.environ.setdefault("DS_STANDIN_KERNELS", standin_kernels.library_path())
    os.environ["DS_ACCELERATOR"] = args.device
    import torch

    import deepspeed
    from common import machine
    from model import GPT, Shape

    deepspeed.logger.setLevel("ERROR")

    def make(name):
        torch.manual_seed(0)
        return GPT(Shape(**MODELS[name]))

    if args.device == "standin":  # has no fused attention
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)

    def inputs(device):
        ids = torch.zeros(ROWS, 128, dtype=torch.int64)
        return ids.to(device), ids.to(device)

    figures, rows, rank = [], configurations(args.count, args.sizes.split(",")), int(os.environ["RANK"])
    plans = [  # before the first backward on a device: see planner/child.py
        deepspeed.plan(lambda row=row: make(row[0]), config_of(row), args.ranks, sample=inputs("meta"), ranks=[rank])
        for row in rows
    ]
    for row, plan in zip(rows, plans):
        calls, peak, seconds = run(deepspeed, make(row[0]), inputs, row)
        planned = {}
        for (verb, _), both in plan.ranks[0].calls.items():
            planned[verb] = tuple(map(sum, zip(planned.get(verb, (0, 0)), both)))
        figures.append(
            {
                "configuration": " / ".join(map(str, row)),
                "peak": plan.peak_bytes / peak if args.device != "cpu" else None,
                "seconds": plan.seconds / seconds if args.device != "standin" else None,
                "calls_equal": planned == calls,
            }
        )
        if int(os.environ["RANK"]) == 0:
            print(json.dumps(figures[-1]), flush=True)
    if int(os.environ["RANK"]) == 0:
        errors = {
            name: [abs(one[name] - 1) for one in figures if one[name] is not None] for name in ("peak", "seconds")
        }
        summary = {
            name: {"worst": max(found), "median": statistics.median(found)} for name, found in errors.items() if found
        }
        summary["equal_calls"] = sum(one["calls_equal"] for one in figures)
        summary["configurations"] = len(figures)
        machine.write_json(args.json, "plan_accuracy", {"summary": summary, "rows": figures})


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.path.insert(0, HERE)
    from common import ranks

    ranks.run(__file__, arguments, work, ("device", "count", "ranks", "sizes"), arguments.ranks)
