"""Opens the checkpoint folder of any stage and number of ranks as one ``SavedState``."""

import functools
import os

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.saved_named import expert_weights, with_named
from deepspeed.checkpoint.layouts.saved_native import NativeState
from deepspeed.checkpoint.layouts.saved_shards import FlatState, PlainState, SlicedState
from deepspeed.checkpoint.layouts.saved_universal import UniversalState
from deepspeed.checkpoint.read import storage
from deepspeed.formats.swapped_tensors import with_swapped


class OfRanks:
    """What each of ``count`` ranks has saved, which ``read(rank)`` reads when it is asked for."""

    def __init__(self, read, count):
        self._read, self._count, self._held = read, count, {}

    def __len__(self):
        return self._count

    def __getitem__(self, rank):
        if rank not in self._held:
            self._held[rank] = self._read(rank)
        return self._held[rank]


class Shards(OfRanks):
    """``optimizer_state_dict`` of every rank that saved. ``first``: a rank whose file is here; on a disk that only some
    ranks share it may be another than 0."""

    def __init__(self, folder, mp_rank, prefix, first):
        super().__init__(self._shard, None)
        self.path = lambda rank: names.OPTIM_STATES.path(folder, dp_rank=rank, mp_rank=mp_rank, prefix=prefix)
        self.first = first
        count = self[first].get("partition_count", 1)
        self._count = max(count, default=1) if isinstance(count, (list, tuple)) else int(count)

    def _shard(self, rank):
        path = self.path(rank)
        whole = storage.read(path, lazy=True)
        if not isinstance(whole, dict) or "optimizer_state_dict" not in whole:
            raise ValueError(f"{path} is no file of optimizer states: it has no 'optimizer_state_dict'")
        return with_swapped(path, whole, storage.read)


def _fragments(folder, mp_rank, rank):
    """``frozen_param_fragments`` of a rank that saved at stage 3."""
    path = names.SHARDED_MODEL_STATES.path(folder, dp_rank=rank, mp_rank=mp_rank)
    return storage.read(path, lazy=True).get("frozen_param_fragments") or {}


def _shards(folder, mp_rank, dp_rank):
    for prefix in names.PREFIXES:
        for rank in (0, dp_rank):
            if os.path.exists(names.OPTIM_STATES.path(folder, dp_rank=rank, mp_rank=mp_rank, prefix=prefix)):
                return Shards(folder, mp_rank, prefix, rank)
    return None


def _model_files(folder, mp_rank, *dp_ranks):
    """Paths of the model files of ZeRO stage 3 that are there, of these ranks."""
    paths = [names.SHARDED_MODEL_STATES.path(folder, dp_rank=rank, mp_rank=mp_rank) for rank in dp_ranks]
    return [path for path in paths if os.path.exists(path)]


def open_saved(folder, mp_rank=0, dp_rank=0, group_names=(), shapes=None, with_optimizer=True, mp_size=1, experts=None):
    """The checkpoint in ``folder``, the folder of one tag. No collectives.

    ``dp_rank``: of this run; at stage 3 its own model file is taken where there is one, for buffers. ``group_names``:
    the names of the parameters of each group of this run's optimizer, and ``shapes`` name -> torch.Size of them, which
    files of stage 0 do not say. ``with_optimizer=False`` leaves optimizer states of stage 0 unread. ``mp_size``: number
    of model-parallel ranks of this run, for universal checkpoints, which have whole parameters. ``experts``: numbers of
    those whose files are wanted (None: all).

    Raises FileNotFoundError where there is no model file, ValueError where files do not fit each other, RuntimeError
    where one does not hold what files of checkpoints do.
    """
    try:
        return _opened(folder, mp_rank, dp_rank, group_names, shapes, with_optimizer, mp_size, experts)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise RuntimeError(
            f"the checkpoint {folder} is damaged, or its files are of something else: what they hold does not fit "
            f"({type(error).__name__}: {error}); load an older tag"
        ) from error


def _opened(folder, mp_rank, dp_rank, group_names, shapes, with_optimizer, mp_size, experts):
    if names.is_native(folder):
        return NativeState(folder, mp_rank, dp_rank)
    if names.is_universal(folder):
        return UniversalState(folder, mp_rank, mp_size, dp_rank, group_names, shapes)
    if _model_files(folder, mp_rank, 0, dp_rank):
        return _open_sliced(folder, mp_rank, dp_rank, experts)
    path = names.MODEL_STATES.path(folder, mp_rank=mp_rank)
    model = storage.read(path, lazy=True)
    shards = _shards(folder, mp_rank, dp_rank)
    if shards is not None:
        saved = FlatState(shards, model["param_shapes"], model, folder)
    else:
        saved = _open_plain(
            folder, mp_rank, model, group_names, shapes or {}, model.get("optimizer") if with_optimizer else None
        )
    saved = with_named(saved, folder, mp_rank, shards, experts)
    saved.model_path = path
    return saved


def _open_plain(folder, mp_rank, model, group_names, shapes, optimizer):
    """Our own files say beside it which parameters the groups have; others' are taken to have those of this run."""
    stage = (model.get(names.PARAMS_BY_RANK) or {}).get("groups")  # of a pipeline, whose weights are in other files
    if stage is not None:
        shapes = {name: shape for group in stage for name, shape in group}
        return PlainState(optimizer, [[name for name, _ in group] for group in stage], shapes, model, folder)
    path = names.RUN_STATES.path(folder, rank=0)
    ours = os.path.exists(path)
    saved_names = storage.read(path, lazy=True).get("group_names") if ours and optimizer is not None else None
    if saved_names:
        group_names, weights = saved_names, model.get("module") or {}
        if any(name not in weights for group in group_names for name in group):  # of experts that every rank had
            listed = (model.get(names.PARAMS_BY_RANK) or {}).get("experts") or ()
            weights = {**weights, **expert_weights(folder, mp_rank, None, listed)}
        shapes = {name: weights[name].shape for group in group_names for name in group}
    # The native optimizer of the other implementation counts in the last parameter of a group only.
    return PlainState(optimizer, group_names if optimizer else (), shapes, model, folder, steps_are_real=ours)


def _open_sliced(folder, mp_rank, dp_rank, experts):
    path = _model_files(folder, mp_rank, dp_rank, 0)[0]
    first = _model_files(folder, mp_rank, 0, dp_rank)[0]
    model = storage.read(path, lazy=True)
    shards = _shards(folder, mp_rank, dp_rank)
    if shards is None and any(model["param_shapes"] or ()):
        raise FileNotFoundError(
            f"the checkpoint {folder} has no file {names.OPTIM_STATES(dp_rank=0, mp_rank=mp_rank)}, nor one for bf16: "
            "at ZeRO stage 3 the weights are in these files; load another tag"
        )
    count = len(shards) if shards is not None else model["dp_world_size"]
    saved = SlicedState(
        shards if shards is not None else [],
        model["param_shapes"] or [],
        model,
        folder,
        OfRanks(functools.partial(_fragments, folder, mp_rank), count),
        model.get("frozen_param_shapes"),
        storage.read(first, lazy=True).get("shared_params") or {},  # others' files may not say
    )
    saved = with_named(saved, folder, mp_rank, shards, experts)
    saved.model_path = path
    return saved
