"""The layout of universal checkpoints: one folder for each parameter, one file for each of its states, whole tensors."""

import functools
import os

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import names, storage
from deepspeed.checkpoint.universal_slices import local_slice
from deepspeed.zero.saved_state import Range, SavedState

ZERO_FOLDER = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"
STEP = "step"


def is_universal(folder):
    """Whether ``folder`` is that of a universal checkpoint."""
    return os.path.isdir(os.path.join(folder, ZERO_FOLDER))


class UniversalState(SavedState):
    """``folder``: of the universal checkpoint. ``shapes`` (name -> torch.Size) are those of this run's parameters, which
    under tensor parallelism are slices; ``mp_rank`` of ``mp_size`` is this rank. ``group_names``: the names of the
    parameters of each group of this run's optimizer, for checkpoints whose model file does not say them.
    """

    masters_only = True

    def __init__(self, folder, mp_rank=0, mp_size=1, dp_rank=0, group_names=(), shapes=None):
        super().__init__()
        self.folder = folder
        self.model_path = _model_path(folder, mp_rank, dp_rank)
        self.model = storage.read(self.model_path, lazy=True)
        self.dp_world_size = self.model.get("dp_world_size", 1)
        self._rank, self._count = mp_rank, mp_size
        self._local = dict(shapes or {})
        self._held = (None, None)
        self._all = set(_folders_in(os.path.join(folder, ZERO_FOLDER)))
        path = os.path.join(folder, ZERO_FOLDER, OPTIMIZER_STATE)
        self._common = storage.read(path) if os.path.exists(path) else {}
        self.zero_stage = int(getattr(self._common.get(keys.ZERO_STAGE, 1), "value", self._common.get(keys.ZERO_STAGE, 1)))
        frozen = set(self.model.get(keys.FROZEN_PARAM_SHAPES) or {})
        saved = self.model.get(keys.PARAM_SHAPES) or [dict.fromkeys(group) for group in group_names]
        self._groups = [[name for name in group if name in self._all and name not in frozen] for group in saved]
        self._frozen = sorted(frozen & self._all)
        self._shapes = {name: self._shape(name) for group in self._groups for name in group}

    def _file(self, name, state):
        """Content of a file, tensors lazy; the last one stays open for the pieces that follow."""
        path = os.path.join(self.folder, ZERO_FOLDER, name, f"{state}.pt")
        if self._held[0] != path:
            found = storage.read(path, lazy=True)
            self._held = (path, found if isinstance(found, dict) else {keys.PARAM: found})
        return self._held[1]

    def _shape(self, name):
        if name in self._local:
            return torch.Size(self._local[name])
        return torch.Size(self._file(name, keys.FP32_WEIGHT_KEY)[keys.PARAM].shape)

    def shapes(self):
        return self._shapes

    def weight_shape(self, name):
        return super().weight_shape(name) or (self._shape(name) if name in self._frozen else None)

    def module(self):
        masters = self._all | {alias for alias, name in self.aliases().items() if name in self._all}
        return {name: value for name, value in (self.model.get("module") or {}).items() if name not in masters}

    def param_groups(self):
        groups = self._common.get(keys.PARAM_GROUPS) or [{} for _ in self._groups]
        return [
            {**{key: value for key, value in group.items() if key != "params"}, "names": list(names_of)}
            for group, names_of in zip(groups, self._groups)
        ]

    def _states_of(self, name):
        """``(states with a value for each element, others)`` of a parameter, the master left out."""
        whole, others = [], []
        for file in sorted(os.listdir(os.path.join(self.folder, ZERO_FOLDER, name))):
            state, kind = os.path.splitext(file)
            if kind != ".pt" or state in (keys.FP32_WEIGHT_KEY, STEP):
                continue
            (whole if len(self._file(name, state)[keys.PARAM].shape) else others).append(state)
        return whole, others

    @functools.lru_cache(maxsize=1)  # noqa: B019 (one object for one load)
    def _states(self):
        return {name: self._states_of(name) for name in self._shapes}

    def state_names(self):
        return list(dict.fromkeys(state for whole, _ in self._states().values() for state in whole))

    def scalars(self, name):
        found = {state: _eager(self._file(name, state)[keys.PARAM]) for state in self._states()[name][1]}
        path = os.path.join(self.folder, ZERO_FOLDER, name, f"{STEP}.pt")
        if os.path.exists(path):
            found[STEP] = storage.read(path)
        return found

    def state_pieces(self, name, kind):
        if kind != keys.FP32_WEIGHT_KEY and kind not in self._states()[name][0]:
            return []
        return self._whole(name, kind, self._shapes[name])

    def frozen_pieces(self, name):
        return self._whole(name, keys.FP32_WEIGHT_KEY, self._shape(name)) if name in self._frozen else []

    def _whole(self, name, state, shape):
        return [(0, shape.numel(), _Slice(self, name, state, shape))] if shape.numel() else []

    def extra(self):
        wanted = (keys.LOSS_SCALER, "dynamic_loss_scale", "overflow", keys.CLIP_GRAD)
        return {key: self._common[key] for key in wanted if key in self._common}


class _Slice:
    """The part of a whole tensor that this rank's module has, read by ranges where it is the whole."""

    def __init__(self, saved, name, state, shape):
        self._saved, self._name, self._state, self._shape = saved, name, state, shape

    def read_range(self, start, numel):
        file = self._saved._file(self._name, self._state)
        whole = file[keys.PARAM]
        if torch.Size(whole.shape) != self._shape:
            whole = local_slice(self._name, file, _eager(whole), self._shape, self._saved._rank, self._saved._count)
        return Range(whole).read_range(start, numel)


def _eager(value):
    return value.read() if hasattr(value, "read_range") else value


def _folders_in(folder):
    return [entry.name for entry in os.scandir(folder) if entry.is_dir()]


def _model_path(folder, mp_rank, dp_rank):
    """The model file for a rank: its own, or the first one there is, when fewer ranks have saved."""
    for path in (
        names.sharded_model_states_path(folder, dp_rank, mp_rank),
        names.model_states_path(folder, mp_rank),
        names.sharded_model_states_path(folder, 0, mp_rank),
        names.sharded_model_states_path(folder, 0, 0),
    ):
        if os.path.exists(path):
            return path
    return names.model_states_path(folder, 0)
