"""States of an optimizer that is not native rest in files between steps (``offload_optimizer.device`` nvme).

Such an optimizer updates tensors and makes its states itself. So a step goes over the masters part by part: the states
of a part are read, ``optimizer.step()`` updates this part alone, and the states are written back. Memory has the states
of two parts at a time, while the masters and gradients stay on the host. Each element is updated by itself, as
everywhere under ZeRO, so the results are those of one call.
"""

import collections

import torch

from deepspeed import _native
from deepspeed.utils.runs import runs_of

_MOST = 1 << 22  # elements of a part that has several masters


class _InFile:
    """The state with number ``number`` in ``store``, as long as this object lives."""

    def __init__(self, store, number):
        self._store, self._number = store, number

    def get(self):
        return self._store.get(self._number)

    def prefetch(self):
        self._store.prefetch(self._number)

    def __del__(self):
        self._store.drop(self._number)


class StatesOfMaster(collections.UserDict):
    """The value of ``optimizer.state[master]`` between steps. A state with a value for each element is in a file:
    reading it gives a copy, and writing it writes the file. Other values are kept as they are."""

    def __init__(self, store, master, values):
        self._store, self._master = store, master
        super().__init__(values)

    def __getitem__(self, key):
        value = self.data[key]
        return value.get() if isinstance(value, _InFile) else value

    def __setitem__(self, key, value):
        in_file = is_each(value, self._master)
        self.data[key] = _InFile(self._store, self._store.put(value.detach().cpu())) if in_file else value

    def __copy__(self):
        return dict(self)

    def __reduce__(self):  # whoever copies or pickles it gets plain states
        return (dict, (dict(self),))

    def in_memory(self):
        """A dict with copies beside the master of what is in files."""
        own = self._master
        return {key: value.to(own.device) if is_each(value, own) else value for key, value in self.items()}

    def prefetch(self):
        """Begins to read."""
        for value in self.data.values():
            if isinstance(value, _InFile):
                value.prefetch()


def is_each(value, master):
    """Whether a state of ``master``, in memory or in a file, has one number for each of its elements."""
    return isinstance(value, _InFile) or (torch.is_tensor(value) and value.shape == master.shape and value.dim() > 0)


def split_states(states, master):
    """``(names of states with a value for each element, the others by name)`` of ``master``."""
    kept = states.data if isinstance(states, StatesOfMaster) else states  # nothing is read
    names = [key for key, value in kept.items() if is_each(value, master)]
    return names, {key: value for key, value in kept.items() if key not in names}


class StatesInFiles:
    """``folder``: a ``_C.SwapFolder``, kept as long as this. ``masters``: the tensors that ``optimizer`` updates;
    ``most``: elements of a part, unless one master has more."""

    def __init__(self, optimizer, masters, folder, most=_MOST):
        self._optimizer = optimizer
        self._folder = folder
        self._store = _native._C.TensorStore(torch.device("cpu"), _native._C.Placement("file", False, folder.path))
        self._most = min(most, _MOST)
        self.rest(masters)

    def rest(self, masters):
        """The states of ``masters`` that are in memory go to their files."""
        state = self._optimizer.state
        for master in masters:
            if state.get(master) and not isinstance(state[master], StatesOfMaster):
                state[master] = StatesOfMaster(self._store, master, state[master])

    def step(self):
        """One update of all masters that have gradients."""
        groups = self._optimizer.param_groups
        whole = [(group, group["params"], {k: v for k, v in group.items() if k != "params"}) for group in groups]
        parts = self._parts([params for _, params, _ in whole])
        try:
            for part, later in zip(parts, [*parts[1:], []]):
                for (group, _, values), own in zip(whole, part):
                    group.clear()  # it may count its steps: each part makes the same one
                    group.update({**values, "params": own})
                self._step_part([master for own in part for master in own], later)
        finally:
            for group, params, _ in whole:
                group["params"] = params

    def _step_part(self, masters, later):
        self._optimizer.state.update((master, states.in_memory()) for master, states in self._in_files(masters))
        for _, states in self._in_files(master for own in later for master in own):
            states.prefetch()
        try:
            self._optimizer.step()
        finally:
            self.rest(masters)

    def _parts(self, groups):
        """Lists of masters with gradients, one for each group, of at most this many elements in all."""
        stepped = [(number, m) for number, params in enumerate(groups) for m in params if m.grad is not None]
        runs = list(runs_of(stepped, self._most, lambda one: one[1].numel()))
        # At least one, since the groups may count steps without gradients.
        return [[[m for of, m in run if of == number] for number in range(len(groups))] for run in runs or [[]]]

    def _in_files(self, masters):
        """``[(master, its StatesOfMaster)]`` of those that have some."""
        found = [(master, self._optimizer.state.get(master)) for master in masters]
        return [(master, states) for master, states in found if isinstance(states, StatesOfMaster)]

    def close(self):
        """States in files end with their files."""
        for master, _ in self._in_files(list(self._optimizer.state)):
            del self._optimizer.state[master]
        self._store = self._folder = None
