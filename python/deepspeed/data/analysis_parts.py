"""The parts of an analysis, and their merge. A part is the result of one thread of one worker for one metric.

A part has three things: the values in the order of its samples (``<metric>_values``), the numbers of these samples if
they are not consecutive (``<metric>_numbers``), and a *sorted run*, which is the samples in the order of their values,
as two indexed data sets. Runs are merged block by block, so the memory does not grow with the number of parts or
values.
"""

import os

import numpy

from deepspeed.data.indexed import (
    IndexedDataset,
    MMapIndexedDatasetBuilder,
    data_file_path,
    find_fit_int_dtype,
    index_file_path,
)

BLOCK = 1 << 20  # samples that are merged at once


def metric_folder(save_path, metric):
    """The folder of a metric."""
    return os.path.join(save_path, metric)


def metric_file(folder, metric, what):
    """The path of a file of a metric, without its ending."""
    return os.path.join(folder, f"{metric}_{what}")


def part_folder(metric_save_path, worker, thread):
    return os.path.join(metric_save_path, f"worker{worker}_thread{thread}")


class PartFile:
    """A file to which numbers are appended. If an earlier map was interrupted, the file has numbers of that map."""

    def __init__(self, path, dtype):
        self.path, self.dtype = path, numpy.dtype(dtype)
        self._file = open(path, "ab")  # noqa: SIM115 (closed by close)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def has(self, count):
        """Whether there are ``count`` numbers or more. A file may lose its end when the host fails."""
        return os.path.getsize(self.path) >= count * self.dtype.itemsize

    def keep(self, count):
        """Keeps the first ``count`` numbers and removes the others. Where the file has fewer, it removes all."""
        count = count if self.has(count) else 0
        self._file.truncate(count * self.dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, numbers):
        taken = numpy.ascontiguousarray(numbers, self.dtype)
        self._file.write(memoryview(taken).cast("B") if taken.size else b"")

    def flush(self):
        self._file.flush()

    def close(self):
        self._file.close()


def numbers_in(path, dtype):
    """The numbers of such a file, as an array that is mapped to it."""
    return numpy.memmap(path, dtype, "r") if os.path.getsize(path) else numpy.empty(0, dtype)


def exact_sum(arrays):
    """The sum of arrays of whole numbers. Its type is that of the arrays, or a wider one where a sum does not fit into
    it. OverflowError where no type holds it."""
    kind = numpy.result_type(*arrays)
    widest = numpy.uint64 if kind.kind == "u" else numpy.int64
    total = numpy.zeros(numpy.shape(arrays[0]), widest)
    for one in arrays:
        before, total = total, total + numpy.asarray(one, widest)
        if ((total < before) != (numpy.asarray(one) < 0)).any():
            raise OverflowError("a metric whose values are accumulated has a sum that does not fit into 64 bits")
    low, high = (int(end(initial=0)) for end in (total.min, total.max))
    if not (numpy.iinfo(kind).min <= low and high <= numpy.iinfo(kind).max):
        kind = find_fit_int_dtype(low if widest is numpy.uint64 else min(low, -1), high)
    return total.astype(kind)


def write_documents(path, dtype, blocks):
    """Writes an indexed data set. ``blocks``: pairs ``(values, sizes of their documents)``."""
    with MMapIndexedDatasetBuilder(data_file_path(path), dtype) as builder:
        for values, sizes in blocks:
            builder.add_items(values, sizes)
        builder.finalize(index_file_path(path))


def write_run(folder, metric, values, numbers, first):
    """Writes the sorted run of a part. numbers: those of its samples; None: they are consecutive, from ``first`` on."""
    order, rising = _sorted(values)
    starts = numpy.flatnonzero(numpy.concatenate([[True], rising[1:] != rising[:-1]])) if len(rising) else order
    sizes = numpy.diff(numpy.append(starts, len(rising)))
    distinct = rising[starts].astype(values.dtype)
    del rising
    if numbers is not None:
        order = numbers[order]
    elif first:
        order += first
    samples = order.astype(find_fit_int_dtype(*_range(order)))
    del order
    write_documents(metric_file(folder, metric, "index_to_sample"), samples.dtype, [(samples, sizes)])
    blocks = [(distinct, numpy.ones(len(distinct), numpy.int32))]
    write_documents(metric_file(folder, metric, "index_to_metric"), values.dtype, blocks)


def _sorted(values):
    """Returns ``(order, values in this order)``. Equal values keep their order."""
    low, high = _range(values)
    bits = len(values).bit_length()
    if high - low < 2**16:  # numpy sorts 16 bits in linear time
        order = numpy.argsort((values - low).astype(numpy.uint16), kind="stable")
        return order, values[order]
    if (high - low).bit_length() + bits > 63 or high > numpy.iinfo(numpy.int64).max:
        order = numpy.argsort(values, kind="stable")
        return order, values[order]
    # Numbers that hold a value and its place are sorted faster than places are sorted by their values.
    keys = (values.astype(numpy.int64) - low) << bits
    keys |= numpy.arange(len(values))
    keys.sort()
    order = keys & (2**bits - 1)
    keys >>= bits
    keys += low
    return order, keys


def _range(numbers):
    return (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)


class Run:
    """The sorted run of a part. ``values`` rise; ``sizes`` has the number of samples with each of them."""

    def __init__(self, folder, metric):
        samples = IndexedDataset(metric_file(folder, metric, "index_to_sample"))
        self.samples, self.sizes = samples.whole(), samples.sizes.astype(numpy.int64)
        self.values = IndexedDataset(metric_file(folder, metric, "index_to_metric")).whole()
        self.ends = numpy.cumsum(self.sizes)

    def between(self, low, high):
        """Returns the samples with values from ``low`` to ``high``, both included, and the slice of these values."""
        rows = slice(numpy.searchsorted(self.values, low, "left"), numpy.searchsorted(self.values, high, "right"))
        end = self.ends[rows.stop - 1] if rows.stop > rows.start else 0
        return self.samples[end - self.sizes[rows].sum() : end], rows

    def repeated(self, rows):
        """The value of each sample, for a slice of the values."""
        return numpy.repeat(self.values[rows], self.sizes[rows])


def counted(runs):
    """Returns ``(values, counts)`` of all runs: each value once, in rising order, and how many samples have it."""
    return added([(run.values, run.sizes) for run in runs])


def added(pairs):
    """Merges pairs ``(values, counts)``. The values of each pair rise, and so do those of the result."""
    if len(pairs) == 1:
        return pairs[0]
    values = numpy.unique(numpy.concatenate([pair[0] for pair in pairs])) if pairs else numpy.empty(0, numpy.int64)
    counts = numpy.zeros(len(values), numpy.int64)
    for own, sizes in pairs:
        counts[numpy.searchsorted(values, own)] += sizes
    return values, counts


def merged_blocks(runs, values, counts):
    """Yields pairs ``(samples, sizes of their documents)``. There is a document for each of ``values``, in order. The
    samples of one value have the order of the runs."""
    ends = numpy.cumsum(counts)
    begin = 0
    while begin < len(values):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(numpy.searchsorted(ends, before + BLOCK, "right")))
        found = [(run, *run.between(values[begin], values[end - 1])) for run in runs]
        found = [one for one in found if len(one[1])]
        samples = numpy.concatenate([own for _, own, _ in found])
        if len(found) > 1 and end - begin > 1:  # each run is sorted, so a stable sort merges them
            repeated = numpy.concatenate([run.repeated(rows) for run, _, rows in found])
            samples = samples[numpy.argsort(repeated, kind="stable")]
        yield samples, counts[begin:end]
        begin = end


def join(path, parts):
    """Joins the data sets ``parts`` into one at ``path``, and removes them."""
    with MMapIndexedDatasetBuilder(data_file_path(path), IndexedDataset(parts[0]).dtype) as builder:
        for part in parts:
            builder.merge_file_(part)
        builder.finalize(index_file_path(path))
    for part in parts:
        os.unlink(data_file_path(part))
        os.unlink(index_file_path(part))
