"""The sampler of a curriculum. It chooses the samples of each micro-batch of this rank."""

import collections
import dataclasses

import numpy

from deepspeed._native import _C
from deepspeed.data.clusters import clusters_of, one_cluster
from deepspeed.data.curriculum import CurriculumScheduler
from deepspeed.log import logger

_PUBLISHED = "np_rng_state"  # a key that only states of the published sampler have


@dataclasses.dataclass(frozen=True)
class _Place:
    """A place in the order, between two micro-batches.

    steps: the number of complete steps.
    samples: the number of samples drawn in the whole run.
    within: the number of samples drawn in the step that has begun.
    order: the state of ``_C.samples.Order`` at the beginning of that step; None before the first draw.
    difficulties: ``{metric: difficulty}`` of the last micro-batch.
    """

    steps: int = 0
    samples: int = 0
    within: int = 0
    order: tuple = None
    difficulties: dict = dataclasses.field(default_factory=dict)


class CurriculumSampler:
    """Micro-batches of a data set for one rank, as lists of sample numbers, from easy to hard.

    A step draws its samples at random from those whose difficulties are at most the difficulties of the step. The
    choice is a function of the seed, the number of the step and the analysis of the metrics. Every rank computes it
    alone, and any numbers of ranks, accumulation steps and workers give the same steps. No sample of a cluster
    (``clusters.py``) comes twice before all samples of the cluster have come. With the difficulty at its maximum each
    sample comes once in an epoch.

    samples: the number of samples of the data set.
    settings: a mapping like the section ``data_sampling``, of which ``num_epochs`` and ``curriculum_learning`` are
        read.
    micro_batch_size, accumulation_steps, world_size: their product is the number of samples of a step.
    rank: the data-parallel rank. seed: ``data_efficiency.seed``.

    An iteration ends after ``num_epochs`` times the data set, and the next one continues. A batch counts when
    ``used()``
    was called for it: states are those after the last batch that was used.
    """

    def __init__(self, samples, settings, micro_batch_size, accumulation_steps, world_size, rank, seed):
        self.samples, self.seed, self.rank, self.world_size = samples, seed, rank, world_size
        self.micro_batch_size, self.accumulation_steps = micro_batch_size, accumulation_steps
        self.num_epochs = settings.get("num_epochs") or 1
        self._curriculum = settings["curriculum_learning"]
        self._metrics, chosen = {}, {}
        for name, metric in self._curriculum["curriculum_metrics"].items():
            self._metrics[name] = _scheduler(name, metric)
            if metric.get("clustering_type") != "single_cluster":
                chosen[name] = (metric, self._metrics[name])
        self._chosen = chosen  # the metrics that choose samples
        self.check_sizes(micro_batch_size, accumulation_steps)
        self._clusters = None
        self._place, self._identity = (
            _Place(),
            None,
        )  # the identity of the clusters to which the place belongs; None: any
        self._ahead = collections.deque()  # places after micro-batches that were given out
        self._find_clusters()

    def check_sizes(self, micro_batch_size, accumulation_steps):
        """ValueError where the data set has fewer samples than a step of these sizes takes."""
        taken = micro_batch_size * accumulation_steps * self.world_size
        if self.samples < taken:
            raise ValueError(
                f"the data set has {self.samples} samples, and a step takes {taken}: lower train_batch_size"
            )

    @property
    def step_samples(self):
        return self.micro_batch_size * self.accumulation_steps * self.world_size

    def __len__(self):
        """The number of micro-batches of one iteration."""
        return self._end_of(0) // (self.micro_batch_size * self.world_size)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict):
        """``{metric: function}``. ``function(step)`` returns the difficulty of a step, and must depend on the step
        alone. The first step is 1."""
        for name, function in schedule_func_dict.items():
            scheduler = self._metrics.get(name)
            if scheduler is None or scheduler.get_state()["schedule_type"] != "custom":
                kind = "is not a metric of the curriculum" if scheduler is None else "has no schedule_type 'custom'"
                custom = [one for one, of in self._metrics.items() if of.get_state()["schedule_type"] == "custom"]
                raise ValueError(
                    f"set_custom_curriculum_learning_schedule: {name!r} {kind}. The metrics that have it are "
                    f"{', '.join(custom) or 'none'}."
                )
            if not callable(function):
                raise TypeError(
                    f"the schedule of the metric {name!r} is a {type(function).__name__}: it must be a function"
                )
            scheduler.set_custom_get_difficulty(function)
        self._clusters = None
        self._find_clusters()

    def need_schedules(self):
        """RuntimeError if a schedule still has no function."""
        for scheduler in filter(_waits, self._metrics.values()):
            scheduler.get_difficulty(1)  # raises

    def _find_clusters(self):
        """Reads the clusters, unless a schedule still has no function."""
        if any(_waits(scheduler) for _, scheduler in self._chosen.values()):
            return
        if not self._chosen:
            self._clusters = one_cluster(self.samples)
            return
        steps = self._end_of(0) // self.step_samples
        folder = self._curriculum.get("data_cluster_path")
        self._clusters = clusters_of(self._chosen, self.samples, self.step_samples, steps, folder)

    def _end_of(self, samples):
        """The iteration that begins after ``samples`` samples ends after this number of samples."""
        whole = self.num_epochs * self.samples // self.step_samples * self.step_samples
        return (samples // whole + 1) * whole

    # ---- batches -----------------------------------------------------------------------------------------------------
    def __iter__(self):
        place = self._place
        self._ahead.clear()
        order = self._order_at(place)
        end = self._end_of(place.samples)
        at_once = self.micro_batch_size * self.world_size
        drawn = numpy.empty(at_once, numpy.int64)
        own = slice(self.rank * self.micro_batch_size, (self.rank + 1) * self.micro_batch_size)
        difficulties = place.difficulties
        while place.samples < end:
            step, within = place.steps + 1, place.within + at_once
            if place.within == 0:
                difficulties = self._difficulties(step, difficulties)
                self._join(order, step)
            order.draw(drawn)
            if within >= self.step_samples:
                place = _Place(step, place.samples + at_once, 0, order.state(), difficulties)
            else:
                place = _Place(place.steps, place.samples + at_once, within, place.order, difficulties)
            self._ahead.append(place)
            numbers = drawn[own]
            yield (numbers if self._clusters.samples is None else self._clusters.samples[numbers]).tolist()

    def _order_at(self, place):
        """The order at ``place``. It has the clusters of the step that has begun."""
        if place.order is not None and self._identity not in (None, self._clusters.identity):
            logger.warning(
                "The saved position belongs to another analysis or to other schedules of the curriculum: the run "
                f"continues with step {place.steps + 1}, and samples of this epoch may come again."
            )
            place = dataclasses.replace(place, order=None)
        self._identity = self._clusters.identity
        if place.order is None:
            order = _C.samples.Order(self.seed)
        else:
            sizes = self._clusters.sizes[: len(place.order[4])]
            order = _C.samples.Order.restored(self.seed, sizes, place.order)
        if place.within:
            self._join(order, place.steps + 1)
            order.draw(numpy.empty(place.within, numpy.int64))
        return order

    def _join(self, order, step):
        """Adds the clusters of this step to the pool."""
        there, now = len(order.state()[4]), self._clusters.joined(step)
        if now > there:
            order.join(self._clusters.sizes[there:now], now == len(self._clusters.sizes))

    def _difficulties(self, step, before):
        """``{metric: difficulty}`` of a step. A difficulty that has reached its maximum stays."""
        found = {}
        for name, scheduler in self._metrics.items():
            most, old = scheduler.get_state()["max_difficulty"], before.get(name)
            found[name] = old if old is not None and old >= most else scheduler.get_difficulty(step)
            if name in self._chosen and step > self._clusters.known_steps and found[name] != before.get(name):
                raise RuntimeError(
                    f"the schedule of the metric {name!r} changes at step {step}, and its function was called in "
                    f"advance for the first {self._clusters.known_steps} steps only: it must reach max_difficulty "
                    "before"
                )
        return found

    def used(self):
        """Moves the place behind the next batch that was given out."""
        self._place = self._ahead.popleft()

    # ---- state -------------------------------------------------------------------------------------------------------
    def state_dict(self):
        """The place after the last batch that was used, as plain values of at most 64 KB. It is equal on all ranks."""
        place = self._place
        return {
            "curriculum_step": place.steps + (place.within > 0),
            "consumed_samples": place.samples,
            "current_difficulties": dict(place.difficulties),
            "samples_of_step": place.within,
            "seed": self.seed,
            "clusters": self._identity,
            "order": place.order,
        }

    def load_state_dict(self, state):
        """Continues at the saved place, with any number of ranks, micro-batch size and accumulation steps. From a state
        of the published sampler it restores the step, the samples and the difficulties."""
        missing = [key for key in ("curriculum_step", "consumed_samples") if key not in state]
        if missing:
            raise KeyError(
                f"the saved state of the data sampler has no {', '.join(missing)}: it was not saved by a curriculum"
            )
        within, order = state.get("samples_of_step", 0), state.get("order")
        steps = state["curriculum_step"] - (within > 0)
        if _PUBLISHED in state:
            logger.warning(
                f"The state of the data sampler comes from another implementation: step {steps} and "
                f"{state['consumed_samples']} samples are restored; its random generator, the positions in its "
                "clusters and the rest of a batch are not, so samples of this epoch may come again."
            )
        elif state.get("seed", self.seed) != self.seed:
            logger.warning(
                f"data_efficiency.seed is {self.seed}, and the saved run had {state['seed']}: the order of samples "
                "changes"
            )
        difficulties = {
            name: one for name, one in state.get("current_difficulties", {}).items() if name in self._metrics
        }
        self._place = _Place(steps, state["consumed_samples"], within, order, difficulties)
        self._identity = state.get("clusters")
        self._ahead.clear()


def _scheduler(name, metric):
    """The ``CurriculumScheduler`` of a metric. Errors name the metric."""
    try:
        if metric.get("difficulty_type") == "percentile" and (metric.get("max_difficulty") or 0) > 100:
            raise ValueError(
                f"max_difficulty {metric['max_difficulty']} is above 100, and difficulty_type is 'percentile'"
            )
        return CurriculumScheduler(metric)
    except ValueError as error:
        raise ValueError(f"curriculum_metrics.{name}: {error}") from None


def _waits(scheduler):
    """Whether a schedule still has no function."""
    return scheduler.get_state()["schedule_type"] == "custom" and scheduler.custom_get_difficulty is None
