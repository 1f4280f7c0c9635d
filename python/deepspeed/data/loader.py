"""The loader of ``deepspeed.initialize(training_data=...)``: this rank's share of a data set, with a saved position."""

import contextlib
import copy
import hashlib
import inspect
import itertools
import multiprocessing

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.data.loader_workers import SeededBatches, end_with, next_of
from deepspeed.data.sampler import CurriculumSampler
from deepspeed.log import logger

SEED = 0
WORKERS = 2  # for each rank


class ResumableDataLoader:
    """Batches of this rank's share of a data set, epoch after epoch, with a position that can be saved.

    dataset:     A map-style data set (``__getitem__``, ``__len__``) is shuffled anew in every epoch and dealt to the
                 data-parallel ranks: their shares do not overlap, and together they are the data set. All ranks get the
                 same number of samples. If the number of ranks does not divide the data set, the last ranks repeat
                 samples from the start of the epoch's order, or with ``dataloader_drop_last`` the remainder is left
                 out. An ``IterableDataset`` is read as it is on every rank; it must choose the share of its rank
                 itself.
    batch_size:  samples per batch and rank (the micro-batch).
    pin_memory:  copy batches to pinned memory, unless the accelerator is the CPU.
    tput_timer:  an object whose ``start()`` is called before every batch, unless it is ``started``; or None.
    collate_fn:  the ``collate_fn`` of torch.utils.data.DataLoader.
    num_local_io_workers: processes that prepare batches. None means 2. It means 0 for an ``IterableDataset``, because
                 each worker would yield every sample, and in a daemonic process, which may have no children.
    data_sampler: a torch Sampler of indices, which then decides the order and the share of every rank. A sampler with
                 ``start_at`` gives whole batches of this rank; ``batch_size`` is 1 then.
    data_parallel_world_size, data_parallel_rank: the default is the world of all ranks.
    curriculum:  ``settings``, ``accumulation_steps`` and ``seed`` of a ``CurriculumSampler``, which then decides the
                 order, the shares and the length of a loop.

    ``for batch in loader`` reads one epoch, and the next loop reads the next epoch. ``next(loader)`` works as well.
    A data set with ``state_dict()`` and ``load_state_dict(state)`` is part of the position.
    """

    def __init__(
        self,
        dataset,
        batch_size,
        pin_memory,
        tput_timer,
        collate_fn=None,
        num_local_io_workers=None,
        data_sampler=None,
        data_parallel_world_size=None,
        data_parallel_rank=None,
        dataloader_drop_last=False,
        curriculum=None,
    ):
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"the data loader's batch_size must be a whole number >= 1, got {batch_size!r}.")
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.world_size = ranks if data_parallel_world_size is None else data_parallel_world_size
        self.rank = rank if data_parallel_rank is None else data_parallel_rank
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, dataloader_drop_last
        self.tput_timer, self.collate_fn = tput_timer, collate_fn
        if num_local_io_workers is None:
            alone = isinstance(dataset, IterableDataset) or multiprocessing.current_process().daemon
            num_local_io_workers = 0 if alone else WORKERS
        self.num_local_io_workers = num_local_io_workers
        self.phases = None  # the phases of an engine: reading a batch is one of them
        self.post_process_func = None  # callable(batch, sampler state), see engine.set_data_post_process_func
        self.cut = None  # callable(batch) of an engine that trains with shorter sequences at first
        self.data_sampler = self._make_sampler(data_sampler, curriculum)
        self.curriculum = self.data_sampler if curriculum else None
        self.epoch = 0
        self.batches = 0  # batches handed out in this epoch, after its first `_start` samples
        self._start = 0  # samples of this epoch that were handed out before, to other ranks or in other batches
        self.seed = None  # of the random numbers in workers; None: torch's initial seed at the beginning of an epoch
        self._epoch_seed = None  # the seed that this epoch began with
        # The random state from which this epoch's order was drawn, if the epoch does not give it.
        self._order_state = None
        self._batches_now = None  # the iterator of torch's loader; None before the first batch of a loop
        # A generator of its own: otherwise torch's loader draws a seed from the global one each time that it starts.
        self._generator = torch.Generator()
        self._options = {
            "collate_fn": collate_fn,
            "num_workers": self.num_local_io_workers,
            "pin_memory": bool(pin_memory) and get_accelerator().device_name() != "cpu",
            "generator": self._generator,
        }
        self._seeds = None  # of the workers that read a data set by its indices
        if self.num_local_io_workers and self.data_sampler is not None:
            self._seeds = SeededBatches(collate_fn or default_collate, self.num_local_io_workers)
            self._options.update(collate_fn=self._seeds, worker_init_fn=self._seeds.begin)
        self.check_sizes(batch_size, self.curriculum.accumulation_steps if self.curriculum is not None else 1)
        self._make_loader()

    def _make_loader(self):
        """Makes torch's loader, which reads batches of ``batch_size`` samples."""
        if self.data_sampler is None:
            sizes = {"batch_size": self.batch_size, "drop_last": self.drop_last}
            self._behind = None if self.num_local_io_workers else _Behind(self.dataset)
            source = self.dataset if self._behind is None else self._behind
            self.dataloader = DataLoader(source, **sizes, **self._options)
        elif self.curriculum is not None:
            self.dataloader = DataLoader(self.dataset, batch_sampler=self.curriculum, **self._options)
        else:
            self._batch_indices = (
                self.data_sampler
                if self._makes_batches()
                else _BatchIndices(self.data_sampler, self.batch_size, self.drop_last)
            )
            self.dataloader = DataLoader(self.dataset, batch_sampler=self._batch_indices, **self._options)

    def _makes_batches(self):
        return hasattr(self.data_sampler, "start_at")

    def _make_sampler(self, data_sampler, curriculum):
        if curriculum and (data_sampler is not None or isinstance(self.dataset, IterableDataset)):
            owner = "an IterableDataset" if data_sampler is None else "a data_sampler"
            raise ValueError(
                f"a curriculum (data_efficiency.data_sampling.curriculum_learning) decides the order of samples, and "
                f"so does {owner}: leave one of them out, or pass a data set with __getitem__ and __len__."
            )
        if isinstance(self.dataset, IterableDataset):
            if data_sampler is not None:
                raise ValueError(
                    "an IterableDataset decides the order of its samples itself: do not pass a data_sampler with it."
                )
            return None
        if data_sampler is not None:
            return data_sampler
        if len(self.dataset) == 0:
            raise ValueError("the training data set is empty: there are no samples for a batch.")
        if curriculum:
            ranks = {"world_size": self.world_size, "rank": self.rank}
            return CurriculumSampler(len(self.dataset), micro_batch_size=self.batch_size, **ranks, **curriculum)
        share = {"num_replicas": self.world_size, "rank": self.rank, "drop_last": self.drop_last}
        return ShareSampler(self.dataset, shuffle=True, seed=SEED, **share)

    def __len__(self):
        """The number of batches of one whole epoch on this rank. TypeError if the data set has no length."""
        return len(self.dataloader)

    def __iter__(self):
        if self._batches_now is not None and self.batches:  # left in the middle: a new loop is a new epoch
            self._next_epoch()
        self._begin()
        return self

    def __next__(self):
        with contextlib.nullcontext() if self.phases is None else self.phases.inside("data"):
            return self._next()

    def _next(self):
        if self._batches_now is None:
            self._begin()
        if self.tput_timer is not None and not getattr(self.tput_timer, "started", False):
            self.tput_timer.start()
        try:
            batch = next_of(self._batches_now)
        except StopIteration:
            self._next_epoch()
            raise
        self.batches += 1
        if self.curriculum is not None:
            self.curriculum.used()
        if self.post_process_func is not None:
            state = self.data_sampler.state_dict() if hasattr(self.data_sampler, "state_dict") else {}
            batch = self.post_process_func(batch, state)
        return batch if self.cut is None else self.cut(batch)

    def _next_epoch(self):
        self.epoch += 1
        self.batches = self._start = 0
        self._order_state = self._batches_now = self._epoch_seed = None

    def _begin(self):
        """Opens this epoch at batch `self.batches`. It does not read the samples before, if the data set has
        indices."""
        # The generator from which torch draws the first worker's seed; the next workers have the next numbers.
        if self._epoch_seed is None:
            self._epoch_seed = torch.initial_seed() if self.seed is None else self.seed
        told = f"{self._epoch_seed} {self.rank} {self.epoch}"
        self._generator.manual_seed(int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "little", signed=True))
        if self._seeds is not None:
            self._seeds.start(f"{told} {self._start}", self.batches)
        if self.data_sampler is None:
            again = 0 if self._data_has_state() else self.batches
            if self._behind is not None:
                self._behind.start = 0 if self._data_has_state() else self._start
            batches = end_with(iter(self.dataloader))
            if again:
                logger.info("The data set can only be read in order: %d batches are read again to resume.", again)
            for _ in itertools.islice(batches, again):
                pass
            self._batches_now = batches
            return
        if self.curriculum is not None:
            self.curriculum.need_schedules()
            self._batches_now = end_with(iter(self.dataloader))
            return
        if hasattr(self.data_sampler, "set_epoch"):
            self.data_sampler.set_epoch(self.epoch)
        if hasattr(self.data_sampler, "share_after"):
            self.data_sampler.start = self._start
        if not self.batches:
            self._order_state = None if hasattr(self.data_sampler, "set_epoch") else _random_state(self.data_sampler)
        self._batch_indices.start_at(self.batches, self._order_state)
        self._batches_now = end_with(iter(self.dataloader))

    def set_curriculum_schedules(self, functions):
        """See ``CurriculumSampler.set_custom_curriculum_learning_schedule``."""
        self.curriculum.set_custom_curriculum_learning_schedule(functions)
        self._batches_now = None  # what workers have prepared follows the schedule before

    def check_sizes(self, batch_size, accumulation_steps):
        """Raises ValueError if this loader cannot give batches of this size, or a step of that many."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"the data loader's batch_size must be a whole number >= 1, got {batch_size!r}.")
        if self.curriculum is not None:
            self.curriculum.check_sizes(batch_size, accumulation_steps)
        elif batch_size != self.batch_size and self._makes_batches():
            raise ValueError(
                f"the data_sampler ({type(self.data_sampler).__name__}) makes whole batches, so their size cannot "
                f"become {batch_size}: make a loader with another sampler"
            )
        elif self.data_sampler is not None and self.drop_last and hasattr(self.data_sampler, "__len__"):
            if not self._makes_batches() and len(self.data_sampler) < batch_size:
                raise ValueError(
                    f"the data loader would yield no batch: {len(self.dataset)} samples for {self.world_size} "
                    f"data-parallel ranks are fewer than one batch of {batch_size} for each rank, and "
                    "dataloader_drop_last drops them. Add samples, or set dataloader_drop_last to false."
                )

    def set_sizes(self, batch_size, accumulation_steps):
        """Sets the samples of a batch, and the batches of a step, because a curriculum counts steps. The next batch
        begins with the sample behind the last one; workers prepare their batches again."""
        if self.curriculum is not None:
            known = self.curriculum.micro_batch_size, self.curriculum.accumulation_steps
            self.curriculum.micro_batch_size, self.curriculum.accumulation_steps = batch_size, accumulation_steps
            if known != (batch_size, accumulation_steps):
                self._batches_now, self.batch_size = None, batch_size
        elif batch_size != self.batch_size:
            done = self._start + self.batches * self.batch_size * self._sharing()
            in_loop, self._batches_now, self.batch_size = self._batches_now is not None, None, batch_size
            self._make_loader()
            if in_loop or done:
                self._deal_anew(done)

    @property
    def position(self):
        """``(epoch, start, batches)`` of ``state_dict``, which copies the state of the data set as well."""
        return self.epoch, self._start, self.batches

    def state_dict(self):
        """The position: the epoch, and the number of batches handed out in it. Batches that workers have only prepared
        do not count.

        ``seed`` is that of the random numbers of workers, and ``over`` says that the last batch of the epoch was handed
        out. ``start`` samples of the epoch were handed out before, on other numbers of ranks or in batches of other
        sizes. ``sampler`` is the state of a ``CurriculumSampler``, and ``dataset`` that of a data set that has a state.
        """
        state = {
            "epoch": self.epoch,
            "batches": self.batches,
            "order": self._order_state,
            "start": self._start,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "seed": self._epoch_seed,
            "over": self._is_over(),
        }
        if self.curriculum is not None:
            state["sampler"] = self.curriculum.state_dict()
        if self._data_has_state():
            state["dataset"] = copy.deepcopy(self.dataset.state_dict())
        return state

    def _is_over(self):
        """Whether the last batch of this epoch was handed out. False where nobody knows the length of an epoch."""
        if self.data_sampler is None or self.curriculum is not None or not hasattr(self.data_sampler, "__len__"):
            return False
        left = getattr(self.data_sampler, "share_after", lambda start: len(self.data_sampler))(self._start)
        size = 1 if self._makes_batches() else self.batch_size
        return self.batches >= (left // size if self.drop_last else -(-left // size))

    def _data_has_state(self):
        """Whether the position of the data set can be saved as its own state. If workers read it in its order, each
        worker has a state that cannot be read here: such data is read again instead."""
        save, load = (getattr(self.dataset, name, None) for name in ("state_dict", "load_state_dict"))
        if not callable(save) or not callable(load) or self.data_sampler is None and self.num_local_io_workers:
            return False
        try:
            inspect.signature(save).bind()
        except TypeError:  # it needs arguments that are not known here, as in streaming libraries
            return False
        return True

    def load_state_dict(self, state):
        """The next loop (or ``next``) continues with the batch after the saved position, in the same order.

        This is exact for map-style data with the default sampler, with samplers that have ``set_epoch``, and with
        samplers that draw from torch's random numbers. An IterableDataset is read again up to the position, and must
        yield the same samples again.

        If the state was saved with another number of ranks or another batch size, the rest of the epoch's samples is
        divided among the ranks again. A sampler of the user continues with the batch after the same number of samples
        of all ranks. An IterableDataset, which divides itself, continues after the same number of samples of this rank.
        A curriculum continues with the sample after the last one, for any numbers of ranks and batch sizes.
        """
        self._batches_now = None
        if "dataset" in state and self._data_has_state():
            self.dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        if ("sampler" in state) != (self.curriculum is not None):
            logger.warning(
                "The checkpoint has the state of a curriculum, and this run has no curriculum: its data begin anew"
                if self.curriculum is None
                else "The checkpoint has no state of a curriculum, and this run has one: it begins with its first step"
            )
            return
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["sampler"])
            self.epoch, self.batches = state.get("epoch", 0), state.get("batches", 0)
            self._epoch_seed = state.get("seed")
            return
        missing = [key for key in ("epoch", "batches") if key not in state]
        if missing:
            raise KeyError(
                f"the saved position in the data has no {', '.join(missing)}: it was not saved by this loader."
            )
        self.epoch, self.batches, self._order_state = state["epoch"], state["batches"], state.get("order")
        self._start, self._epoch_seed = state.get("start", 0), state.get("seed")
        if state.get("over"):
            self._end_epoch()
            return
        batch_size = state.get("batch_size", self.batch_size)
        sharing = state.get("world_size", self.world_size) if self.data_sampler is not None else 1
        # A sampler of whole batches deals them for whole steps, and a step may have other batches now.
        if (batch_size, sharing) != (self.batch_size, self._sharing()) or hasattr(self.data_sampler, "start_at"):
            self._deal_anew(self._start + self.batches * batch_size * sharing)

    def _deal_anew(self, samples):
        """Continues after ``samples`` of this epoch, counted over all ranks; of an IterableDataset over this one."""
        if hasattr(self.data_sampler, "share_after"):
            self._start, self.batches = samples, 0
            self.data_sampler.set_epoch(self.epoch)
            return
        if self.data_sampler is None and self._behind is not None:
            self._start, self.batches = samples, 0
            return
        at_once = self.batch_size * self._sharing()
        self.batches = samples // at_once
        if samples % at_once:
            logger.warning(
                f"{samples} samples of this epoch were used, and all ranks together now take {at_once} at a time, "
                f"which does not divide that number: {samples % at_once} samples are used again"
            )


    def _sharing(self):
        """The number of ranks that share the samples that positions count: an IterableDataset shares itself out."""
        return 1 if self.data_sampler is None else self.world_size

    def _end_epoch(self):
        """The loop that follows has no batch, as at the end of an epoch, and the one after it is the next epoch."""
        if hasattr(self.data_sampler, "share_after"):
            self.data_sampler.set_epoch(self.epoch)
            self._start, self.batches = 0, -(-self.data_sampler.share_after(0) // self.batch_size)
        else:
            self.batches = len(self._batch_indices)


class ShareSampler(DistributedSampler):
    """A ``DistributedSampler`` that can begin in the middle of an epoch, after the first ``start`` samples of its order
    on any ranks. ``len`` is always that of a whole epoch."""

    start = 0

    def share_after(self, start):
        """The number of samples of each rank after the first ``start`` ones of the order."""
        left = max(0, len(self.dataset) - start)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def __iter__(self):
        if not self.start:
            return super().__iter__()
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        left = order[self.start :]
        if self.drop_last:
            left = left[: len(left) // self.num_replicas * self.num_replicas]
        else:  # every rank gets the same number: some samples from the start of the order come again
            lacking = -len(left) % self.num_replicas
            left = torch.cat([left, *[order] * (lacking // len(order)), order[: lacking % len(order)]])
        return iter(left[self.rank :: self.num_replicas].tolist())


class _Behind(IterableDataset):
    """The samples of an IterableDataset behind the first ``start`` ones."""

    def __init__(self, dataset):
        self.dataset, self.start = dataset, 0

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        return itertools.islice(iter(self.dataset), self.start, None)


class _BatchIndices:
    """A batch sampler that can start in the middle of an epoch without reading samples."""

    def __init__(self, sampler, batch_size, drop_last):
        self._sampler = sampler
        self._batches = BatchSampler(sampler, batch_size, drop_last)
        self._skip = 0
        self._order_state = None

    def start_at(self, skip, order_state):
        """Iterations leave out `skip` batches from now on. A random order is drawn from `order_state`. (This is not for
        the next iteration alone, because torch's loader with workers begins twice.)"""
        self._skip, self._order_state = skip, order_state

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        if self._skip == 0 or self._order_state is None:
            return itertools.islice(iter(self._batches), self._skip, None)
        # The order is drawn from the random state of the first time. The state of the program does not change.
        with torch.random.fork_rng(devices=[]):
            _set_random_state(self._sampler, self._order_state)
            return iter(list(self._batches)[self._skip :])


def _random_state(sampler):
    """The random state from which a sampler without epochs draws: that of torch, and that of its own generator."""
    own = getattr(sampler, "generator", None)
    return {"torch": torch.get_rng_state(), "sampler": own.get_state() if own is not None else None}


def _set_random_state(sampler, state):
    torch.set_rng_state(state["torch"])
    if state["sampler"] is not None:
        sampler.generator.set_state(state["sampler"])
