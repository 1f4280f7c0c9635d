"""The analysis of a data set: indexes that invert each other for any workers, interrupted maps, wrong input."""

import os
import sys

import numpy
import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from curricula import Rows  # noqa: E402

from deepspeed.data import analysis_parts, analyzer  # noqa: E402
from deepspeed.data.analyzer import DistributedDataAnalyzer  # noqa: E402
from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer  # noqa: E402
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset  # noqa: E402
from logs import logged  # noqa: E402
from processes import open_files  # noqa: E402
from refusals import refused  # noqa: E402

ROWS = 1000
VALUES = {"length": numpy.random.default_rng(1).integers(-5, 300, ROWS), "number": numpy.arange(ROWS)[::-1] * 7}


def files_of(folder, name):
    """The merged files of a metric, bytes by name."""
    found = {path.name: path.read_bytes() for path in (folder / name).iterdir() if path.is_file()}
    assert set(found) == {
        f"{name}_{what}.{end}"
        for what in ("sample_to_metric", "index_to_sample", "index_to_metric", "index_to_sample_percentile_merged")
        for end in ("bin", "idx")
    }
    return found


def analyse(folder, workers=1, rows=None, **options):
    rows = rows or Rows(**VALUES)
    made = [rows.analyzer(folder, num_workers=workers, worker_id=i, **options) for i in range(workers)]
    for one in made:
        one.run_map()
    made[0].run_reduce()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    analyse(folder)
    return folder


def opened(folder, name, what):
    return MMapIndexedDataset(str(folder / name / f"{name}_{what}"))


@pytest.mark.parametrize("name", list(VALUES))
def test_both_indexes_invert_each_other(alone, name):
    by_sample = [row.tolist() for row in opened(alone, name, "sample_to_metric")]
    assert by_sample == [[value] for value in VALUES[name].tolist()]
    values = [row.tolist() for row in opened(alone, name, "index_to_metric")]
    assert values == [[value] for value in sorted(set(VALUES[name].tolist()))]
    samples = opened(alone, name, "index_to_sample")
    assert len(samples) == len(values)
    for (value,), row in zip(values, samples):
        assert row.tolist() == numpy.flatnonzero(VALUES[name] == value).tolist()
    hundredths = opened(alone, name, "index_to_sample_percentile_merged")
    assert len(hundredths) == 100 and hundredths.whole().tolist() == samples.whole().tolist()
    assert set(hundredths.sizes.tolist()) == {10}


@pytest.mark.parametrize(("workers", "threads", "reduce"), [(4, 1, 1), (8, 1, 1), (2, 2, 3)])
def test_the_same_files_for_any_workers(alone, tmp_path, monkeypatch, workers, threads, reduce):
    monkeypatch.setattr(analysis_parts, "BLOCK", 64)  # merged in many blocks
    analyse(tmp_path, workers, num_threads=threads, num_threads_reduce=reduce, batch_size=13)
    for name in VALUES:
        assert files_of(tmp_path, name) == files_of(alone, name)


def test_rows_of_any_type_and_sums(tmp_path):
    class Texts(Rows):
        def __getitem__(self, i):
            return "word " * (i % 5)

    def collate(texts):
        return [text.split() for text in texts]

    def counts(batch):
        return torch.bincount(torch.tensor([len(words) for words in batch]), minlength=5)

    for workers in (1, 3):
        folder = tmp_path / str(workers)
        options = {
            "metric_names": ["words", "counts"],
            "metric_functions": [lambda batch: [len(words) for words in batch], counts],
            "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
            "metric_dtypes": [torch.int32, torch.int64],
            "collate_fn": collate,
        }
        analyse(folder, workers, Texts(a=range(102)), num_threads=2, **options)
        assert opened(folder, "words", "sample_to_metric").whole().tolist() == [i % 5 for i in range(102)]
        assert opened(folder, "counts", "metric_value")[0].tolist() == [21, 21, 20, 20, 20]
    narrow = {**options, "metric_functions": [options["metric_functions"][0], lambda batch: [60 * len(batch)]]}
    narrow["metric_dtypes"] = [torch.int32, torch.int16]  # 102 * 60 fits; 102 * 600 does not
    for workers, value in ((1, 60), (3, 60), (1, 600), (3, 600)):
        narrow["metric_functions"][1] = lambda batch, value=value: [value * len(batch)]
        folder = tmp_path / f"sums{workers}{value}"
        analyse(folder, workers, Texts(a=range(102)), num_threads=2, **narrow)
        assert opened(folder, "counts", "metric_value")[0].tolist() == [102 * value]


def test_samples_in_another_order(alone, tmp_path):
    order = numpy.random.default_rng(2).permutation(ROWS)

    class Shuffled(Rows):
        def __getitem__(self, i):
            return {"index": numpy.array([order[i]]), "row": int(order[i])}

    shuffled = Shuffled(**VALUES)
    functions = [lambda batch, name=name: VALUES[name][batch["row"].numpy()] for name in VALUES]
    analyse(tmp_path / "told", 2, shuffled, metric_functions=functions, num_threads_reduce=2)
    plain = Rows(**{name: one[order] for name, one in VALUES.items()})
    analyse(tmp_path / "given", 3, plain, sample_indices=order.tolist())
    for folder in (tmp_path / "told", tmp_path / "given"):
        assert opened(folder, "length", "sample_to_metric").whole().tolist() == VALUES["length"].tolist()
        for row, wanted in zip(opened(folder, "length", "index_to_sample"), opened(alone, "length", "index_to_sample")):
            assert sorted(row.tolist()) == wanted.tolist()
    twice = [0, *range(ROWS - 1)]
    refused(ValueError, "must name each sample once", analyse, tmp_path / "twice", 1, plain, sample_indices=twice)


class Interrupted(Exception):
    pass


def test_an_interrupted_map_goes_on(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(analyzer, "SAVE_SECONDS", 0)
    rows, seen = Rows(**VALUES), []

    class Counted(Rows):
        def __getitem__(self, i):
            seen.append(i)
            if len(seen) in (300, 777):
                raise Interrupted
            return i

    one = Counted(**VALUES).analyzer(tmp_path)
    refused(Interrupted, "", one.run_map)
    assert not open_files(tmp_path)
    with (tmp_path / "length" / "worker0_thread0" / "length_values").open("ab") as values:
        values.write(b"cut")
    refused(Interrupted, "", one.run_map)
    with logged() as said:
        one.run_map()
    assert any("continues after 770 samples" in text for text in said)
    assert len(seen) < ROWS + 3 * 7, "only batches that were not noted are computed again"
    one.run_reduce()
    for name in VALUES:
        assert files_of(tmp_path, name) == files_of(alone, name)
    before = len(seen)
    one.run_map()
    assert len(seen) == before + ROWS, "a map that has ended begins anew"
    # Another analysis at the same place does not go on with this one's notes.
    seen.clear()
    refused(Interrupted, "", one.run_map)
    with logged() as said:
        rows.analyzer(tmp_path, metric_dtypes=[numpy.int32] * 2).run_map()
    assert any("belongs to another analysis" in text for text in said)


def test_a_map_whose_values_are_lost_begins_anew(alone, tmp_path, monkeypatch):
    """The host has failed, and the end of a file was not written yet."""
    monkeypatch.setattr(analyzer, "SAVE_SECONDS", 0)
    seen = []

    class Counted(Rows):
        def __getitem__(self, i):
            seen.append(i)
            if len(seen) == 300:
                raise Interrupted
            return i

    one = Counted(**VALUES).analyzer(tmp_path)
    refused(Interrupted, "", one.run_map)
    os.truncate(tmp_path / "length" / "worker0_thread0" / "length_values", 16)
    with logged() as said:
        one.run_map()
    assert any("values of some are lost: thread 0 begins anew" in text for text in said)
    one.run_reduce()
    for name in VALUES:
        assert files_of(tmp_path, name) == files_of(alone, name)


def test_numbers_above_those_of_int64_are_sorted():
    values = numpy.array([2**63 + 70000, 2**63, 5], numpy.uint64)
    order, rising = analysis_parts._sorted(values)
    assert order.tolist() == [2, 1, 0] and rising.tolist() == [5, 2**63, 2**63 + 70000]


def test_custom_functions(tmp_path):
    calls = []

    def init(thread_id, names, types, dtypes, save_path, worker_id):
        calls.append(("init", thread_id, names, save_path, worker_id))
        return {"sum": 0}

    def update(data, types, dtypes, functions, results, batch_start_idx=0):
        results["sum"] += int(functions[0](data).sum())

    def reduce(dataset, names, types, save_path, num_workers, num_threads, num_threads_reduce):
        calls.append(("reduce", len(dataset), num_workers, num_threads, num_threads_reduce))

    def finish(types, dtypes, results):
        calls.append(("finish", results["sum"]))

    analyse(tmp_path, custom_map_init=init, custom_map_update=update, custom_map_finalize=finish, custom_reduce=reduce)
    names = list(VALUES)
    total = int(VALUES["length"].sum())
    assert calls == [("init", 0, names, str(tmp_path), 0), ("finish", total), ("reduce", ROWS, 1, 1, 1)]


def test_the_log_estimates_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(analyzer, "TELL_SECONDS", 0)
    with logged() as said:
        analyse(tmp_path)
    assert any("worker 0, thread 0: 497 of 1000 samples are analysed, about 0.0 minutes remain" in one for one in said)
    assert any(one.startswith("percentiles of the metric length: {1: ") for one in said), said


def test_one_call_and_ranks(alone, tmp_path):
    Rows(**VALUES).analyzer(tmp_path / "a").run_map_reduce()
    rows = Rows(length=VALUES["length"])
    functions = [lambda batch: rows.values["length"][batch.numpy()]]
    options = {"metric_functions": functions, "metric_types": ["single_value_per_sample"], "batch_size": 50}
    DistributedDataAnalyzer(
        rows, num_threads=2, metric_names=["length"], save_path=str(tmp_path / "b"), **options
    ).run_map_reduce()
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert files_of(folder, "length") == files_of(alone, "length")
    refused(RuntimeError, "needs deepspeed.init_distributed", rows.analyzer(tmp_path, num_workers=2).run_map_reduce)


def test_wrong_input(tmp_path):
    rows = Rows(a=range(20))
    refused(ValueError, "have 1, 1, 2 and 1 items: each metric has one of each", rows.analyzer, tmp_path,
            metric_types=["single_value_per_sample"] * 2)  # fmt: skip
    refused(ValueError, "type 'mean' of the metric 'a' is neither", rows.analyzer, tmp_path, metric_types=["mean"])
    refused(ValueError, "metric_dtypes has torch.float32: metrics must be whole", rows.analyzer, tmp_path,
            metric_dtypes=[torch.float32])  # fmt: skip
    for name in ("num_workers", "num_threads", "num_threads_reduce", "batch_size"):
        refused(ValueError, f"{name} is 0: it must be 1 or more", DataAnalyzer, rows, **{name: 0})
    refused(ValueError, "specific_threads has 2: the 2 threads", DataAnalyzer, rows, num_threads=2, specific_threads=[2])
    refused(ValueError, "worker_id 2 is none of the 2 workers", DataAnalyzer, rows, num_workers=2, worker_id=2)
    half = rows.analyzer(tmp_path / "half", metric_functions=[lambda batch: batch / 2])
    refused(ValueError, "'a' has given float32 values that are not whole numbers of int64", half.run_map)
    few = rows.analyzer(tmp_path / "few", metric_functions=[lambda batch: [1, 2]])
    refused(ValueError, "'a' has given 2 values for 7 samples", few.run_map)
    failing = rows.analyzer(tmp_path / "few", num_threads=2, metric_functions=[lambda batch: [1, 2]])
    refused(RuntimeError, "the map has failed on thread 0, 1", failing.run_map)
    refused(FileNotFoundError, "worker1_thread0 has no results of the metric 'a': run the map", analyse,
            tmp_path / "parts", custom_reduce=lambda *_: rows.analyzer(tmp_path / "parts", num_workers=2).run_reduce(),
            rows=rows)  # fmt: skip
    rows.analyzer(tmp_path / "other").run_map()
    other = Rows(a=range(30)).analyzer(tmp_path / "other")
    refused(ValueError, "have 20 samples, and the data set has 30", other.run_reduce)


@pytest.mark.parametrize("name", ["", "..", "../elsewhere", "/tmp/elsewhere"])
def test_a_metric_name_that_leaves_the_folder_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="cannot be a folder of save_path"):
        DataAnalyzer(range(4), 1, 0, 1, 1, [], 1, [name], [len], ["single_value_per_sample"], [int], str(tmp_path))
