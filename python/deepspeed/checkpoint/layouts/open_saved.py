"""Opens the checkpoint folder of any stage and number of ranks as one ``SavedState``."""

import contextlib
import functools
import itertools
import os

from deepspeed.checkpoint.constants import CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE, TENSOR_CUTS
from deepspeed.checkpoint.layouts import names, storage
from deepspeed.checkpoint.layouts.saved_named import expert_weights, weights_in, with_named
from deepspeed.checkpoint.layouts.saved_native import NativeState, read_json
from deepspeed.checkpoint.layouts.saved_shards import FlatState, PlainState, Shards, SlicedState
from deepspeed.checkpoint.layouts.saved_slices import SavedSlices
from deepspeed.checkpoint.layouts.saved_state import Joined
from deepspeed.checkpoint.layouts.saved_universal import UniversalState
from deepspeed.formats.swapped_tensors import with_swapped


def _shards(folder, mp_rank, dp_rank):
    """``Shards`` in the files of optimizer states, or None. On a disk that only some ranks share the facts are in the
    file of ``dp_rank`` instead of rank 0."""
    for prefix, rank in itertools.product(names.PREFIXES, (0, dp_rank)):
        path = functools.partial(names.OPTIM_STATES.path, folder, mp_rank=mp_rank, prefix=prefix)
        if os.path.exists(path(dp_rank=rank)):
            return Shards(lambda other, path=path: _shard(path(dp_rank=other)), rank, path=path)
    return None


def _shard(path):
    whole = storage.read(path, lazy=True)
    if not isinstance(whole, dict) or "optimizer_state_dict" not in whole:
        raise ValueError(f"{path} is not a file of optimizer states: it has no 'optimizer_state_dict'")
    return with_swapped(path, whole, storage.read)


def open_saved(
    folder, mp_rank=0, dp_rank=0, group_names=(), shapes=None, with_optimizer=True, mp_size=1, experts=None, cuts=None
):
    """The checkpoint in ``folder``, the folder of one tag. No collectives.

    ``dp_rank``: of this run; at stage 3 its own model file is taken where there is one, for buffers. ``group_names``:
    the names of the parameters of each group of this run's optimizer, and ``shapes`` name -> torch.Size of them, which
    files of stage 0 do not say. ``with_optimizer=False`` leaves optimizer states of stage 0 unread. ``mp_size``: number
    of model-parallel ranks of this run, and ``cuts`` name -> ``Cut`` of its parameters, for universal checkpoints:
    their parameters are whole. ``experts``: numbers of those whose files are wanted (None: all).

    Raises FileNotFoundError where there is no model file, ValueError where files do not fit each other, RuntimeError
    where one does not hold what files of checkpoints do.
    """
    with _undamaged(folder):
        if names.is_native(folder):
            return NativeState(folder, mp_rank, dp_rank)
        if names.is_universal(folder):
            return UniversalState(folder, mp_rank, mp_size, dp_rank, group_names, shapes, cuts)
        shards_of = functools.lru_cache(maxsize=None)(lambda of: _shards(folder, of, dp_rank))
        shards = shards_of(mp_rank)
        by_rank = [names.SHARDED_MODEL_STATES.path(folder, dp_rank=rank, mp_rank=mp_rank) for rank in (dp_rank, 0)]
        found = list(filter(os.path.exists, by_rank))
        path = found[0] if found else names.MODEL_STATES.path(folder, mp_rank=mp_rank)
        model = storage.read(path, lazy=True)
        if found:
            saved = _open_sliced(folder, mp_rank, model, shards, storage.read(found[-1], lazy=True))
        elif shards is not None:
            saved = FlatState(shards, model["param_shapes"], model, folder)
        else:
            optimizer = model.get("optimizer") if with_optimizer else None
            saved = _open_plain(folder, mp_rank, model, group_names, shapes or {}, optimizer)
        saved.model_path = path
        return with_named(saved, folder, mp_rank, shards_of, experts)


@contextlib.contextmanager
def _undamaged(folder):
    """RuntimeError that names ``folder`` where the body meets other values than checkpoints have."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise RuntimeError(
            f"the checkpoint {folder} is damaged, or its files are of something else: what they hold does not fit "
            f"({type(error).__name__}: {error}); load an older tag"
        ) from error


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


def _open_sliced(folder, mp_rank, model, shards, first):
    """``first``: the model file of the first rank: others' may not say which parameters are tied."""
    if shards is None and any(model["param_shapes"] or ()):
        raise FileNotFoundError(
            f"the checkpoint {folder} has no file {names.OPTIM_STATES(dp_rank=0, mp_rank=mp_rank)}, nor one for bf16: "
            "at ZeRO stage 3 the weights are in these files; load another tag"
        )

    @functools.lru_cache(maxsize=None)
    def fragments(rank):
        path = names.SHARDED_MODEL_STATES.path(folder, dp_rank=rank, mp_rank=mp_rank)
        return storage.read(path, lazy=True).get("frozen_param_fragments") or {}

    return SlicedState(
        [] if shards is None else shards,
        model["param_shapes"] or [],
        model,
        folder,
        fragments,
        model["dp_world_size"] if shards is None else len(shards),
        model.get("frozen_param_shapes"),
        first.get("shared_params") or {},
    )


# ---- slices of tensor-parallel ranks -------------------------------------------------------------------------------
def _facts(folder):
    """``(whether stages of a pipeline have saved the tag, the facts of the run in the first of its model files)``."""
    if names.is_native(folder):
        about = read_json(os.path.join(folder, names.checkpoint_json()))
        return about.get("pipeline"), about["engine"]
    files = sorted(filter(names.is_model_file, os.listdir(folder)))
    about = storage.read(os.path.join(folder, files[0]), lazy=True) if files else {}
    return "layers" in (about.get(names.PARAMS_BY_RANK) or {}) or about.get("module", {}) is None, about


def _open_slices(folder, rank, count, cuts, **options):
    """As ``open_saved`` for tensor-parallel rank ``rank`` of ``count``. ``cuts``: name -> ``Cut`` of this run's
    parameters. With None the checkpoint itself says how parameters are put together."""
    if names.is_universal(folder):
        return open_saved(folder, rank, mp_size=count, cuts=cuts, **options)
    about = _facts(folder)[1]
    staged = (about.get(names.RESERVED_KEY) or {}).get(CHECKPOINT_PP_DEGREE, 1) > 1
    saved, tables = about.get("mp_world_size", count), about.get(TENSOR_CUTS) or {}
    own = _tables_in(cuts)
    known = tables if cuts is None else {name: table for name, table in tables.items() if name in cuts}
    if staged or (saved == count or cuts is None) and own == known:
        return open_saved(folder, rank, mp_size=count, **options)
    states = [open_saved(folder, other, mp_size=count, **options) for other in range(saved)]
    with _undamaged(folder):
        return SavedSlices(states, cuts or {}, rank, count)


def _tables_in(cuts):
    return {name: cut.table for name, cut in (cuts or {}).items() if cut.table is not None}


# ---- pipelines -----------------------------------------------------------------------------------------------------
# Every stage of a pipeline has files as if it were a run of its own, and the weights lie in files of layers, so any
# number of stages can read them.


def pipeline_degrees(folder):
    """``(pipeline stages, tensor-parallel ranks)`` of a ``PipelineModule`` that saved the tag ``folder``, as the first
    of its model files says, or None where none did."""
    said, about = _facts(folder)
    degrees = about.get(names.RESERVED_KEY) or {}
    return (degrees.get(CHECKPOINT_PP_DEGREE, 1), degrees.get(CHECKPOINT_TP_DEGREE, 1)) if said else None


def open_run(folder, mp_rank=0, dp_rank=0, mp_size=1, stages=1, layers=None, tied=None, cuts=None, **options):
    """As ``open_saved``, of any number of tensor-parallel ranks, and of a pipeline all stages as one.

    ``stages``: of this run, whose model-parallel ranks are numbered stage by stage; ``layers``: numbers of the layers
    whose weights are wanted (None: all); ``tied``: number of a layer -> its path in the module, where that is not the
    number; ``cuts``: name -> ``Cut`` of this run's parameters, by which whole ones are cut (None: they stay whole).
    """
    degrees, slices = pipeline_degrees(folder), mp_size // stages
    if degrees is None:
        return _open_slices(folder, mp_rank % slices, slices, cuts, dp_rank=dp_rank, **options)
    pp, tp = degrees
    if names.is_universal(folder):
        options["cuts"] = cuts

    def opened(ranks, tp_rank):
        states = [open_saved(folder, rank, dp_rank, mp_size=slices, **options) for rank in ranks]
        _check_optimizers(folder, ranks, states)
        weights = {} if names.is_native(folder) else _layer_weights(folder, tp, tp_rank % tp, layers, tied, states)
        if names.is_universal(folder):  # it has whole parameters; buffers are in the files of layers
            whole = {*states[0].shapes, *states[0].frozen_shapes}
            weights = {name: value for name, value in weights.items() if name not in whole}
        own = mp_rank // slices if mp_rank // slices < len(states) else 0
        joined = Joined(states, _model_of(states, own), weights, own)
        joined.is_whole = tp == 1
        return joined

    def of_stages(tp_rank):
        return opened([number * tp + tp_rank for number in range(pp)], tp_rank)

    if names.is_universal(folder):
        return opened([mp_rank % slices], mp_rank % slices)
    tables, own = _facts(folder)[1].get(TENSOR_CUTS) or {}, _tables_in(cuts)
    if tp == slices and all(tables.get(name) == table for name, table in own.items()):
        return of_stages(mp_rank % slices)
    return SavedSlices([of_stages(tp_rank) for tp_rank in range(tp)], cuts or {}, mp_rank % slices, slices)


def _check_optimizers(folder, ranks, states):
    """FileNotFoundError where some stages have optimizer states and another has none."""
    have = [state.has_optimizer() for state in states]
    if any(have) and not all(have):
        lacking = ranks[have.index(False)]
        raise FileNotFoundError(
            f"the checkpoint {folder} has no file {names.OPTIM_STATES(dp_rank=0, mp_rank=lacking)}, nor one for bf16, "
            "and other stages of its pipeline have theirs: it is incomplete; load an older tag"
        )


def _model_of(states, own):
    """The model file of the stage ``own``, with the modules and the names of buffers of all."""
    modules = [state.model.get("module") or {} for state in states]
    buffers = [name for state in states for name in state.model.get("buffer_names") or ()]
    return {
        **states[own].model,
        "module": {name: value for module in modules for name, value in module.items()},
        "buffer_names": list(dict.fromkeys(buffers)),
    }


def _layer_weights(folder, tp, tp_rank, wanted, tied, states):
    """name -> lazy tensor of what the files of layers have."""
    layers = [(state.model.get(names.PARAMS_BY_RANK) or {}).get("layers") or {} for state in states]
    paths = {int(layer): path for known in [tied or {}, *layers] for layer, path in known.items()}
    slices = f"model_{tp_rank:02d}" if tp > 1 else ""
    files = {int(layer): names.layer_states(int(layer), slices) for known in layers for layer in known}
    for name, known in names.LAYER_STATES.found_in(folder).items():
        if tp == 1 or known["slices"].endswith(f"_{tp_rank:02d}"):
            files[known["layer"]] = name
    return {
        f"{paths.get(layer, layer)}.{name}": value
        for layer in sorted(files if wanted is None else files.keys() & set(wanted))
        for name, value in weights_in(folder, files[layer], "a layer").items()
    }
