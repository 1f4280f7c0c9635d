"""The order of samples under a curriculum: one order for all ranks and workers, states, difficulties, wrong input."""

import copy
import itertools
import os
import pickle
import random
import sys

import numpy
import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from curricula import Rows, metric, sampling  # noqa: E402

from deepspeed.data import clusters  # noqa: E402
from deepspeed.data.loader import ResumableDataLoader  # noqa: E402
from deepspeed.data.sampler import CurriculumSampler  # noqa: E402
from logs import logged  # noqa: E402
from refusals import refused  # noqa: E402

SAMPLES, STEP = 240, 16  # of the data set, of a step
RANDOM = numpy.random.default_rng(5)
LENGTHS, RARITY = RANDOM.integers(10, 100, SAMPLES), RANDOM.integers(0, 50, SAMPLES)


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analysis")
    return Rows(length=LENGTHS, rarity=RARITY).analysed(folder), str(folder)


def settings_of(analysed, folder, **more):
    path = analysed[1]
    metrics = {"length": metric(path, "length", 30, 100, 20, 5), "rarity": metric(path, "rarity", 20, 50, 12, 2)}
    return sampling(folder, metrics, **{"num_epochs": 20, **more})


def loaders(analysed, folder, ranks=1, accumulation=2, workers=0, settings=None, seed=7):
    settings = settings or settings_of(analysed, folder)
    curriculum = {"settings": settings, "accumulation_steps": accumulation, "seed": seed}
    micro = STEP // ranks // accumulation
    share = {"num_local_io_workers": workers, "data_parallel_world_size": ranks, "curriculum": curriculum}
    rows = analysed[0]
    return [ResumableDataLoader(rows, micro, False, None, data_parallel_rank=rank, **share) for rank in range(ranks)]


def steps_of(made, count, accumulation=2):
    """The samples of the next steps, in order: of each micro-batch those of all ranks."""
    found = []
    for _ in range(count):
        found.append([n for _ in range(accumulation) for one in made for n in next(one).tolist()])
    return found


def test_one_order_for_all_ranks_and_workers(analysed, tmp_path):
    wanted = steps_of(loaders(analysed, tmp_path), 40)
    for ranks, workers in itertools.product([1, 2, 4, 8], [0, 2]):
        accumulation = 1 if ranks == 8 else 1 + (ranks + workers) % 4 // 2
        made = loaders(analysed, tmp_path, ranks, accumulation, workers)
        assert steps_of(made, 40, accumulation) == wanted, (ranks, accumulation, workers)
    assert steps_of(loaders(analysed, tmp_path, seed=8), 40) != wanted


def test_difficulties_follow_the_schedules(analysed, tmp_path):
    found = steps_of(loaders(analysed, tmp_path), 60)
    for step, samples in enumerate(found, 1):
        longest = min(int(step / 20 * 70 + 30) // 5 * 5, 100)
        rarest = min(int(step / 12 * 30 + 20) // 2 * 2, 50)
        assert max(LENGTHS[samples]) <= longest and max(RARITY[samples]) <= rarest, step
    assert max(LENGTHS[found[5]]) > 30 and len(set(sum(found[20:], []))) == SAMPLES


def test_at_the_maximum_each_sample_comes_once_in_an_epoch(analysed, tmp_path):
    made = loaders(analysed, tmp_path)
    found = sum(steps_of(made, 100), [])
    last, _, _, drawn, *_ = made[0].curriculum.state_dict()["order"]
    assert last, "all clusters have joined"
    end = len(found) - drawn  # where the last round began
    for start in (end - SAMPLES, end - 2 * SAMPLES):
        assert sorted(found[start : start + SAMPLES]) == list(range(SAMPLES))


def test_no_sample_of_a_cluster_comes_twice_before_all_have_come(analysed, tmp_path):
    made = loaders(analysed, tmp_path)
    sampler = made[0].curriculum
    found = sum(steps_of(made, 60), [])
    start = 0
    for size in sampler._clusters.sizes:
        members = set(sampler._clusters.samples[start : start + size].tolist())
        own = [one for one in found if one in members]
        for at in range(0, len(own) - size + 1, size):
            assert set(own[at : at + size]) == members
        start += size


def test_runs_that_are_killed_go_on(analysed, tmp_path):
    wanted = steps_of(loaders(analysed, tmp_path), 45)
    chance, found, state = random.Random(3), [], None
    while len(found) < 45:
        ranks, accumulation, workers = chance.choice([(1, 1, 0), (2, 2, 0), (4, 2, 0), (1, 2, 1), (8, 2, 0)])
        made = loaders(analysed, tmp_path, ranks, accumulation, workers)
        if state is not None:
            for one in made:
                one.load_state_dict(copy.deepcopy(state))
        found += steps_of(made, chance.randint(0, 4), accumulation)
        state = made[0].state_dict()
        assert all(one.state_dict()["sampler"] == state["sampler"] for one in made), "equal on all ranks"
    assert found[:45] == wanted


def test_a_state_in_the_middle_of_a_step(analysed, tmp_path):
    wanted = sum(steps_of(loaders(analysed, tmp_path), 12), [])
    (first,) = loaders(analysed, tmp_path, accumulation=4)
    found = [n for _ in range(4 * 6 + 2) for n in next(first).tolist()]
    made = loaders(analysed, tmp_path, ranks=2, accumulation=2)
    for one in made:
        one.load_state_dict(first.state_dict())
    found += [n for one in made for n in next(one).tolist()]
    assert found == wanted[: len(found)]


def test_what_workers_prepared_does_not_count(analysed, tmp_path):
    plain, ahead = loaders(analysed, tmp_path)[0], loaders(analysed, tmp_path, workers=2)[0]
    for _ in range(7):
        next(plain), next(ahead)
        assert plain.state_dict()["sampler"] == ahead.state_dict()["sampler"]


def test_post_processing_gets_the_difficulties_of_its_batch(analysed, tmp_path):
    seen = []
    (made,) = loaders(analysed, tmp_path, workers=2)
    made.post_process_func = lambda batch, state: seen.append(state) or batch
    steps_of([made], 25)
    for i, state in enumerate(seen):
        step = i // 2 + 1
        assert state["curriculum_step"] == step and state["consumed_samples"] == 8 * (i + 1)
        assert state["current_difficulties"]["rarity"] == min(int(step / 12 * 30 + 20) // 2 * 2, 50)


def test_a_loop_ends_after_its_epochs_and_the_next_one_goes_on(analysed, tmp_path):
    settings = settings_of(analysed, tmp_path, num_epochs=2)
    (made,) = loaders(analysed, tmp_path, settings=settings)
    assert len(made) == 2 * SAMPLES // 8
    wanted = sum(steps_of(loaders(analysed, tmp_path), 60), [])
    first, second = ([n for batch in made for n in batch.tolist()] for _ in range(2))
    assert len(first) == 2 * SAMPLES and first + second == wanted


def test_accumulation_that_changes(analysed, tmp_path):
    (made,) = loaders(analysed, tmp_path, workers=1)
    steps_of([made], 3)
    made.set_sizes(made.batch_size, 1)
    next(made)
    assert made.curriculum.state_dict()["curriculum_step"] == 4
    next(made)
    assert made.curriculum.state_dict()["curriculum_step"] == 5


def test_percentiles_and_one_cluster(analysed, tmp_path):
    options = {"difficulty_type": "percentile", "index_to_metric_path": None}
    by_percentile = {"length": metric(analysed[1], "length", 10, 100, 10, 10, **options)}
    found = steps_of(loaders(analysed, tmp_path, settings=sampling(tmp_path, by_percentile)), 12)
    rank = numpy.argsort(numpy.argsort(LENGTHS, kind="stable"))
    for step, samples in enumerate(found, 1):
        share = min(int(step / 10 * 90 + 10) // 10 * 10, 100)
        assert max(rank[samples]) < SAMPLES * share // 100
    single = {"cut": {**metric("", "cut", 8, 64, 10, 8), "clustering_type": "single_cluster"}}
    (made,) = loaders(analysed, None, settings=sampling(None, single))
    assert sorted(sum(steps_of([made], SAMPLES // STEP), [])) == list(range(SAMPLES))
    assert made.curriculum.state_dict()["current_difficulties"] == {"cut": 64}


def custom(analysed, folder, **more):
    metrics = {"length": {**metric(analysed[1], "length", 30, 100, 1), "schedule_type": "custom", **more}}
    return sampling(folder, metrics)


def test_schedules_of_the_user(analysed, tmp_path):
    (made,) = loaders(analysed, tmp_path, settings=custom(analysed, tmp_path))
    refused(RuntimeError, "no function gives the difficulty", next, made)
    schedule = {"length": lambda step: min(100, 30 + 10 * step)}
    made.set_curriculum_schedules(schedule)
    found = steps_of([made], 12)
    assert all(max(LENGTHS[samples]) <= 30 + 10 * step for step, samples in enumerate(found, 1))
    state = made.state_dict()
    (other,) = loaders(analysed, tmp_path, settings=custom(analysed, tmp_path))
    other.load_state_dict(state)
    other.set_curriculum_schedules(schedule)
    assert steps_of([other], 9) == steps_of([made], 9)
    change = made.set_curriculum_schedules
    refused(ValueError, "falls from 60 to 50 at step 2", change, {"length": lambda step: 70 - 10 * step})
    refused(ValueError, "'width' is not a metric of the curriculum. .* are length", change, {"width": min})
    refused(TypeError, "is a int: it must be a function", change, {"length": 7})
    single = custom(analysed, tmp_path, clustering_type="single_cluster")
    (made,) = loaders(analysed, tmp_path, settings=single)
    made.set_curriculum_schedules({"length": lambda step: 30 + step % 5})
    steps_of([made], 5)
    assert made.curriculum.state_dict()["current_difficulties"] == {"length": 30}


def test_states_are_small_and_clusters_few(tmp_path, monkeypatch):
    monkeypatch.setattr(clusters, "MOST_CLUSTERS", 50)
    rows = Rows(value=numpy.arange(4000)).analysed(tmp_path, batch_size=4000)
    settings = sampling(tmp_path, {"value": metric(str(tmp_path), "value", 100, 4000, 3900)})
    sampler = CurriculumSampler(len(rows), settings, 4, 1, 1, 0, 1)
    assert 40 <= len(sampler._clusters.sizes) <= 51
    batches = iter(sampler)
    for step in range(1, 1500):
        assert max(next(batches)) <= 100 + step
        sampler.used()
    assert len(pickle.dumps(sampler.state_dict())) < 2000
    # With as many clusters as there may be, and numbers of any size.
    state = (True, 1000, 0, 2**40, [2**40 + i for i in range(1000)], [2**40 + i for i in range(1000)])
    assert len(pickle.dumps({**sampler.state_dict(), "order": state})) < 64 * 1024


def test_clusters_are_written_once(analysed, tmp_path):
    loaders(analysed, tmp_path, ranks=4)
    (written,) = tmp_path.glob("*.json")
    about = [(path.name, path.stat().st_mtime_ns) for path in sorted(tmp_path.glob("clusters*.*"))]
    loaders(analysed, tmp_path, ranks=2)
    assert [(path.name, path.stat().st_mtime_ns) for path in sorted(tmp_path.glob("clusters*.[!l]*"))] == [
        one for one in about if not one[0].endswith("lock")
    ]
    assert written.exists()


def test_a_state_of_the_published_sampler(analysed, tmp_path):
    state = {
        "batch": [3, 4],
        "consumed_samples": 9 * STEP,
        "curriculum_step": 9,
        "current_difficulties": {"length": 60, "rarity": 42},
        "data_cluster_paths": ["a"],
        "data_cluster_current_position": [17],
        "np_rng_state": ("MT19937", numpy.zeros(624, numpy.uint32), 0, 0, 0.0),
    }
    (made,) = loaders(analysed, tmp_path)
    with logged() as said:
        made.load_state_dict({"sampler": state})
    assert any("step 9 and 144 samples are restored; its random generator" in text for text in said), said
    (samples,) = steps_of([made], 1)
    assert max(LENGTHS[samples]) <= 65 and made.curriculum.state_dict()["curriculum_step"] == 10


def test_an_analysis_that_has_changed(analysed, tmp_path):
    (made,) = loaders(analysed, tmp_path)
    steps_of([made], 5)
    state = made.state_dict()
    settings = settings_of(analysed, tmp_path)
    settings["curriculum_learning"]["curriculum_metrics"]["length"]["min_difficulty"] = 40
    (other,) = loaders(analysed, tmp_path, settings=settings)
    other.load_state_dict(state)
    with logged() as said:
        next(other)
    assert any("continues with step 6" in text for text in said)


def test_a_curriculum_that_comes_or_goes(analysed, tmp_path):
    plain = ResumableDataLoader(analysed[0], 8, False, None, num_local_io_workers=0)
    next(plain)
    (made,) = loaders(analysed, tmp_path)
    for one, other, text in [(made, plain, "it begins with its first step"), (plain, made, "its data begin anew")]:
        with logged() as said:
            one.load_state_dict(other.state_dict())
        assert any(text in line for line in said)


# ---- a data set with a state -----------------------------------------------------------------------------------------
class Counting(torch.utils.data.IterableDataset):
    def __init__(self):
        self.at = self.begun = 0

    def __iter__(self):
        self.begun += 1
        while self.at < 40:
            self.at += 1
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_data_set_with_a_state_is_saved_along():
    first = ResumableDataLoader(Counting(), 4, False, None)
    before = [next(first).tolist() for _ in range(3)]
    state = first.state_dict()
    data = Counting()
    second = ResumableDataLoader(data, 4, False, None)
    second.load_state_dict(state)
    assert sum(before, []) + [n for batch in second for n in batch.tolist()] == list(range(40))
    assert data.begun == 1, "nothing was read again"

    class Asking(Counting):
        def state_dict(self, num_samples):
            raise AssertionError("nobody knows that number")

    assert "dataset" not in ResumableDataLoader(Asking(), 4, False, None).state_dict()


# ---- wrong input -----------------------------------------------------------------------------------------------------
def test_wrong_input(analysed, tmp_path):
    def made(rows=analysed[0], top=(), **changes):
        settings = settings_of(analysed, tmp_path)
        settings["curriculum_learning"]["curriculum_metrics"]["length"].update(changes)
        settings["curriculum_learning"].update(top)
        return loaders((rows, analysed[1]), tmp_path, settings=settings)

    refused(ValueError, "analysis .*length_index_to_sample .*240 samples, and the training data set has 100", made,
            Rows(length=LENGTHS[:100]))  # fmt: skip
    refused(ValueError, r"curriculum_metrics.length: min_difficulty 101 is above max_difficulty 100", made,
            min_difficulty=101)  # fmt: skip
    refused(ValueError, "no samples have length at most 5 and rarity at most", made, min_difficulty=5, max_difficulty=6)
    few = int(((LENGTHS <= 13) & (RARITY <= 22)).sum())
    assert 0 < few < STEP
    told = f"{few} samples have length at most 13 and .* a step takes 16 samples: raise min_difficulty"
    refused(ValueError, told, made, min_difficulty=13, max_difficulty=14)
    refused(ValueError, "length.index_to_sample_path is missing: run DataAnalyzer", made, index_to_sample_path=None)
    refused(FileNotFoundError, "nowhere.idx of the metric 'length' is missing", made, index_to_sample_path="nowhere")
    refused(ValueError, "data_cluster_path is missing", made, top={"data_cluster_path": None})
    refused(ValueError, "max_difficulty 101 is above 100", made, difficulty_type="percentile", max_difficulty=101)
    other = f"{analysed[1]}/rarity/rarity_index_to_metric"
    refused(ValueError, "values of the metric 'length', and .* lists of samples", made, index_to_metric_path=other)
    wrong = f"{analysed[1]}/rarity/rarity_sample_to_metric"
    refused(ValueError, "does not list each of the 240 samples once", made, index_to_sample_path=wrong)
    curriculum = {"settings": settings_of(analysed, tmp_path), "accumulation_steps": 1, "seed": 1}
    refused(ValueError, "decides the order of samples, and so does an IterableDataset", ResumableDataLoader,
            Counting(), 4, False, None, curriculum=curriculum)  # fmt: skip
    (good,) = made()
    refused(KeyError, "has no curriculum_step", good.curriculum.load_state_dict, {"consumed_samples": 3})
