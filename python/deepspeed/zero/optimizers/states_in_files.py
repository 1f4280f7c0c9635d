"""States of an optimizer that is not native rest in files between steps (``offload_optimizer.device`` nvme).

Such an optimizer updates tensors and makes its states itself. So a step goes over the masters part by part: the states
of a part are read, ``optimizer.step()`` updates this part alone, and the states are written back. Memory has the states
of two parts at a time, while the masters and gradients stay on the host. Each element is updated by itself, as
everywhere under ZeRO, so the results are those of one call.
"""

import collections.abc

import torch

from deepspeed import _native

_MOST = 1 << 22  # elements of a part that has several masters


class StatesOfMaster(collections.abc.MutableMapping):
    """The value of ``optimizer.state[master]`` between steps. A state with a value for each element is in a file:
    reading it gives a copy, and writing it writes the file. Other values are kept as they are."""

    def __init__(self, store, master, values):
        self._store, self._shape, self._values = store, master.shape, {}
        self.update(values)

    def _in_file(self, value):
        return torch.is_tensor(value) and value.shape == self._shape and value.dim() > 0

    def __getitem__(self, key):
        value = self._values[key]
        return self._store.get(value.number) if isinstance(value, _Number) else value

    def __setitem__(self, key, value):
        made = _Number(self._store.put(value.detach().cpu())) if self._in_file(value) else value
        self._drop(key)
        self._values[key] = made

    def __delitem__(self, key):
        if key not in self._values:
            raise KeyError(key)
        self._drop(key)

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def __contains__(self, key):
        return key in self._values

    def __reduce__(self):  # whoever copies or pickles it gets plain states
        return (dict, (dict(self),))

    def names(self):
        """Names of the states that are in files."""
        return [key for key, value in self._values.items() if isinstance(value, _Number)]

    def others(self):
        """dict: name -> value of what is not in files."""
        return {key: value for key, value in self._values.items() if not isinstance(value, _Number)}

    def prefetch(self):
        """Begins to read."""
        for value in self._values.values():
            if isinstance(value, _Number):
                self._store.prefetch(value.number)

    def __del__(self):
        for key in list(self._values):
            self._drop(key)

    def _drop(self, key):
        before = self._values.pop(key, None)
        if isinstance(before, _Number):
            self._store.drop(before.number)


def split_states(states, master):
    """``(names of states with a value for each element, the others by name)`` of ``master``."""
    if isinstance(states, StatesOfMaster):
        return states.names(), states.others()
    whole = {key for key, value in states.items() if torch.is_tensor(value) and value.dim() > 0}
    names = [key for key in states if key in whole and states[key].shape == master.shape]
    return names, {key: value for key, value in states.items() if key not in names}


class _Number:
    def __init__(self, number):
        self.number = number


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
        state = self._optimizer.state
        for master in masters:
            if isinstance(state.get(master), StatesOfMaster):
                state[master] = self._read(state[master], master)
        self._prefetch(later)
        try:
            self._optimizer.step()
        finally:
            self.rest(masters)

    @staticmethod
    def _read(states, master):
        return {key: value.to(master.device) if states._in_file(value) else value for key, value in states.items()}

    def _prefetch(self, part):
        for master in (master for own in part for master in own):
            states = self._optimizer.state.get(master)
            if isinstance(states, StatesOfMaster):
                states.prefetch()

    def _parts(self, groups):
        """Lists of masters with gradients, one for each group, of so many elements in all."""
        parts, held = [], 0  # at least one, since the groups may count steps without gradients
        for number, params in enumerate(groups):
            for master in params:
                if master.grad is None:
                    continue
                if not parts or held + master.numel() > self._most:
                    parts.append([[] for _ in groups])
                    held = 0
                parts[-1][number].append(master)
                held += master.numel()
        return parts or [[[] for _ in groups]]

    def close(self):
        """States in files end with their files."""
        state = self._optimizer.state
        for master in [master for master, states in state.items() if isinstance(states, StatesOfMaster)]:
            del state[master]
        self._store = self._folder = None
