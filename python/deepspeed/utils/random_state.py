"""The random generators of a process: at one moment, and under names of their own, as Megatron has them.

On the CPU as accelerator the device's generator is torch's own.
"""

import contextlib

import torch

from deepspeed.accelerator import get_accelerator

MODEL_PARALLEL = "model-parallel-rng"  # the name of the generator of dropout on what model-parallel ranks split


class CudaRNGStatesTracker:
    """Named generators of the accelerator, each at its own position in its own sequence.

    Dropout on activations that every model-parallel rank holds draws from the device's default generator, equal on all
    of them; dropout on what they split draws inside ``fork()``, from a generator seeded differently on each.
    """

    def __init__(self):
        self.reset()

    def reset(self):
        """Forgets all generators."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self):
        """``{name: state}``, a copy."""
        return dict(self.states_)

    def set_states(self, states):
        """Inverse of ``get_states``."""
        self.states_ = dict(states)

    def add(self, name, seed):
        """A generator ``name`` that starts at ``seed``; ValueError when the name or the seed is taken."""
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} already exists: two generators with one seed draw the same numbers.")
        if name in self.states_:
            raise ValueError(f"cuda rng state {name} already exists.")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name=MODEL_PARALLEL):
        """A context in which the accelerator draws from generator ``name``; KeyError for a name that was not added."""
        if name not in self.states_:
            known = ", ".join(sorted(self.states_)) or "none"
            raise KeyError(f"cuda rng state {name} is not added (added: {known}): call add() first.")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker():
    """The tracker whose generators are restored when a segment is computed again."""
    return _tracker


def set_device_state(new_state, device=-1):
    """Sets the state of the generator of ``device`` of the accelerator, by its number; -1: the current device."""
    accelerator = get_accelerator()
    if device == -1:
        accelerator.set_rng_state(new_state)
    else:
        accelerator.set_rng_state(new_state, device)


class RandomState:
    """The generators of this process at one moment: the CPU's, the accelerator's and the tracker's."""

    def __init__(self, tensors=()):
        """``tensors``: the accelerator's devices that hold one of them are included, besides the current one."""
        device = get_accelerator()
        self._cpu = torch.get_rng_state()
        self._tracked = _tracker.get_states()
        self._devices = {}
        if device.device_name() != "cpu" and device.is_available():
            kind = device.device_name()
            indices = {t.device.index for t in tensors if torch.is_tensor(t) and t.device.type == kind} | {
                device.current_device()
            }
            self._devices = {index: device.get_rng_state(index) for index in indices}

    def _set(self):
        torch.set_rng_state(self._cpu)
        for index, state in self._devices.items():
            get_accelerator().set_rng_state(state, index)
        _tracker.set_states(self._tracked)

    @contextlib.contextmanager
    def replay(self, tensors=()):
        """A context that starts from this state and leaves the generators as it found them."""
        before = RandomState(tensors)
        self._set()
        try:
            yield
        finally:
            before._set()


class OwnRandomNumbers:
    """Between two modules the ranks that share a layer draw different numbers; before and behind them equal ones.

    ``begin`` and ``end`` are hooks of the modules. The seed of what is drawn in between comes from the generator that
    is equal on all ranks, so that it differs from call to call, and comes again where a segment is computed again.
    """

    def __init__(self, rank):
        self.rank, self._before = rank, None

    def begin(self, module, args, made):
        """A forward hook: from now on numbers are this rank's own."""
        if module.training:
            seed = int(torch.randint(2**60, ())) + self.rank
            self._before = _states()
            torch.manual_seed(seed)

    def end(self, module, args):
        """A forward pre-hook: from now on numbers are those of all ranks."""
        if self._before is not None:
            _set_states(self._before)
            self._before = None


def _states():
    on_device = get_accelerator().device_name() != "cpu"
    return torch.get_rng_state(), get_accelerator().get_rng_state() if on_device else None


def _set_states(states):
    torch.set_rng_state(states[0])
    if states[1] is not None:
        get_accelerator().set_rng_state(states[1])
