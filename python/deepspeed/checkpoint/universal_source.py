"""A checkpoint folder as the source of a universal one: its grid of ranks, its parameters, its rules."""

import os

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import names, storage
from deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor
from deepspeed.checkpoint.reshape_utils import get_zero_files
from deepspeed.checkpoint.saved_state import open_saved
from deepspeed.checkpoint.universal_info import ParallelRules
from deepspeed.log import logger


class Source:
    """``folder``: one tag of a checkpoint of any ZeRO stage. ``inject``: missing ``universal_checkpoint_info`` counts
    as an empty one. Opens files when they are asked for, and keeps tensors in them."""

    def __init__(self, folder, inject=False):
        self.folder = folder
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"there is no checkpoint folder {folder}: --input_folder is that of one tag")
        grid = get_model_3d_descriptor(folder)
        self._saved = {}
        self.pp_degree, self.tp_degree = self._degrees(grid.pp_degree, grid.tp_degree)
        self.zero_stage = self.saved(0).zero_stage
        self.info = self._find_info()
        if self.info is None and not inject and self.pp_degree * self.tp_degree > 1:
            raise ValueError(
                f"{folder} is of {self.pp_degree} pipeline stages of {self.tp_degree} tensor-parallel ranks, and its "
                f"model files have no '{keys.UNIVERSAL_CHECKPOINT_INFO}' that says how slices become whole parameters. "
                "Save it with that key in client_state, or pass --inject_missing_state if every parameter is cut along "
                "dimension 0"
            )
        if self.info is None and inject:
            logger.warning(f"{folder} has no '{keys.UNIVERSAL_CHECKPOINT_INFO}': an empty one is taken")
        self.rules = ParallelRules(self.info)

    def _degrees(self, pp_degree, tp_degree):
        """What the model file says, if that fits the number of files; else what their names say."""
        said = self.saved(0).model.get(keys.CHECKPOINT_PARALLEL_DIMS) or {}
        pp, tp = said.get(keys.CHECKPOINT_PP_DEGREE, pp_degree), said.get(keys.CHECKPOINT_TP_DEGREE, tp_degree)
        return (pp, tp) if pp * tp == pp_degree * tp_degree else (pp_degree, tp_degree)

    def saved(self, mp_rank):
        """The ``SavedState`` of a model-parallel rank."""
        if mp_rank not in self._saved:
            plain = not get_zero_files(self.folder)
            self._saved[mp_rank] = self._open_plain(mp_rank) if plain else open_saved(self.folder, mp_rank)
        return self._saved[mp_rank]

    def _open_plain(self, mp_rank):
        """Files of stage 0 do not name the optimizer's parameters. Ours say them beside the model file; else they are
        the module's, in order and in one group, if that fits."""
        module = open_saved(self.folder, mp_rank, with_optimizer=False).model
        shapes, seen = {}, set()
        for name, value in (module.get("module") or {}).items():
            place = _memory_of(value)
            if name not in (module.get(keys.BUFFER_NAMES) or ()) and (place is None or place not in seen):
                shapes[name] = torch.Size(value.shape)
                seen.add(place)
        beside = names.run_states_path(self.folder, 0)
        groups = storage.read(beside).get("group_names") if os.path.exists(beside) else None
        try:
            return open_saved(self.folder, mp_rank, group_names=groups or [list(shapes)], shapes=shapes)
        except ValueError as error:
            raise ValueError(
                f"{self.folder} was saved without ZeRO. Such files do not name the parameters of the optimizer, and "
                "they are not simply all of the module's in one group here, so there is nothing to convert them by. "
                "load_checkpoint reads them into any other stage without a conversion; save again from there. "
                f"({error})"
            ) from error

    def _find_info(self):
        for mp_rank in range(self.pp_degree * self.tp_degree):
            found = self.saved(mp_rank).model.get(keys.UNIVERSAL_CHECKPOINT_INFO)
            if found is not None:
                return found
        return None

    def mp_ranks(self):
        return [pp * self.tp_degree + tp for pp in range(self.pp_degree) for tp in range(self.tp_degree)]

    def parameters(self):
        """dict: name of a trained parameter -> pipeline stage that it is taken from.

        Raises ValueError for one that is in several stages without a pattern that says it is the same in all.
        """
        found = {}
        for pp in range(self.pp_degree):
            for name in self.saved(pp * self.tp_degree).shapes():
                if name in found and not self.rules.is_in_every_stage(name):
                    raise ValueError(
                        f"parameter '{name}' is in the pipeline stages {found[name]} and {pp}, and no entry of "
                        f"{keys.PIPELINE_REPLICATED_PARAMETER_PATTERNS} in {keys.UNIVERSAL_CHECKPOINT_INFO} matches it"
                    )
                found.setdefault(name, pp)
        return found

    def slice_shapes(self, name, pp_index):
        """Shapes of the slices of a parameter, one for each tensor-parallel rank."""
        return [self.saved(pp_index * self.tp_degree + tp).shapes()[name] for tp in range(self.tp_degree)]


def _memory_of(value):
    """What tells tied tensors apart from equal ones, or None."""
    if torch.is_tensor(value):
        return value.data_ptr() or None
    return getattr(value, "place", None)
