"""The offline analysis of a data set: it computes metrics of each sample, and writes two indexes of their values.

A *map* computes the values of the samples of one worker, on its threads. A *reduce* merges the results of all workers.
Files in ``save_path/<metric>``: ``<metric>_sample_to_metric`` (document i: the value of sample i),
``<metric>_index_to_metric`` (the values, rising) and ``<metric>_index_to_sample`` (the samples of each value), and
``<metric>_index_to_sample_percentile_merged`` (the samples of each hundredth); for accumulated metrics
``<metric>_metric_value``. All are indexed data sets (``indexed.py``).
"""

import collections.abc
import contextlib
import json
import os
import time

import numpy
import torch
from torch.utils.data import default_collate

from deepspeed import comm as dist
from deepspeed.comm.agreement import together
from deepspeed.data import analysis_parts as parts
from deepspeed.data.analysis_reduce import ACCUMULATED, SINGLE, AnalysisReduce, on_processes
from deepspeed.formats.weight_files import write_whole
from deepspeed.log import logger

SAVE_SECONDS = 10  # between two times at which a map saves its position
TELL_SECONDS = 60  # between two lines of the log


class DataAnalyzer(AnalysisReduce):
    """The analysis of a map-style data set.

    num_workers, worker_id: the number of processes, on one or several nodes, that run the map, and the number of this
        one.
    num_threads: processes of this worker's map, each of which has a part of its samples.
    num_threads_reduce: processes of the reduce.
    specific_threads: the threads that this map runs; empty: all.
    batch_size: samples that a metric function gets at once.
    metric_names, metric_functions, metric_types, metric_dtypes: lists of the same length. A function gets a batch and
        returns whole numbers of its dtype (torch's or numpy's): one for each sample ("single_value_per_sample"), or an
        array that is summed over all batches ("accumulate_value_over_samples").
    save_path: the folder of the results of all workers.
    collate_fn: makes a batch of a list of samples; None: torch's default.
    custom_map_init, custom_map_update, custom_map_finalize, custom_reduce: replace ``init_metric_results``,
        ``update_metric_results``, ``finalize_metric_results`` and ``merge_map_results``; they get the same arguments.
    sample_indices: the number of each sample, if ``dataset`` has the samples in another order. If a batch is a mapping
        with the key "index", its numbers are taken from there, one for each sample.

    A map that was interrupted continues where it ended, unless it has custom functions.
    """

    def __init__(
        self,
        dataset,
        num_workers=1,
        worker_id=0,
        num_threads=1,
        num_threads_reduce=1,
        specific_threads=[],  # noqa: B006 (the signature is published; lists are only read)
        batch_size=1,
        metric_names=[],  # noqa: B006
        metric_functions=[],  # noqa: B006
        metric_types=[],  # noqa: B006
        metric_dtypes=[],  # noqa: B006
        save_path="./",
        collate_fn=None,
        custom_map_init=None,
        custom_map_update=None,
        custom_map_finalize=None,
        custom_reduce=None,
        sample_indices=None,
    ):
        lengths = {len(one) for one in (metric_names, metric_functions, metric_types, metric_dtypes)}
        if len(lengths) != 1:
            raise ValueError(
                f"metric_names, metric_functions, metric_types and metric_dtypes have {len(metric_names)}, "
                f"{len(metric_functions)}, {len(metric_types)} and {len(metric_dtypes)} items: each metric has one of "
                "each"
            )
        for name, kind in zip(metric_names, metric_types):
            if kind not in (SINGLE, ACCUMULATED):
                raise ValueError(f"the type {kind!r} of the metric {name!r} is neither {SINGLE!r} nor {ACCUMULATED!r}")
        for name in metric_names:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise ValueError(f"the metric name {name!r} cannot be a folder of save_path: use a name without '/'")
        counts = dict(num_workers=num_workers, num_threads=num_threads, num_threads_reduce=num_threads_reduce)
        for name, count in {**counts, "batch_size": batch_size}.items():
            if count < 1:
                raise ValueError(f"{name} is {count}: it must be 1 or more")
        for thread in specific_threads:
            if not 0 <= thread < num_threads:
                raise ValueError(f"specific_threads has {thread}: the {num_threads} threads are counted from 0")
        if not 0 <= worker_id < num_workers:
            raise ValueError(f"worker_id {worker_id} is none of the {num_workers} workers: they are counted from 0")
        self.dataset, self.batch_size, self.save_path = dataset, batch_size, save_path
        self.num_workers, self.worker_id = num_workers, worker_id
        self.num_threads, self.num_threads_reduce = num_threads, num_threads_reduce
        self.specific_threads = list(specific_threads) or list(range(num_threads))
        self.metric_names, self.metric_functions, self.metric_types = metric_names, metric_functions, metric_types
        self.metric_dtypes = [_numpy_type(dtype) for dtype in metric_dtypes]
        self.collate_fn = collate_fn or default_collate
        self.custom_map_init, self.custom_map_update = custom_map_init, custom_map_update
        self.custom_map_finalize, self.custom_reduce = custom_map_finalize, custom_reduce
        self.sample_indices = sample_indices

    # ---- map ---------------------------------------------------------------------------------------------------------
    def _samples_of(self, thread_id):
        """``(first, end)`` of the samples of a thread. All threads have even shares, in order."""
        part, of = self.worker_id * self.num_threads + thread_id, self.num_workers * self.num_threads
        return len(self.dataset) * part // of, len(self.dataset) * (part + 1) // of

    def init_metric_results(self, thread_id, metric_names, metric_types, metric_dtypes, save_path, worker_id):
        """Returns a dict for each metric, to which ``update_metric_results`` adds results."""
        results = []
        with contextlib.ExitStack() as opened:  # closes them where the next one cannot be opened
            for name, kind, dtype in zip(metric_names, metric_types, metric_dtypes):
                folder = parts.part_folder(parts.metric_folder(save_path, name), worker_id, thread_id)
                os.makedirs(folder, exist_ok=True)
                result = {"metric_name": name, "metric_type": kind, "folder": folder, "count": 0, "metric_value": None}
                if kind == SINGLE:
                    for what, of in (("values", dtype), ("numbers", numpy.int64)):
                        file = parts.PartFile(parts.metric_file(folder, name, what), of)
                        result[what] = opened.enter_context(file)
                results.append(result)
            opened.pop_all()
        return results

    def update_metric_results(
        self, data, metric_types, metric_dtypes, metric_functions, metric_results, batch_start_idx=0
    ):
        """Adds the values of a batch. Its first sample has the position ``batch_start_idx`` in the data set."""
        for kind, dtype, function, result in zip(metric_types, metric_dtypes, metric_functions, metric_results):
            values = _whole_numbers(function(data), dtype, result["metric_name"])
            if kind == ACCUMULATED:
                before = result["metric_value"]
                result["metric_value"] = values if before is None else parts.exact_sum([before, values])
                continue
            values = values.reshape(-1)
            result["values"].append(values)
            numbers = self._numbers_of(data, batch_start_idx, len(values))
            if numbers is not None:
                result["numbers"].append(numbers)
            result["count"] += len(values)

    def _numbers_of(self, data, start, count):
        """The numbers of the samples of a batch; None if they are consecutive, from ``start`` on."""
        if isinstance(data, collections.abc.Mapping) and "index" in data:
            return torch.as_tensor(data["index"]).reshape(count, -1)[:, 0].numpy()
        if self.sample_indices is not None:
            return numpy.asarray(self.sample_indices[start : start + count])
        return None

    def finalize_metric_results(self, metric_types, metric_dtypes, metric_results):
        """Writes the sorted results of a thread, for the reduce."""
        for kind, dtype, result in zip(metric_types, metric_dtypes, metric_results):
            name, folder = result["metric_name"], result["folder"]
            if kind == ACCUMULATED:
                found = result["metric_value"]
                blocks = [] if found is None else [(found.reshape(-1), [found.size])]
                kind = dtype if found is None else found.dtype
                parts.write_documents(parts.metric_file(folder, name, "metric_value"), kind, blocks)
                continue
            result["values"].close()
            result["numbers"].close()
            values = parts.numbers_in(result["values"].path, dtype)
            numbers = parts.numbers_in(result["numbers"].path, numpy.int64)
            parts.write_run(folder, name, values, numbers if len(numbers) else None, result.get("first", 0))

    def run_map_helper(self, thread_id):
        """Runs the map of one thread."""
        arguments = (self.metric_names, self.metric_types, self.metric_dtypes)
        init = self.custom_map_init or self.init_metric_results
        results = init(thread_id, *arguments, self.save_path, self.worker_id)
        with contextlib.ExitStack() as files:
            for result in () if self._is_custom() else results:
                for what in {"values", "numbers"} & result.keys():
                    files.enter_context(result[what])
            self._map(thread_id, results)

    def _map(self, thread_id, results):
        first, end = self._samples_of(thread_id)
        update = self.custom_map_update or self.update_metric_results
        done = 0 if self._is_custom() else self._resume(thread_id, results)
        begun = saved = told = time.monotonic()
        resumed = done
        while first + done < end:
            at = first + done
            rows = min(self.batch_size, end - at)
            data = self.collate_fn([self.dataset[i] for i in range(at, at + rows)])
            update(data, self.metric_types, self.metric_dtypes, self.metric_functions, results, batch_start_idx=at)
            done += rows
            if not self._is_custom():
                self._check_counts(results, done)
            now = time.monotonic()
            if now - told >= TELL_SECONDS:
                told = now
                left = (now - begun) / (done - resumed) * (end - first - done)
                logger.info(
                    f"worker {self.worker_id}, thread {thread_id}: {done} of {end - first} samples are analysed, about "
                    f"{left / 60:.1f} minutes remain"
                )
            if now - saved >= SAVE_SECONDS and not self._is_custom():
                saved = now
                self._save_progress(thread_id, results, done)
        if not self._is_custom():
            self._save_progress(thread_id, results, done)
        (self.custom_map_finalize or self.finalize_metric_results)(self.metric_types, self.metric_dtypes, results)

    def _is_custom(self):
        return any(one is not None for one in (self.custom_map_init, self.custom_map_update, self.custom_map_finalize))

    def _check_counts(self, results, done):
        for result in results:
            if result["metric_type"] == SINGLE and result["count"] != done:
                raise ValueError(
                    f"the metric {result['metric_name']!r} has given {result['count']} values for {done} samples: a "
                    f"function of the type {SINGLE} must return one value for each sample of its batch"
                )

    def _progress_path(self, thread_id):
        return f"{parts.part_folder(self.save_path, self.worker_id, thread_id)}_progress.npz"

    def _told(self, thread_id):
        """A text that is equal for two maps if one of them can continue with the files of the other."""
        types = [numpy.dtype(dtype).str for dtype in self.metric_dtypes]
        metrics = [list(self.metric_names), list(self.metric_types), types]
        return json.dumps([len(self.dataset), self._samples_of(thread_id), metrics])

    def _save_progress(self, thread_id, results, done):
        for result in results:
            if result["metric_type"] == SINGLE:
                result["values"].flush()
                result["numbers"].flush()
        sums = {f"sum_{result['metric_name']}": result["metric_value"] for result in results}
        sums = {key: value for key, value in sums.items() if value is not None}
        write_whole(
            self._progress_path(thread_id), _write_arrays, {"told": self._told(thread_id), "done": done, **sums}
        )

    def _resume(self, thread_id, results):
        """Restores ``results`` from an interrupted map, and returns the number of samples that it has analysed."""
        path, done, found = self._progress_path(thread_id), 0, {}
        if os.path.exists(path):
            with numpy.load(path) as file:
                found = {key: file[key] for key in file.files}
            if str(found["told"]) == self._told(thread_id):
                done = int(found["done"])
            else:
                logger.warning(f"{path} belongs to another analysis: the map of thread {thread_id} begins anew")
        values = [result["values"] for result in results if result["metric_type"] == SINGLE]
        if not all(one.has(done) for one in values):
            logger.warning(f"{path} counts {done} samples, but values of some are lost: thread {thread_id} begins anew")
            done = 0
        for result in results:
            result["first"] = self._samples_of(thread_id)[0]
            if result["metric_type"] == SINGLE:
                numbers = result["numbers"]
                numbers.keep(done if os.path.getsize(numbers.path) else 0)
                result["values"].keep(done)
                result["count"] = done
            elif done:
                result["metric_value"] = found.get(f"sum_{result['metric_name']}")
        if done:
            logger.info(f"the map of worker {self.worker_id}, thread {thread_id} continues after {done} samples")
        return done

    def run_map(self):
        """Runs the map of this worker."""
        os.makedirs(self.save_path, exist_ok=True)
        on_processes(self.run_map_helper, [(thread,) for thread in self.specific_threads], "the map")
        for thread in self.specific_threads:  # all have ended: another map begins anew
            if os.path.exists(self._progress_path(thread)):
                os.unlink(self._progress_path(thread))

    def run_reduce(self):
        """Merges the results of the maps of all workers. One process must call it, after all maps have ended."""
        reduce = self.custom_reduce or self.merge_map_results
        reduce(
            self.dataset,
            self.metric_names,
            self.metric_types,
            self.save_path,
            self.num_workers,
            self.num_threads,
            self.num_threads_reduce,
        )

    def run_map_reduce(self, comm_group=None):
        """Runs the map of this worker. After the maps of all workers of ``comm_group``, worker 0 runs the reduce."""
        alone = not dist.is_initialized()
        if alone and self.num_workers > 1:
            raise RuntimeError(
                f"run_map_reduce with {self.num_workers} workers needs deepspeed.init_distributed(), because the "
                "reduce waits for all maps. Call it, or call run_map() in each worker and then run_reduce() in one"
            )
        together(self.run_map, "the analysis", comm_group, alone)
        together(self.run_reduce if self.worker_id == 0 else None, "the analysis", comm_group, alone)


class DistributedDataAnalyzer:
    """An analysis by the ranks of a job. Each rank is a worker of a ``DataAnalyzer``, which explains the arguments.

    num_workers, worker_id: used without ``init_distributed()``. With it the workers are the ranks of ``comm_group``, or
    all ranks. The metric functions return int64.
    """

    def __init__(
        self,
        dataset,
        num_workers=1,
        num_threads=1,
        worker_id=0,
        batch_size=1,
        metric_names=[],  # noqa: B006 (the signature is published; lists are only read)
        metric_functions=[],  # noqa: B006
        metric_types=[],  # noqa: B006
        save_path="./",
        collate_fn=None,
        comm_group=None,
        sample_indices=None,
    ):
        if dist.is_initialized():
            num_workers, worker_id = dist.get_world_size(comm_group), dist.get_rank(comm_group)
        self.comm_group = comm_group
        self.analyzer = DataAnalyzer(
            dataset,
            num_workers,
            worker_id,
            num_threads,
            num_threads_reduce=num_threads,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            metric_dtypes=[numpy.int64] * len(metric_names),
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )

    def run_map_reduce(self):
        self.analyzer.run_map_reduce(self.comm_group)


def _numpy_type(dtype):
    """numpy's type for a type of torch or numpy. ValueError if it is no type of whole numbers."""
    found = numpy.dtype(str(dtype).rpartition(".")[2] if isinstance(dtype, torch.dtype) else dtype)
    if found.kind not in "iu":
        raise ValueError(f"metric_dtypes has {dtype}: metrics must be whole numbers. Scale and round them.")
    return found


def _whole_numbers(values, dtype, name):
    """The values of a metric function as an array of ``dtype``."""
    found = values.detach().cpu().numpy() if torch.is_tensor(values) else numpy.asarray(values)
    if found.dtype == dtype:
        return found
    taken = found.astype(dtype)
    if not numpy.array_equal(taken, found):
        raise ValueError(
            f"the metric {name!r} has given {found.dtype} values that are not whole numbers of {dtype}: round them, or "
            "set another type in metric_dtypes"
        )
    return taken


def _write_arrays(path, arrays):
    with open(path, "wb") as file:
        numpy.savez(file, **arrays)
