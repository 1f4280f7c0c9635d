"""The step at which each sample joins the pool of a curriculum, computed from the indexes of ``DataAnalyzer``.

A *cluster* is the samples that join at one step. All metrics of such a sample are at most the difficulties of that
step, and at the step before at least one was not. There are at most 1000 clusters, so that the saved position in them
is small: samples wait for a later step until they are a thousandth of the data set, or until no more will come.
"""

import bisect
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import zlib

import numpy

from deepspeed.data.indexed import IndexedDataset, MMapIndexedDatasetBuilder, data_file_path, index_file_path
from deepspeed.formats.weight_files import write_text, write_whole
from deepspeed.log import logger

MOST_CLUSTERS = 1000
MOST_STEPS = 1_000_000  # steps for which a function of the user is called in advance


@dataclasses.dataclass
class Clusters:
    """The clusters of a data set.

    sizes: the number of samples of each cluster. steps: the step at which each cluster joins.
    samples: the numbers of the samples, cluster by cluster; None: the data set in its order.
    known_steps: the last step for which the clusters are known. identity: a text that is equal for equal clusters.
    """

    sizes: list
    steps: list
    samples: object
    known_steps: float
    identity: str

    def joined(self, step):
        """The number of clusters that are in the pool at this step."""
        return bisect.bisect_right(self.steps, step)


def one_cluster(samples):
    """One cluster with all samples, which joins at the first step."""
    return Clusters([samples], [1], None, float("inf"), f"one of {samples}")


def clusters_of(metrics, samples, batch, steps, folder):
    """The ``Clusters`` of a data set of ``samples``, read from ``folder``, where the first process writes them.

    metrics: ``{name: (settings, scheduler)}`` of the metrics that choose samples. batch: the samples of a step, which
    the pool of the first step must have. steps: the number of steps of the whole run.
    """
    for name, (settings, _) in metrics.items():
        for key in ("index_to_sample_path", "index_to_metric_path"):
            if settings.get(key) is None and not (key == "index_to_metric_path" and _by_percentile(settings)):
                raise ValueError(f"curriculum_metrics.{name}.{key} is missing: run DataAnalyzer and name its file here")
    if folder is None:
        raise ValueError(
            "curriculum_learning.data_cluster_path is missing: set it to a folder in which the clusters of samples can "
            "be written, or set clustering_type 'single_cluster' for all metrics"
        )
    custom = any(scheduler.get_state()["schedule_type"] == "custom" for _, scheduler in metrics.values())
    levels = _levels(metrics, steps) if custom else None
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"clusters_{_key(metrics, samples, levels)[:16]}")
    with open(f"{path}.lock", "w", encoding="ascii") as lock:
        with contextlib.suppress(OSError):  # the file system has no locks: then each process writes the same files
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(f"{path}.json"):
            _write(path, *_group(metrics, samples, levels or _levels(metrics, steps)))
    with open(f"{path}.json", encoding="utf-8") as file:
        said = json.load(file)
    known = min(steps, MOST_STEPS) if custom else float("inf")
    found = Clusters(said["sizes"], said["steps"], IndexedDataset(path).whole(), known, said["identity"])
    _check_first(found, metrics, batch)
    return found


def _by_percentile(settings):
    return settings.get("difficulty_type") == "percentile"


def _levels(metrics, steps):
    """``[(step, difficulties)]`` of the steps at which a difficulty grows. The schedules are computed for each step
    until none will grow any more, so a function of the user must depend on the step alone."""
    found, now, step, growing = [], None, 0, True
    states = [scheduler.get_state() for _, scheduler in metrics.values()]
    maxima = [state["max_difficulty"] for state in states]
    while growing:
        step += 1
        before, now = now, [_plain(scheduler.get_difficulty(step)) for _, scheduler in metrics.values()]
        if before is not None:
            now = [old if old >= most else new for old, new, most in zip(before, now, maxima)]
            for name, old, new in zip(metrics, before, now):
                if new < old:
                    raise ValueError(
                        f"the schedule of the metric {name!r} falls from {old} to {new} at step {step}: with "
                        "clustering_type 'schedule_based' samples never leave the pool, so the difficulty must not fall"
                    )
        if now != before:
            found.append((step, now))
        growing = any(
            value < state["max_difficulty"] and step < _end(state, steps) for value, state in zip(now, states)
        )
    return found


def _end(state, steps):
    """The step after which a schedule does not change any more, or after which it is not computed."""
    if state["schedule_type"] == "fixed_discrete":
        return state["schedule_config"]["max_step"][-1] + 1 if state["schedule_config"]["max_step"] else 1
    return min(steps, MOST_STEPS) if state["schedule_type"] == "custom" else float("inf")


def _plain(number):
    return number.item() if hasattr(number, "item") else number


def _key(metrics, samples, levels):
    """A text that differs if the clusters can differ."""
    told = [samples, levels, MOST_CLUSTERS]
    for name, (settings, scheduler) in metrics.items():
        paths = [settings.get(key) for key in ("index_to_sample_path", "index_to_metric_path")]
        for file in [end(path) for path in paths if path is not None for end in (index_file_path, data_file_path)]:
            if not os.path.exists(file):
                raise FileNotFoundError(f"the file {file} of the metric {name!r} is missing: run DataAnalyzer first")
            about = os.stat(file)
            told.append([file, about.st_size, about.st_mtime_ns])
        state = {key: value for key, value in scheduler.get_state().items() if key != "current_difficulty"}
        told.append([name, settings.get("difficulty_type"), state])
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _group(metrics, samples, levels):
    """Returns ``(sizes, steps, numbers of the samples)`` of the clusters."""
    kind = numpy.uint16 if len(levels) < 2**16 else numpy.uint32  # numpy sorts 16 bits in linear time
    admitted = numpy.zeros(samples, kind)  # the level at which each sample joins; len(levels): it never joins
    for i, (name, (settings, _)) in enumerate(metrics.items()):
        order, at = _admissions(name, settings, samples, [level[i] for _, level in levels])
        admitted[order] = numpy.maximum(admitted[order], at.astype(kind))
    counts = numpy.bincount(admitted, minlength=len(levels) + 1)[: len(levels)]
    sizes, steps, waiting = [], [], 0
    last = int(numpy.flatnonzero(counts)[-1]) if counts.any() else 0
    for i, count in enumerate(counts.tolist()):
        waiting += count
        if waiting and (i in (0, last) or waiting * MOST_CLUSTERS >= samples):
            sizes.append(waiting)
            steps.append(levels[i][0])
            waiting = 0
    chosen = numpy.argsort(admitted, kind="stable")[: sum(sizes)]
    return sizes, steps, chosen.astype(numpy.int32 if samples < 2**31 else numpy.int64)


def _admissions(name, settings, samples, difficulties):
    """The samples in the order of one metric, and for each the number of the level that admits it."""
    order = IndexedDataset(settings["index_to_sample_path"])
    rows, numbers = order.sizes.astype(numpy.int64), order.whole()
    if len(numbers) != samples:
        raise ValueError(
            f"the analysis {settings['index_to_sample_path']} of the metric {name!r} has {len(numbers)} samples, and "
            f"the training data set has {samples}: the analysis belongs to another data set. Run DataAnalyzer on this "
            "one."
        )
    counts = numpy.bincount(numbers, minlength=samples) if samples and numbers.min() >= 0 else numpy.empty(0)
    if len(counts) != samples or (counts != 1).any():
        raise ValueError(
            f"the analysis {settings['index_to_sample_path']} of the metric {name!r} does not list each of the "
            f"{samples} samples once: it belongs to another data set, or its parts were not merged. Run DataAnalyzer"
        )
    if _by_percentile(settings):
        ends = [samples * min(int(percentile), 100) // 100 for percentile in difficulties]
        return numbers, numpy.searchsorted(ends, numpy.arange(samples), side="right")
    values = IndexedDataset(settings["index_to_metric_path"]).whole()
    if len(values) != len(rows) or (values[1:] < values[:-1]).any():
        raise ValueError(
            f"{settings['index_to_metric_path']} has {len(values)} values of the metric {name!r}, and "
            f"{settings['index_to_sample_path']} has {len(rows)} lists of samples: each list must have one value, and "
            "the values must rise. Run DataAnalyzer again"
        )
    return numbers, numpy.repeat(numpy.searchsorted(difficulties, values, side="left"), rows)


def _write(path, sizes, steps, numbers):
    with MMapIndexedDatasetBuilder(data_file_path(path), numbers.dtype) as builder:
        builder.add_items(numbers, sizes)
        builder.finalize(index_file_path(path))
    told = json.dumps([len(numbers), sizes, steps, zlib.crc32(numbers)])
    said = {"sizes": sizes, "steps": steps, "identity": hashlib.sha256(told.encode()).hexdigest()[:32]}
    write_whole(f"{path}.json", write_text, json.dumps(said))
    logger.info("%d samples are in %d clusters, which are written to %s.bin", len(numbers), len(sizes), path)


def _check_first(clusters, metrics, batch):
    """ValueError if the pool of the first step has fewer samples than a step takes."""
    there = sum(clusters.sizes[: clusters.joined(1)])
    if there < batch:
        bounds = [f"{name} at most {scheduler.get_difficulty(1)}" for name, (_, scheduler) in metrics.items()]
        raise ValueError(
            f"{there or 'no'} samples have {' and '.join(bounds)}, which is the difficulty of the first step, and a "
            f"step takes {batch} samples: raise min_difficulty"
        )
