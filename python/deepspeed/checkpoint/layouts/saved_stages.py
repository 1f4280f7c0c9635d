"""A checkpoint of a pipeline: every stage has files as if it were a run of its own, and the weights lie in files of
layers, so any number of stages can read them."""

import os

from deepspeed.checkpoint.constants import CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.open_saved import open_saved
from deepspeed.checkpoint.layouts.saved_native import read_json
from deepspeed.checkpoint.layouts.saved_slices import SavedSlices
from deepspeed.checkpoint.layouts.saved_state import SavedState
from deepspeed.checkpoint.read import storage


class SavedStages(SavedState):
    """``states``: the ``SavedState`` of each stage. Of what several have (tied weights), the first one's counts.
    ``weights``: name -> lazy tensor of what the files of layers have. ``own``: stage whose counters are taken."""

    def __init__(self, states, weights=None, own=0, is_whole=True):
        super().__init__()
        self.is_whole = is_whole  # its layers are no slices of tensor-parallel ranks
        self._states, self._weights = states, weights or {}
        first = states[own if own < len(states) else 0]
        self.folder, self.zero_stage, self.dp_world_size = first.folder, first.zero_stage, first.dp_world_size
        self.masters_only = all(state.masters_only for state in states)
        self.model, self.model_path = {**first.model, "module": {}}, first.model_path
        self.ranks = [rank for state in states for rank in getattr(state, "ranks", ())]
        self._owner = {}
        for state in states:
            self.model["module"].update(state.model.get("module") or {})
            for name in state.shapes():
                self._owner.setdefault(name, state)
        self.model["buffer_names"] = list(
            dict.fromkeys(name for state in states for name in state.model.get("buffer_names") or ())
        )

    def shapes(self):
        return {name: state.shapes()[name] for name, state in self._owner.items()}

    def param_groups(self):
        of_all = [state.param_groups() for state in self._states]
        made = [dict(group) for group in max(of_all, key=len)]
        for number, group in enumerate(made):
            parts = [part for groups in of_all for part in groups[number : number + 1]]
            group["names"] = list(dict.fromkeys(name for part in parts for name in part["names"]))
        return made

    def state_names(self):
        return list(dict.fromkeys(kind for state in self._states for kind in state.state_names()))

    def scalars(self, name):
        return self._owner[name].scalars(name)

    def state_pieces(self, name, kind):
        return self._owner[name].state_pieces(name, kind)

    def has_optimizer(self):
        return any(state.has_optimizer() for state in self._states)

    def extra(self):
        return self._states[0].extra()

    def run_states(self, rank):
        found = [state.run_states(rank) for state in self._states]
        return next((one for one in found if one is not None and one[1]), found[0])

    def module(self):
        found = {}
        for state in reversed(self._states):
            found.update(state.module())
        return {**found, **self._weights}

    def aliases(self):
        return {alias: name for state in reversed(self._states) for alias, name in state.aliases().items()}

    def frozen_shapes(self):
        shapes = {}
        for state in reversed(self._states):
            shapes.update(state.frozen_shapes())
        return shapes

    def frozen_pieces(self, name):
        return next((pieces for pieces in (state.frozen_pieces(name) for state in self._states) if pieces), [])

    def weight_shape(self, name):
        shape = super().weight_shape(name)
        return shape or next((s for s in (state.weight_shape(name) for state in self._states) if s is not None), None)


def open_run(folder, mp_rank=0, dp_rank=0, mp_size=1, stages=1, layers=None, tied=None, cuts=None, **options):
    """As ``open_saved``, and of a pipeline all stages as one. ``stages``: of this run, whose model-parallel ranks are
    numbered stage by stage; ``layers``: numbers of the layers whose weights are wanted (None: all); ``tied``: number of
    a layer -> its path in the module, where that is not the number; ``cuts``: name -> ``Cut`` of this run's parameters,
    by which slices of another number of tensor-parallel ranks are put together.
    """
    about, slices = _about(folder), mp_size // stages
    if not _is_pipeline(about):
        return open_saved(folder, mp_rank if stages == 1 else mp_rank % slices, dp_rank, mp_size=slices, **options)
    degrees = about.get(names.RESERVED_KEY) or {}
    pp, tp = degrees.get(CHECKPOINT_PP_DEGREE, 1), degrees.get(CHECKPOINT_TP_DEGREE, 1)

    def opened(ranks, tp_rank):
        states = [open_saved(folder, rank, dp_rank, mp_size=slices, **options) for rank in ranks]
        if len(ranks) > 1:
            _check_optimizers(folder, ranks, states)
        paths = dict(tied or {})
        for state in states:
            paths.update((state.model.get(names.PARAMS_BY_RANK) or {}).get("layers") or {})
        weights = {} if names.is_native(folder) else _layer_weights(folder, tp, tp_rank % tp, layers, paths, states)
        if names.is_universal(folder):  # it has whole parameters; buffers are in the files of layers
            weights = {name: value for name, value in weights.items() if name not in states[0].shapes()}
        return SavedStages(states, weights, mp_rank // slices, is_whole=tp == 1)

    if names.is_universal(folder):
        return opened([mp_rank % slices], mp_rank % slices)
    if tp == slices:
        return opened([number * tp + mp_rank % slices for number in range(pp)], mp_rank % slices)
    saved = [opened([number * tp + tp_rank for number in range(pp)], tp_rank) for tp_rank in range(tp)]
    return SavedSlices(saved, cuts or {}, mp_rank % slices, slices)


def is_pipeline(folder):
    """Whether stages of a ``PipelineModule`` saved the tag ``folder``."""
    return _is_pipeline(_about(folder))


def _is_pipeline(about):
    said = "layers" in (about.get(names.PARAMS_BY_RANK) or {})
    return said or ("module" in about and about["module"] is None)


def _check_optimizers(folder, ranks, states):
    """FileNotFoundError where some stages have optimizer states and another has none."""
    have = [state.has_optimizer() for state in states]
    if any(have) and not all(have):
        lacking = ranks[have.index(False)]
        raise FileNotFoundError(
            f"the checkpoint {folder} has no file {names.OPTIM_STATES(dp_rank=0, mp_rank=lacking)}, nor one for bf16, "
            "and other stages of its pipeline have theirs: it is incomplete; load an older tag"
        )


def _about(folder):
    """What a model file says, the first there is."""
    if names.is_native(folder):
        about = read_json(os.path.join(folder, names.checkpoint_json()))
        return {**about["engine"], **({names.PARAMS_BY_RANK: {"layers": {}}} if about.get("pipeline") else {})}
    for name in sorted(os.listdir(folder)):
        if names.is_model_file(name):
            return storage.read(os.path.join(folder, name), lazy=True)
    return {}


def _layer_weights(folder, tp, tp_rank, wanted, paths, states):
    """name -> lazy tensor. ``paths``: number of a layer -> its path in the module."""
    paths = {int(layer): path for layer, path in paths.items()}
    files = {}
    for state in states:
        for layer in (state.model.get(names.PARAMS_BY_RANK) or {}).get("layers") or {}:
            files[int(layer)] = names.layer_states(int(layer), f"model_{tp_rank:02d}" if tp > 1 else "")
    for name, known in names.LAYER_STATES.found_in(folder).items():
        if tp == 1 or known["slices"].endswith(f"_{tp_rank:02d}"):
            files[known["layer"]] = name
    found = {}
    for layer in sorted(files if wanted is None else files.keys() & set(wanted)):
        state = storage.read(os.path.join(folder, files[layer]), lazy=True)
        if not isinstance(state, dict):
            raise ValueError(f"{os.path.join(folder, files[layer])} is no file of a layer: it holds no weights by name")
        found.update({f"{paths.get(layer, layer)}.{name}": value for name, value in state.items()})
    return found
