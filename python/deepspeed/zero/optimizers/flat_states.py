"""``optimizer.state[flat]``: states of the inner optimizer, asked for by a flat tensor of masters.

The inner optimizer keeps its states by piece (a part of one parameter). Callers of other versions know flat tensors of
a whole group, or sub-group, and index the state with them. The flat tensors that the optimizers here give out are
copies; each knows how to collect the states that belong to it, and this dict asks it.
"""

import collections
import weakref

# id of a flat tensor: (weak reference to it, what makes its states). No attribute of the tensor, which would be pickled
# with it, and no weak dictionary, which would compare tensors by value.
_makers = {}


class StatesByFlatTensor(collections.defaultdict):
    """The inner optimizer's state. A flat tensor of masters is no entry: its states are made when it is asked for, as
    copies."""

    def __missing__(self, key):
        found, make = _makers.get(id(key), (None, None))
        return make() if found is not None and found() is key else super().__missing__(key)

    def __reduce__(self):
        return (collections.defaultdict, (dict, dict(self)))


def with_states(flat, owner, method, *args):
    """``flat``, for which ``owner.method(*args)`` gives the states: a dict with "step" and flat tensors."""
    if not isinstance(owner.optimizer.state, StatesByFlatTensor):
        owner.optimizer.state = StatesByFlatTensor(dict, owner.optimizer.state)
    owner = weakref.ref(owner)

    def make():
        living = owner()
        if living is None or living.optimizer is None:
            raise RuntimeError("the optimizer that this flat tensor of masters came from is gone")
        return getattr(living, method)(*args)

    key = id(flat)
    _makers[key] = (weakref.ref(flat, lambda _: _makers.pop(key, None)), make)
    return flat
