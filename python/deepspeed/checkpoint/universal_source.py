"""A checkpoint folder as the source of a universal one: its grid of ranks, its parameters, its rules."""

import os

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import native_names, storage
from deepspeed.checkpoint.autoep_universal import layers_of, metadata_of
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
        self._saved = {}
        self.pp_degree, self.tp_degree = self._degrees(*self._counted())
        if not self.saved(0).shapes():
            raise ValueError(
                f"{folder} has no optimizer states (files *{keys.OPTIM_FILE_SUFFIX}), so there are no fp32 weights to "
                "convert: it was saved without an optimizer, or the files are gone"
            )
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
        self._refuse_experts()

    def _counted(self):
        """Pipeline and tensor-parallel degrees by the files there are."""
        if native_names.is_native(self.folder):
            return 1, native_names.mp_size(self.folder)
        grid = get_model_3d_descriptor(self.folder)
        return grid.pp_degree, grid.tp_degree

    def _degrees(self, pp_degree, tp_degree):
        """What the model file says, if that fits the number of files; else what their names say."""
        said = self.saved(0).model.get(keys.CHECKPOINT_PARALLEL_DIMS) or {}
        pp, tp = said.get(keys.CHECKPOINT_PP_DEGREE, pp_degree), said.get(keys.CHECKPOINT_TP_DEGREE, tp_degree)
        return (pp, tp) if pp * tp == pp_degree * tp_degree else (pp_degree, tp_degree)

    def saved(self, mp_rank):
        """The ``SavedState`` of a model-parallel rank."""
        if mp_rank not in self._saved:
            plain = not native_names.is_native(self.folder) and not get_zero_files(self.folder)
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
        try:
            return open_saved(self.folder, mp_rank, group_names=[list(shapes)], shapes=shapes)
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
        files = get_zero_files(self.folder)
        inner = storage.read(files[0], lazy=True).get(keys.OPTIMIZER_STATE_DICT) if files else None
        return (inner or {}).get(keys.UNIVERSAL_CHECKPOINT_INFO)

    def _refuse_experts(self):
        for mp_rank in self.mp_ranks():
            layers = layers_of(metadata_of(self.saved(mp_rank).model))
            if layers:
                raise ValueError(
                    f"{self.folder} has layers whose experts lie on different ranks ("
                    f"{', '.join(str(layer.get('module_path')) for layer in layers)}): their files do not become whole "
                    "parameters here. Its other parameters could, but the result would not be the model"
                )

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
    """What tied tensors have in common and equal ones have not, or None for an empty one."""
    if torch.is_tensor(value):
        return (value.data_ptr(), tuple(value.shape)) if value.numel() else None
    return (id(value.memory), value.offset, tuple(value.shape)) if value.numel() else None
