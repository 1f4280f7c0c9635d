"""The reduce of an analysis: it merges the parts of all workers into the files of each metric."""

import multiprocessing
import os
import shutil
import sys
import traceback

import numpy
import torch

from deepspeed.data import analysis_parts as parts
from deepspeed.data.indexed import IndexedDataset, find_fit_int_dtype
from deepspeed.log import logger

SINGLE, ACCUMULATED = "single_value_per_sample", "accumulate_value_over_samples"


class AnalysisReduce:
    """The methods of a ``DataAnalyzer`` that merge parts."""

    def get_metric_value_percentiles(self, metric_name, num_sample_per_value, total_num_samples):
        """Returns ``{percentile: value}``: that percentage of the samples has at most this value.

        num_sample_per_value: ``{value: number of samples}``.
        """
        values = sorted(num_sample_per_value)
        return _percentiles(metric_name, values, [num_sample_per_value[value] for value in values], total_num_samples)

    def merge_gather_map_stats(
        self, num_workers, num_threads, num_threads_reduce, t_idx_reduce, metric_save_path, metric_name, return_dict
    ):
        """Sets ``return_dict[t_idx_reduce]`` for the parts of this thread: the number of samples, the values, the
        number of samples of each value, and whether the numbers of the samples are stored."""
        folders = _folders(metric_save_path, num_workers, num_threads)
        _, share = _share(len(folders), num_threads_reduce, t_idx_reduce)
        runs = [parts.Run(folder, metric_name) for folder in folders[share]]
        own = any(_own_numbers(folder, metric_name) for folder in folders[share])
        values, counts = parts.counted(runs)
        return_dict[t_idx_reduce] = {
            "num_samples": int(counts.sum()),
            "values": values,
            "counts": counts,
            "own_numbers": own,
        }

    def merge_sample_to_metric(
        self, t_idx_reduce, metric_save_path, metric_name, metric_value_dtype, map_worker_thread
    ):
        """Writes the values of the parts ``[(worker, thread), ...]`` in the order of the samples to
        ``<metric>_sample_to_metric_thread<t>``."""
        folders = [parts.part_folder(metric_save_path, *pair) for pair in map_worker_thread]
        path = parts.metric_file(metric_save_path, metric_name, f"sample_to_metric_thread{t_idx_reduce}")
        if not any(_own_numbers(folder, metric_name) for folder in folders):  # they are in order already
            runs = [parts.Run(folder, metric_name) for folder in folders]
            files = [parts.metric_file(folder, metric_name, "values") for folder in folders]
            ordered = (parts.numbers_in(file, run.values.dtype) for file, run in zip(files, runs))
            blocks = (block for values in ordered for block in _ones(values))
            parts.write_documents(path, metric_value_dtype, blocks)
            return
        runs = [parts.Run(folder, metric_name) for folder in folders]
        first = min((int(run.samples.min()) for run in runs if len(run.samples)), default=0)
        total = sum(len(run.samples) for run in runs)
        found = numpy.zeros(total, metric_value_dtype)
        there = numpy.zeros(total, bool)
        for run in runs:
            places = run.samples.astype(numpy.int64) - first
            if len(places) and places.max() >= total:
                raise ValueError(
                    f"{path}: a part has sample {places.max() + first}, and there are {total} samples from {first} on: "
                    "sample_indices, or 'index' of the batches, must name each sample once"
                )
            found[places] = numpy.repeat(run.values, run.sizes)
            there[places] = True
        if not there.all():
            raise ValueError(
                f"{path}: sample {int(numpy.flatnonzero(~there)[0]) + first} has no value, and another sample has two: "
                "sample_indices, or 'index' of the batches, must name each sample once"
            )
        blocks = _ones(found)
        parts.write_documents(path, metric_value_dtype, blocks)

    def merge_metric_to_sample(
        self,
        t_idx_reduce,
        metric_save_path,
        metric_name,
        sample_idx_dtype,
        metric_value_dtype,
        unique_metric_values,
        num_workers,
        num_threads,
    ):
        """Writes the samples of ``unique_metric_values``, which rise, to ``<metric>_index_to_sample_thread<t>``, and
        the values to ``<metric>_index_to_metric_thread<t>``."""
        runs = [parts.Run(folder, metric_name) for folder in _folders(metric_save_path, num_workers, num_threads)]
        values = numpy.asarray(unique_metric_values)
        counts = numpy.zeros(len(values), numpy.int64)
        for run in runs:
            at = numpy.searchsorted(values, run.values)
            known = numpy.append(values, 0)[at] == run.values
            known &= at < len(values)
            counts[at[known]] += run.sizes[known]
        results = [(sample_idx_dtype, "sample", parts.merged_blocks(runs, values, counts))]
        results += [(metric_value_dtype, "metric", _ones(values))]
        for dtype, what, blocks in results:
            path = parts.metric_file(metric_save_path, metric_name, f"index_to_{what}_thread{t_idx_reduce}")
            parts.write_documents(path, dtype, blocks)

    def merge_map_results(
        self, dataset, metric_names, metric_types, save_path, num_workers, num_threads, num_threads_reduce
    ):
        """Merges the parts of all workers and threads into the files of each metric."""
        for name, kind in zip(metric_names, metric_types):
            folder = parts.metric_folder(save_path, name)
            for part in _folders(folder, num_workers, num_threads):
                ready = "index_to_metric" if kind == SINGLE else "metric_value"
                if not IndexedDataset.exists(parts.metric_file(part, name, ready)):
                    raise FileNotFoundError(
                        f"{part} has no results of the metric {name!r}: run the map of this worker and thread first, "
                        f"with num_workers={num_workers} and num_threads={num_threads}"
                    )
            if kind == ACCUMULATED:
                self._merge_sums(folder, name, num_workers, num_threads)
            else:
                self._merge_values(len(dataset), folder, name, num_workers, num_threads, num_threads_reduce)

    @staticmethod
    def _merge_sums(folder, name, num_workers, num_threads):
        paths = [parts.metric_file(part, name, "metric_value") for part in _folders(folder, num_workers, num_threads)]
        found = [one[0] for one in map(IndexedDataset, paths) if len(one)]
        total = parts.exact_sum(found) if found else numpy.empty(0, numpy.int64)
        parts.write_documents(parts.metric_file(folder, name, "metric_value"), total.dtype, [(total, [len(total)])])

    def _merge_values(self, samples, folder, name, num_workers, num_threads, num_threads_reduce):
        gathered, threads = {}, range(num_threads_reduce)
        if num_threads_reduce > 1:
            gathered = multiprocessing.Manager().dict()
        arguments = [(num_workers, num_threads, num_threads_reduce, t, folder, name, gathered) for t in threads]
        on_processes(self.merge_gather_map_stats, arguments, "the reduce")
        stats = [gathered[t] for t in threads]
        there = sum(one["num_samples"] for one in stats)
        if there != samples:
            raise ValueError(
                f"the parts of the metric {name!r} in {folder} have {there} samples, and the data set has {samples}: "
                "the parts come from another data set, or from a map with other numbers of workers and threads"
            )
        values, counts = parts.added([(one["values"], one["counts"]) for one in stats])
        _percentiles(name, values, counts, samples)
        value_type = find_fit_int_dtype(int(values.min()), int(values.max())) if samples else numpy.uint8
        number_type = find_fit_int_dtype(0, max(0, samples - 1))

        pairs = [(worker, thread) for worker in range(num_workers) for thread in range(num_threads)]
        split = 1 if any(one["own_numbers"] for one in stats) else min(num_threads_reduce, len(pairs))
        arguments = [(t, folder, name, value_type, pairs[_share(len(pairs), split, t)[1]]) for t in range(split)]
        on_processes(self.merge_sample_to_metric, arguments, "the reduce")
        _joined(parts.metric_file(folder, name, "sample_to_metric"), split)

        ends = numpy.cumsum(counts)
        cuts = [int(numpy.searchsorted(ends, samples * t // num_threads_reduce, "left")) for t in threads]
        cuts = [0, *cuts[1:], len(values)]
        arguments = [
            (t, folder, name, number_type, value_type, values[cuts[t] : cuts[t + 1]], num_workers, num_threads)
            for t in threads
        ]
        on_processes(self.merge_metric_to_sample, arguments, "the reduce")
        for what in ("sample", "metric"):
            _joined(parts.metric_file(folder, name, f"index_to_{what}"), num_threads_reduce)
        paths = [parts.metric_file(folder, name, f"index_to_{what}") for what in ("sample", "metric")]
        self.output_index_to_sample_percentile(*paths, name, folder, samples, number_type)

    @staticmethod
    def output_index_to_sample_percentile(
        index_to_sample_fname, index_to_metric_fname, metric_name, metric_save_path, total_num_samples, sample_idx_dtype
    ):
        """Writes ``<metric>_index_to_sample_percentile_merged``. Its 100 documents are the samples in the order of
        their values, cut into hundredths. The values of ``index_to_metric_fname`` must rise."""
        samples = IndexedDataset(index_to_sample_fname)
        if len(samples) != len(IndexedDataset(index_to_metric_fname)):
            raise ValueError(
                f"{index_to_sample_fname} and {index_to_metric_fname} do not belong to one analysis: the numbers of "
                "their documents differ"
            )
        cuts = [total_num_samples * percentile // 100 for percentile in range(101)]
        path = parts.metric_file(metric_save_path, metric_name, "index_to_sample_percentile_merged")
        parts.write_documents(path, sample_idx_dtype, [(samples.whole(), numpy.diff(cuts))])


def _folders(metric_save_path, num_workers, num_threads):
    """The folders of all parts, in the order of their samples."""
    return [
        parts.part_folder(metric_save_path, worker, thread)
        for worker in range(num_workers)
        for thread in range(num_threads)
    ]


def _own_numbers(folder, metric_name):
    """Whether a part stores the numbers of its samples."""
    return os.path.getsize(parts.metric_file(folder, metric_name, "numbers")) > 0


def _percentiles(metric_name, values, counts, samples):
    """Logs and returns ``{percentile: value}``. ``counts``: the number of samples of each of the rising ``values``."""
    ends, found = numpy.cumsum(counts), {}
    for percentile in (1, 5, *range(10, 100, 10), 95, 99, 100) if len(values) else ():
        at = numpy.searchsorted(ends, -(-samples * percentile // 100), "left")
        found[percentile] = int(values[min(int(at), len(values) - 1)])
    logger.info(f"percentiles of the metric {metric_name}: {found}")
    return found


def _share(count, of, number):
    """``(first, slice)`` of share ``number`` when ``count`` things are split into ``of`` even shares."""
    share = slice(count * number // of, count * (number + 1) // of)
    return share.start, share


def _ones(values):
    """Yields blocks of documents that have one value each."""
    for at in range(0, len(values), parts.BLOCK):
        block = values[at : at + parts.BLOCK]
        yield block, numpy.ones(len(block), numpy.int32)


def _joined(path, threads):
    if threads == 1:  # its files are complete
        for end in (".bin", ".idx"):
            shutil.move(f"{path}_thread0{end}", f"{path}{end}")
    else:
        parts.join(path, [f"{path}_thread{t}" for t in range(threads)])


def on_processes(function, arguments, what):
    """Calls ``function(*each)`` for each of ``arguments``, in a process each if there are several. RuntimeError if one
    fails."""
    if len(arguments) == 1:
        function(*arguments[0])
        return
    context = multiprocessing.get_context("fork")  # data sets and functions need not be picklable
    running = [context.Process(target=_in_child, args=(function, each)) for each in arguments]
    for process in running:
        process.start()
    for process in running:
        process.join()
    failed = [str(i) for i, process in enumerate(running) if process.exitcode]
    if failed:
        raise RuntimeError(f"{what} has failed on thread {', '.join(failed)}: the errors above say why")


def _in_child(function, arguments):
    torch.set_num_threads(1)  # a forked process does not have the parent's threads
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
