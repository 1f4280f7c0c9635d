"""The data loader: shares of the ranks, epochs, positions, samplers, iterable data, wrong input."""

import collections
import gc
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, SequentialSampler

from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.utils import RepeatingLoader as FromUtils
from places import ROOT
from refusals import refused


class Numbers(Dataset):
    """Sample i is i; counts what is read."""

    def __init__(self, length):
        self.length = length
        self.reads = collections.Counter()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads[index] += 1
        return index


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def loader(dataset, batch_size=4, world=1, rank=0, **kwargs):
    kwargs.setdefault("num_local_io_workers", 0)  # reads are counted in this process
    return DeepSpeedDataLoader(
        dataset, batch_size, False, rank, None, data_parallel_world_size=world, data_parallel_rank=rank, **kwargs
    )


def epoch(source):
    return [batch.tolist() for batch in source]


def flat(batches):
    return [sample for batch in batches for sample in batch]


class WhoReads(Numbers):
    def __getitem__(self, index):
        return torch.utils.data.get_worker_info() is not None


def test_two_workers_prepare_batches_unless_told_otherwise():
    default = loader(WhoReads(8), num_local_io_workers=None)
    assert default.dataloader.num_workers == default.num_local_io_workers == 2 and all(flat(epoch(default)))
    assert not any(flat(epoch(loader(WhoReads(8)))))
    stream = loader(Stream(8), num_local_io_workers=None)  # each worker would yield all of it
    assert stream.dataloader.num_workers == 0 and flat(epoch(stream)) == list(range(8))


# ---- shares --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shares_are_disjoint_and_complete(world):
    shares = [flat(epoch(loader(Numbers(24), 4, world, rank))) for rank in range(world)]
    assert [len(share) for share in shares] == [24 // world] * world and sorted(sum(shares, [])) == list(range(24))


@pytest.mark.parametrize("world, length", [(2, 25), (3, 10), (4, 5)])
def test_a_remainder_repeats_samples_or_is_dropped(world, length):
    shares = [flat(epoch(loader(Numbers(length), 2, world, rank))) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1, "ranks must take the same number of steps"
    assert set(sum(shares, [])) == set(range(length)) and len(sum(shares, [])) - length < world

    dropping = [loader(Numbers(length), 1, world, rank, dataloader_drop_last=True) for rank in range(world)]
    shares = [flat(epoch(one)) for one in dropping]
    assert {len(share) for share in shares} == {length // world} == {len(one) for one in dropping}
    assert len(set(sum(shares, []))) == len(sum(shares, [])), "without repeats"


def test_length_counts_batches():
    assert len(loader(Numbers(24), 4, 2)) == 3 and len(loader(Numbers(26), 4, 2)) == 4
    assert len(loader(Numbers(26), 4, 2, dataloader_drop_last=True)) == 3
    assert [len(batch) for batch in epoch(loader(Numbers(26), 4, 2))] == [4, 4, 4, 1]


def test_every_epoch_has_its_own_order_and_is_reproducible():
    first, again = loader(Numbers(32)), loader(Numbers(32))
    orders = [epoch(first) for _ in range(3)]
    assert orders == [epoch(again) for _ in range(3)] and len({tuple(flat(order)) for order in orders}) == 3
    assert all(sorted(flat(order)) == list(range(32)) for order in orders)


def test_next_without_a_loop():
    walked, called = loader(Numbers(12)), loader(Numbers(12))
    expected = epoch(walked)
    assert [next(called).tolist() for _ in range(3)] == expected
    refused(StopIteration, "", next, called)
    assert next(called).tolist() == epoch(walked)[0], "after the end the next epoch begins"


def test_the_loader_leaves_the_global_random_numbers_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(2):
        epoch(loader(Numbers(8)))
    assert torch.equal(before, torch.get_rng_state())


def test_timer_starts_before_each_batch():
    starts = []
    source = DeepSpeedDataLoader(Numbers(12), 4, False, 0, SimpleNamespace(start=lambda: starts.append("start")))
    next(source)
    assert len(starts) == 1
    epoch(source)
    assert len(starts) == 1 + 3 + 1  # the last one finds the end


def test_collate_workers_and_post_processing():
    source = loader(Numbers(8), 4, collate_fn=lambda samples: sum(samples))
    assert sum(source) == sum(range(8))
    assert epoch(loader(Numbers(16), 4, num_local_io_workers=2)) == epoch(loader(Numbers(16), 4))
    source = loader(Numbers(8), 4)
    source.post_process_func = lambda batch, state: (batch.sum(), state)
    assert [state for _, state in source] == [{}, {}]


class Drawn(Numbers):
    """Sample i is a number that whoever reads it has drawn."""

    def __getitem__(self, index):
        return torch.randint(2**60, ()).item() if torch.utils.data.get_worker_info() else None


def drawn(seed, rank=0, epochs=1, length=8):
    torch.manual_seed(seed)
    source = loader(Drawn(length), 2, 2, rank, num_local_io_workers=2)
    return [sorted(flat(epoch(source))) for _ in range(epochs)]


def test_random_numbers_of_workers_depend_on_seed_rank_worker_and_epoch():
    first = drawn(1, epochs=2)
    everything = sum([*first, *drawn(1, rank=1), *drawn(2)], [])
    assert len(set(everything)) == len(everything) == 4 * 4
    assert drawn(1, epochs=2) == first


# ---- position ------------------------------------------------------------------------------------------------------


class EndsItsWorker(Numbers):
    """A worker that reads a sample ends as ``how`` says."""

    def __init__(self, length, how):
        super().__init__(length)
        self.how = how

    def __getitem__(self, index):
        self.how()


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how, end", [(killed, "by signal SIGKILL"), (lambda: os._exit(7), "with exit code 7")])
def test_the_error_says_how_a_worker_ended(how, end):
    source = loader(EndsItsWorker(8, how), 2, num_local_io_workers=1)
    refused(RuntimeError, rf"have ended: process \d+ {end}", epoch, source)


@pytest.mark.sample("values")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", range(0, 17, 2))
def test_resume_goes_on_with_the_next_batch_and_reads_nothing_before(stop, workers):
    whole = loader(Numbers(25), 4, num_local_io_workers=workers)  # 7 batches
    expected = [epoch(whole) for _ in range(3)]

    first = loader(Numbers(25), 4, num_local_io_workers=workers)
    repeating = RepeatingLoader(first)
    for _ in range(stop):
        next(repeating)
    state = first.state_dict()
    # A full epoch stays "all batches handed out" until somebody asks for more.
    assert state["epoch"] * 7 + state["batches"] == stop

    data = Numbers(25)
    second = loader(data, 4, num_local_io_workers=workers)
    second.load_state_dict(state)
    rest = [next(iterator).tolist() for iterator in [RepeatingLoader(second)] for _ in range(21 - stop)]
    assert rest == sum(expected, [])[stop:]
    if not workers:
        assert sum(data.reads.values()) == len(flat(rest))


def test_resume_by_loop():
    whole, first, second = loader(Numbers(20)), loader(Numbers(20)), loader(Numbers(20))
    expected = [epoch(whole), epoch(whole)]
    for k, _ in enumerate(first):
        if k == 1:
            break
    second.load_state_dict(first.state_dict())
    assert epoch(second) == expected[0][2:] and epoch(second) == expected[1]


def test_a_loop_left_in_the_middle_is_followed_by_the_next_epoch():
    whole, source = loader(Numbers(20)), loader(Numbers(20))
    expected = [epoch(whole), epoch(whole)]
    for _ in source:
        break
    assert epoch(source) == expected[1]


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("replacement", [False, True])
def test_resume_with_a_random_sampler(own_generator, replacement):
    def make():
        data = Numbers(40)
        generator = torch.Generator() if own_generator else None
        return loader(data, 4, data_sampler=RandomSampler(data, replacement=replacement, generator=generator))

    torch.manual_seed(3)
    whole = make()
    expected = [epoch(whole), epoch(whole)]

    torch.manual_seed(3)
    first = make()
    for _ in range(4):
        next(first)
    state, random_state = first.state_dict(), torch.get_rng_state()

    second = make()
    second.load_state_dict(state)
    torch.set_rng_state(random_state)  # as a checkpoint does
    assert epoch(second) == expected[0][4:] and epoch(second) == expected[1]


def test_own_sampler_decides_the_order():
    data = Numbers(10)
    source = loader(data, 4, world=2, rank=1, data_sampler=SequentialSampler(data))
    assert epoch(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    source.load_state_dict({"epoch": 0, "batches": 1})
    assert epoch(source) == [[4, 5, 6, 7], [8, 9]]


def test_wrong_state():
    refused(KeyError, "has no batches", loader(Numbers(4)).load_state_dict, {"epoch": 1})


# ---- iterable data -------------------------------------------------------------------------------------------------


def test_iterable_data_passes_through_and_resumes():
    source = loader(Stream(10), 4, world=2, rank=1)
    assert epoch(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    next(source), next(source)
    resumed = loader(Stream(10), 4)
    resumed.load_state_dict(source.state_dict())
    assert resumed.state_dict()["epoch"] == 1 and epoch(resumed) == [[8, 9]]
    refused(TypeError, "", len, loader(Stream(10), 4))


def test_iterable_data_shorter_than_the_position():
    source = loader(Stream(4), 4)
    source.load_state_dict({"epoch": 0, "batches": 5})
    assert epoch(source) == []


# ---- another number of ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "then, now", [((4, 2), (1, 8)), ((2, 3), (3, 2)), ((1, 5), (4, 1)), ((3, 2), (3, 4)), ((2, 2), (2, 2))]
)
def test_another_number_of_ranks_goes_on_with_unseen_samples(then, now, drop_last):
    """``then`` and ``now``: ranks and batch size."""

    def ranks(world, size):
        return [
            loader(Numbers(41), size, world=world, rank=rank, dataloader_drop_last=drop_last) for rank in range(world)
        ]

    saving = ranks(*then)
    for ready in saving:
        epoch(ready)
    seen = [sample for _ in range(2) for ready in saving for sample in next(ready).tolist()]
    resumed = ranks(*now)
    for ready in resumed:
        ready.load_state_dict(saving[0].state_dict())
    first = [sample for ready in resumed for sample in next(ready).tolist()]
    assert not set(first) & set(seen)
    # Once more, in the middle of the middle.
    again = ranks(*then)
    for ready in again:
        ready.load_state_dict(resumed[0].state_dict())
    everything = seen + first + [sample for ready in again for sample in flat(epoch(ready))]
    if not drop_last:
        assert set(everything) == set(range(41)) and len(everything) - 41 < then[0]
    else:
        assert 41 - then[0] * then[1] <= len(set(everything)) == len(everything)
    # The next epoch is a whole one, the same that a run without a break would have.
    assert [epoch(ready) for ready in again] == [epoch(straight_on(ready)) for ready in saving]


def straight_on(ready):
    """The loader at its next epoch."""
    ready.load_state_dict({"epoch": ready.epoch + 1, "batches": 0})
    return ready


# ---- repeating -----------------------------------------------------------------------------------------------------


def test_repeating_loader():
    assert FromUtils is RepeatingLoader
    endless = RepeatingLoader([1, 2, 3])
    assert iter(endless) is endless and [next(endless) for _ in range(8)] == [1, 2, 3, 1, 2, 3, 1, 2]
    refused(StopIteration, "", next, RepeatingLoader([]))


# ---- wrong input ---------------------------------------------------------------------------------------------------


def test_wrong_input():
    for size in (0, -1, 2.5, None, True):
        refused(ValueError, "batch_size must be a whole number", loader, Numbers(4), size)
    refused(ValueError, "is empty", loader, Numbers(0))
    refused(
        ValueError,
        "7 samples for 2 data-parallel ranks.*dataloader_drop_last",
        loader,
        Numbers(7),
        4,
        2,
        dataloader_drop_last=True,
    )
    sampler = SequentialSampler([1])
    refused(ValueError, "IterableDataset decides the order of its samples", loader, Stream(4), data_sampler=sampler)
    for given, text in [
        ({"curriculum": True}, "deepspeed_dataloader_config has curriculum; its keys are curriculum_learning"),
        ({"curriculum_learning": True}, "lacks data_efficiency, gradient_accumulation_steps"),
    ]:
        refused(ValueError, text, loader, Numbers(4), deepspeed_dataloader_config=given)


# ---- worker processes ------------------------------------------------------------------------------------------------
def in_a_cycle():
    """An iterator in the middle of an epoch, whose loader only the garbage collector frees; its workers."""
    made = loader(Numbers(64), num_local_io_workers=2)
    next(made)
    made.me = made
    return made._batches_now._workers


def test_workers_end_by_themselves_when_the_collector_frees_their_iterator():
    """They would be waited for, 5 s each, and then killed."""
    gc.disable()
    try:
        workers = in_a_cycle()
        assert all(worker.is_alive() for worker in workers)
        gc.collect()
    finally:
        gc.enable()
    assert [worker.exitcode for worker in workers] == [0, 0]


IN_A_CHILD = """
import gc, os, sys
sys.path[:0] = sys.argv[1:]
from test_loader import in_a_cycle

gc.disable()
workers = in_a_cycle()
if os.fork() == 0:
    gc.collect()
    os._exit(0)
os.wait()
assert all(worker.is_alive() for worker in workers)
gc.collect()
assert [worker.exitcode for worker in workers] == [0, 0]
"""


def test_a_forked_child_leaves_the_workers_of_its_parent_alone():
    # Python 3.12 warns of every fork of a process with threads.
    folders = os.path.dirname(__file__), os.path.join(ROOT, "tests")
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", IN_A_CHILD, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
