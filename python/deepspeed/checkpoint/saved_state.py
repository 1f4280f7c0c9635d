"""Opens the checkpoint folder of any stage and number of ranks as one ``SavedState``; see ``zero.saved_state``."""

import os

from deepspeed.checkpoint import names, storage
from deepspeed.checkpoint.saved_universal import UniversalState, is_universal
from deepspeed.zero.saved_flat import FlatState
from deepspeed.zero.saved_plain import PlainState
from deepspeed.zero.saved_sliced import SlicedState
from deepspeed.zero.saved_state import Range, SavedState  # noqa: F401

_PREFIXES = ("bf16_", "", "fp16_")


class Shards:
    """``optimizer_state_dict`` of every rank that saved, read when it is asked for."""

    def __init__(self, folder, mp_rank, prefix):
        self._paths = lambda rank: os.path.join(folder, names.optim_states(rank, mp_rank, prefix=prefix))
        self._held = {}
        count = self[0].get("partition_count", 1)
        self._count = max(count, default=1) if isinstance(count, (list, tuple)) else int(count)

    def __len__(self):
        return self._count

    def __getitem__(self, rank):
        if rank not in self._held:
            whole = storage.read(self._paths(rank), lazy=True)
            if not isinstance(whole, dict) or "optimizer_state_dict" not in whole:
                raise ValueError(
                    f"{self._paths(rank)} is no file of optimizer states: it has no 'optimizer_state_dict'"
                )
            self._held[rank] = whole["optimizer_state_dict"]
        return self._held[rank]

    def path(self, rank):
        return self._paths(rank)


class Fragments:
    """``frozen_param_fragments`` of every rank that saved at stage 3, read when they are asked for."""

    def __init__(self, folder, mp_rank, count):
        self._paths = [names.sharded_model_states_path(folder, rank, mp_rank) for rank in range(count)]
        self._held = {}

    def __len__(self):
        return len(self._paths)

    def __getitem__(self, rank):
        if rank not in self._held:
            self._held[rank] = storage.read(self._paths[rank], lazy=True).get("frozen_param_fragments") or {}
        return self._held[rank]


def _shards(folder, mp_rank):
    for prefix in _PREFIXES:
        if os.path.exists(os.path.join(folder, names.optim_states(0, mp_rank, prefix=prefix))):
            return Shards(folder, mp_rank, prefix)
    return None


def open_saved(folder, mp_rank=0, dp_rank=0, group_names=(), shapes=None, with_optimizer=True, mp_size=1):
    """The checkpoint in ``folder``, the folder of one tag. No collectives.

    ``dp_rank``: of this run; at stage 3 its own model file is taken where there is one, for buffers. ``group_names``:
    the names of the parameters of each group of this run's optimizer, and ``shapes`` name -> torch.Size of them, which
    files of stage 0 do not say. ``with_optimizer=False`` leaves optimizer states of stage 0 unread. ``mp_size``: number of
    model-parallel ranks of this run, for universal checkpoints, which have whole parameters.

    Raises FileNotFoundError where there is no model file, ValueError where files do not fit each other.
    """
    if is_universal(folder):
        return UniversalState(folder, mp_rank, mp_size, dp_rank, group_names, shapes)
    sharded = names.sharded_model_states_path(folder, 0, mp_rank)
    if os.path.exists(sharded):
        return _open_sliced(folder, mp_rank, dp_rank)
    path = names.model_states_path(folder, mp_rank)
    model = storage.read(path, lazy=True)
    shards = _shards(folder, mp_rank)
    if shards is not None:
        saved = FlatState(shards, model["param_shapes"], model, folder)
    else:
        optimizer = model.get("optimizer") if with_optimizer else None
        saved = PlainState(
            optimizer,
            group_names if optimizer is not None else (),
            shapes or {},
            model,
            folder,
            # The native optimizer of the other implementation counts in the last parameter of a group only.
            steps_are_real=os.path.exists(names.run_states_path(folder, 0)),
        )
    saved.model_path = path
    return saved


def _open_sliced(folder, mp_rank, dp_rank):
    own = names.sharded_model_states_path(folder, dp_rank, mp_rank)
    first = names.sharded_model_states_path(folder, 0, mp_rank)
    path = own if os.path.exists(own) else first
    model = storage.read(path, lazy=True)
    shards = _shards(folder, mp_rank)
    count = len(shards) if shards is not None else model["dp_world_size"]
    saved = SlicedState(
        shards if shards is not None else [],
        model["param_shapes"] or [],
        model,
        folder,
        Fragments(folder, mp_rank, count),
        model.get("frozen_param_shapes"),
        storage.read(first, lazy=True).get("shared_params") or {},  # others' files may not say
    )
    saved.model_path = path
    return saved
