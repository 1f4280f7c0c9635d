"""The order in which configurations are tried: one class for each ``tuner_type``."""

import collections
import itertools
import math
import random

from deepspeed.autotuning.settings import MBS

_SHRINK = {1: 0.3, 2: 1.5}  # how many results without effect a feature, or a pair of them, starts with
_UNSEEN = 0.3  # how much better an untried value is taken to be, in the logarithm
_FAILED = -1.0  # what a failure says of its features
_GROWTH = 0.3  # without a forecast: speed grows with this power of the micro-batch


def prior(samples, mbs, seconds, minimised):
    """``(has a forecast, logarithm of the expected goodness)`` of a configuration. ``seconds``: the planner's, or None;
    then large micro-batches are taken to be fast, and small ones to have short steps."""
    if seconds:
        return True, -math.log(seconds) if minimised else math.log(samples / seconds)
    return False, (_GROWTH - 1 if minimised else _GROWTH) * math.log(mbs)


class GridSearch:
    """All configurations in one order: by forecast where there is one, those without behind. Configurations that are
    expected to be equal come as they are given."""

    def __init__(self, features, priors):
        """``features``: {name: {path: value}}; ``priors``: {name: what ``prior`` returns}."""
        self.features, self.priors = features, priors
        self.left = sorted(features, key=lambda name: tuple(-float(one) for one in priors[name]))

    def next(self, count):
        """The next names."""
        return [self.left.pop(0) for _ in range(min(count, len(self.left)))]

    def learn(self, name, goodness):
        """The logarithm of the result of ``name``, or None where it failed."""

    def drop_larger(self, name):
        """``name`` ran out of memory: so would what differs by a larger micro-batch alone. Returns these."""
        own = self.features[name]
        dropped = [
            other
            for other in self.left
            if self.features[other][MBS] > own[MBS] and {**self.features[other], MBS: own[MBS]} == own
        ]
        self.left = [other for other in self.left if other not in dropped]
        return dropped


class RandomSearch(GridSearch):
    """All configurations in an order that depends on nothing but their names."""

    def __init__(self, features, priors):
        super().__init__(features, priors)
        self.left = sorted(features)
        random.Random(0).shuffle(self.left)


class ModelBasedSearch(GridSearch):
    """The configuration that is expected to be best. Results correct the forecasts: how far they are off is explained
    by the values of a configuration, and by pairs of values."""

    def __init__(self, features, priors):
        super().__init__(features, priors)
        random.Random(0).shuffle(self.left)  # of equal expectations those come first that have little in common
        self._off = {}  # of those that have run, the logarithm of result over forecast

    def learn(self, name, goodness):
        self._off[name] = _FAILED if goodness is None else goodness - self.priors[name][1]

    def next(self, count):
        found = []
        for _ in range(min(count, len(self.left))):
            effects, mean = self._effects()
            expected = {name: self._expected(name, effects, mean) for name in self.left}
            found.append(max(self.left, key=expected.get))
            self.left.remove(found[-1])
        return found

    def _parts(self, name):
        own = sorted(self.features[name].items()) + [("forecast", self.priors[name][0])]
        return [(one,) for one in own] + list(itertools.combinations(own, 2))

    def _effects(self):
        """Means of what is unexplained, of one value after another, until they explain each other."""
        good = [off for off in self._off.values() if off != _FAILED]
        mean = sum(good) / len(good) if good else 0.0
        rows = collections.defaultdict(list)
        for name in self._off:
            for part in self._parts(name):
                rows[part].append(name)
        effects, rest = (
            dict.fromkeys(rows, 0.0),
            {name: (off if off == _FAILED else off - mean) for name, off in self._off.items()},
        )
        for _ in range(10):
            for part, names in rows.items():
                change = sum(rest[name] for name in names) + effects[part] * len(names)
                change = change / (len(names) + _SHRINK[len(part)]) - effects[part]
                effects[part] += change
                for name in names:
                    rest[name] -= change
        return effects, mean

    def _expected(self, name, effects, mean):
        total = self.priors[name][1] + mean
        for part in self._parts(name):
            if part in effects:
                total += effects[part]
            elif len(part) == 1:
                total += _UNSEEN + self._nearest(part[0], effects)
        return total

    def _nearest(self, own, effects):
        """The effect of the tried value that is nearest to an untried number."""
        path, value = own
        tried = [part[0] for part in effects if len(part) == 1 and part[0][0] == path]
        tried = [one for one in tried if not isinstance(one[1], (bool, str))]
        if isinstance(value, (bool, str)) or not tried:
            return 0.0
        near = min(tried, key=lambda one: abs(math.log1p(abs(one[1])) - math.log1p(abs(value))))
        return effects[(near,)]


ORDERS = {"gridsearch": GridSearch, "random": RandomSearch, "model_based": ModelBasedSearch}
