"""Parts of an analysis: what one thread of one worker has found for one metric, and their merge.

A part holds the values in the order of its samples (``<metric>_values``), the numbers of the samples where they do not
follow each other (``<metric>_numbers``), and a *sorted run*: the samples by rising value, as two indexed data sets.
Runs are merged block by block, so memory does not grow with the number of parts or values.
"""

import os

import numpy

from deepspeed.data.indexed import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    data_file_path,
    find_fit_int_dtype,
    index_file_path,
)

BLOCK = 1 << 20  # samples that are merged at once


def part_folder(metric_save_path, worker, thread):
    return os.path.join(metric_save_path, f"worker{worker}_thread{thread}")


class PartFile:
    """Numbers that are appended to a file, and were there already when the map before it was interrupted."""

    def __init__(self, path, dtype):
        self.path, self.dtype = path, numpy.dtype(dtype)
        self._file = open(path, "ab")  # noqa: SIM115 (closed by close)

    def keep(self, count):
        """Only the first ``count`` numbers stay. False where there are fewer."""
        if os.path.getsize(self.path) < count * self.dtype.itemsize:
            count = 0
        self._file.truncate(count * self.dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, numbers):
        self._file.write(numpy.ascontiguousarray(numbers, self.dtype).tobytes())

    def flush(self):
        self._file.flush()

    def close(self):
        self._file.close()


def numbers_in(path, dtype):
    """The numbers of such a file, where they lie."""
    return numpy.memmap(path, dtype, "r") if os.path.getsize(path) else numpy.empty(0, dtype)


def write_documents(path, dtype, blocks):
    """``blocks``: pairs of values and of the sizes of their documents."""
    builder = MMapIndexedDatasetBuilder(data_file_path(path), dtype)
    for values, sizes in blocks:
        builder.add_items(values, sizes)
    builder.finalize(index_file_path(path))


def write_run(folder, metric, values, numbers, first):
    """The sorted run of a part. numbers: of the samples, or None: they follow each other from ``first`` on."""
    narrow = values.astype(find_fit_int_dtype(*_range(values)), copy=False)  # 16 bits are sorted in linear time
    order = numpy.argsort(narrow, kind="stable")
    rising = narrow[order]
    starts = numpy.flatnonzero(numpy.concatenate([[True], rising[1:] != rising[:-1]])) if len(rising) else order
    sizes = numpy.diff(numpy.append(starts, len(rising)))
    samples = order if numbers is None and not first else order + first if numbers is None else numbers[order]
    kind = find_fit_int_dtype(*_range(samples))
    write_documents(os.path.join(folder, f"{metric}_index_to_sample"), kind, [(samples.astype(kind), sizes)])
    distinct = rising[starts].astype(values.dtype)
    blocks = [(distinct, numpy.ones(len(distinct), numpy.int32))]
    write_documents(os.path.join(folder, f"{metric}_index_to_metric"), values.dtype, blocks)


def _range(numbers):
    return (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)


class Run:
    """The sorted run of a part: values rise, ``sizes`` are the numbers of samples that have them."""

    def __init__(self, folder, metric):
        samples = MMapIndexedDataset(os.path.join(folder, f"{metric}_index_to_sample"))
        self.samples, self.sizes = samples.whole(), samples.sizes.astype(numpy.int64)
        self.values = MMapIndexedDataset(os.path.join(folder, f"{metric}_index_to_metric")).whole()
        self.ends = numpy.cumsum(self.sizes)

    def between(self, low, high):
        """Samples and values of the rows from the value ``low`` up to and including ``high``."""
        rows = slice(numpy.searchsorted(self.values, low, "left"), numpy.searchsorted(self.values, high, "right"))
        sizes = self.sizes[rows]
        end = self.ends[rows.stop - 1] if len(sizes) else 0
        start = end - sizes.sum()
        return self.samples[start:end], numpy.repeat(self.values[rows], sizes)


def counted(runs):
    """``(values, counts)`` of all runs: each value once, rising."""
    values = numpy.unique(numpy.concatenate([run.values for run in runs])) if runs else numpy.empty(0, numpy.int64)
    counts = numpy.zeros(len(values), numpy.int64)
    for run in runs:
        counts[numpy.searchsorted(values, run.values)] += run.sizes
    return values, counts


def merged_blocks(runs, values, counts):
    """Pairs of samples and of the sizes of their documents, one for each of ``values``, in order. Samples of one value
    stand in the order of the runs."""
    ends = numpy.cumsum(counts)
    begin = 0
    while begin < len(values):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(numpy.searchsorted(ends, before + BLOCK, "right")))
        found = [run.between(values[begin], values[end - 1]) for run in runs]
        found = [pair for pair in found if len(pair[0])]
        samples = numpy.concatenate([pair[0] for pair in found])
        if len(found) > 1 and end - begin > 1:  # the sort merges: each run rises
            samples = samples[numpy.argsort(numpy.concatenate([pair[1] for pair in found]), kind="stable")]
        yield samples, counts[begin:end]
        begin = end


def join(path, parts):
    """The data sets ``parts`` become one at ``path``, and are removed."""
    builder = MMapIndexedDatasetBuilder(data_file_path(path), MMapIndexedDataset(parts[0]).dtype)
    for part in parts:
        builder.merge_file_(part)
    builder.finalize(index_file_path(path))
    for part in parts:
        os.unlink(data_file_path(part))
        os.unlink(index_file_path(part))
