"""The costs of a curriculum and of its analysis.

    python benchmarks/python/data_efficiency.py [--samples 10000000] [--workers 1 4] [--json FILE]

Values of two metrics are given, so metric functions take no time. What is measured, each in a process of its own:
``analysis``: map and reduce of one metric, against numpy's argsort of its values and the time of writing as many bytes
to the same folder; the memory that was allocated (peak of the resident set above that before, without mapped files).
``sampler``: the first start (clusters are written), a start that finds them, resuming at a position, a batch of 512
indices, the bytes of the state. ``documents``: random documents a second, against slices of a numpy memmap.
"""

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time

import numpy

METRICS = ("length", "rarity")
AT_ONCE = 1 << 16  # samples of a batch of the analysis


class Numbers:
    """Sample i is i; ``values[name][i]`` is its metric."""

    def __init__(self, samples):
        random = numpy.random.default_rng(0)
        self.values = {"length": random.integers(1, 2049, samples), "rarity": random.integers(0, 1 << 20, samples)}
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        return i


def seconds(function, *args):
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def anonymous():
    """Bytes of this process that are of no file."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous")) << 10


def analyzer_of(data, folder, name, workers=1, worker=0):
    from deepspeed.data.analyzer import DataAnalyzer

    kinds = {"metric_types": ["single_value_per_sample"], "metric_dtypes": [numpy.int64]}
    return DataAnalyzer(
        data,
        workers,
        worker,
        batch_size=AT_ONCE,
        metric_names=[name],
        metric_functions=[lambda rows: data.values[name][rows]],
        save_path=folder,
        collate_fn=lambda rows: slice(rows[0], rows[-1] + 1),
        **kinds,
    )


def analysis(samples, folder, workers):
    import threading

    data = Numbers(samples)
    found = {}
    for name in METRICS:
        where = os.path.join(folder, f"analysis{workers}")
        before, peak, ended = anonymous(), [0], threading.Event()

        def watch(peak=peak, ended=ended):
            while not ended.wait(0.02):
                peak[0] = max(peak[0], anonymous())

        made = [analyzer_of(data, where, name, workers, i) for i in range(workers)]
        watching = threading.Thread(target=watch)
        watching.start()
        mapped = seconds(lambda made=made: [one.run_map() for one in made])[0]
        reduced = seconds(made[0].run_reduce)[0]
        ended.set()
        watching.join()
        written = sum(
            os.path.getsize(os.path.join(at, file))
            for at, _, files in os.walk(os.path.join(where, name))
            for file in files
        )
        fetched = seconds(lambda: [one for one in map(data.__getitem__, range(samples))])[0]
        argsort = min(seconds(numpy.argsort, data.values[name])[0] for _ in range(3))
        block = numpy.ones(1 << 22, numpy.uint8)

        def write(written=written, block=block):
            with open(os.path.join(folder, "bytes"), "wb") as file:
                for _ in range(0, written, len(block)):
                    file.write(block)

        found[name] = {
            "map_s": mapped, "reduce_s": reduced, "fetching_samples_s": fetched, "argsort_s": argsort,
            "written_bytes": written, "writing_s": min(seconds(write)[0] for _ in range(3)),
            "allocated_mb": (peak[0] - before) >> 20,
        }  # fmt: skip
        one = found[name]
        one["ratio"] = (mapped + reduced - fetched) / (2 * argsort + one["writing_s"])
    return found


def sampler_of(samples, folder):
    from deepspeed.data.sampler import CurriculumSampler

    def metric(name, low, high):
        path = os.path.join(folder, "analysis1", name, name)
        return {
            "index_to_sample_path": f"{path}_index_to_sample",
            "index_to_metric_path": f"{path}_index_to_metric",
            "min_difficulty": low,
            "max_difficulty": high,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 20_000, "difficulty_step": 1},
        }

    metrics = {"length": metric("length", 256, 2048), "rarity": metric("rarity", 1 << 18, 1 << 20)}
    curriculum = {"data_cluster_path": os.path.join(folder, "clusters"), "curriculum_metrics": metrics}
    return CurriculumSampler(samples, {"curriculum_learning": curriculum, "num_epochs": 100}, 512, 1, 1, 0, 1)


def sampler(samples, folder, _):
    first, _ = seconds(sampler_of, samples, folder)
    start, made = seconds(sampler_of, samples, folder)
    times, batches = [], iter(made)
    for _ in range(22_000):
        times.append(seconds(next, batches)[0])
        made.used()
    times = numpy.array(times[1:]) * 1e3
    state = made.state_dict()

    def resume():
        other = sampler_of(samples, folder)
        other.load_state_dict(state)
        return next(iter(other))

    resumed, batch = seconds(resume)
    assert batch == next(batches), "the same batch"
    return {
        "first_start_s": first, "start_s": start, "resume_s": resumed, "clusters": len(state["order"][4]),
        "batch_ms": {"mean": times.mean(), "p50": numpy.median(times), "p99": numpy.quantile(times, 0.99),
                     "max": times.max()},
        "state_bytes": len(pickle.dumps(state)),
    }  # fmt: skip


def documents(samples, folder, _):
    from deepspeed.data.indexed import IndexedDataset, MMapIndexedDatasetBuilder

    path, count = os.path.join(folder, "documents"), min(samples, 1_000_000)
    random = numpy.random.default_rng(1)
    sizes = random.integers(1, 200, count)
    with MMapIndexedDatasetBuilder(f"{path}.bin", numpy.int32) as builder:
        builder.add_items(random.integers(0, 50_000, int(sizes.sum()), dtype=numpy.int32), sizes)
        builder.finalize(f"{path}.idx")
    order = random.integers(0, count, 1_000_000).tolist()
    opening, data = seconds(IndexedDataset, path)
    values = numpy.memmap(f"{path}.bin", numpy.int32, "r")
    ends = numpy.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]]

    def ours():
        for i in order:
            data[i]

    def plain():
        for i in order:
            values[starts[i] : ends[i]]

    rates = [(1e6 / seconds(ours)[0], 1e6 / seconds(plain)[0]) for _ in range(3)]
    found = [max(rate[i] for rate in rates) for i in (0, 1)]
    return {"opening_s": opening, "documents_per_s": found[0], "memmap_per_s": found[1], "ratio": found[0] / found[1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, nargs="*", default=[1])
    parser.add_argument("--folder", default=None)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.part:
        part, workers = args.part
        run = {"analysis": analysis, "sampler": sampler, "documents": documents}[part]
        print("\n" + json.dumps(run(args.samples, args.folder, int(workers))))
        return
    folder = args.folder or tempfile.mkdtemp(prefix="ds_data_")
    found = {}
    try:
        for part, workers in [*(("analysis", n) for n in args.workers), ("sampler", 1), ("documents", 1)]:
            command = [sys.executable, os.path.abspath(__file__), "--samples", str(args.samples), "--folder", folder]
            out = subprocess.run(
                [*command, "--part", part, str(workers)], stdout=subprocess.PIPE, text=True, check=True
            )
            found[f"{part}, {workers} workers" if part == "analysis" else part] = json.loads(
                out.stdout.splitlines()[-1]
            )
            print(json.dumps(list(found.items())[-1], indent=1))
    finally:
        if args.folder is None:
            shutil.rmtree(folder)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
