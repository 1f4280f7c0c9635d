"""A checkpoint of a Megatron-style pipeline: layers, embeddings and states by pipeline and tensor-parallel rank."""

import functools
import os

import torch

from deepspeed.checkpoint.constants import LAYER_FILE_PREFIX, PARAM_SHAPES
from deepspeed.checkpoint.layouts import storage
from deepspeed.checkpoint.reshape_3d_utils import model_3d_desc
from deepspeed.checkpoint.reshape_meg_2d import print_map, reshape_meg_2d_parallel
from deepspeed.checkpoint.reshape_utils import (
    get_files,
    get_files_with_prefix,
    get_layer_files,
    get_model_files,
    merge_state,
    partition_data,
)
from deepspeed.checkpoint.zero_checkpoint import ZeROCheckpoint

# ---- layer merge ---------------------------------------------------------------------------------------------------
# Megatron's names of the tensors in a layer file, and how tensor-parallel slices of a layer make a whole one.

# Megatron-LM's names of tensors -> the dimension along which slices are joined; None for what every rank has whole.
_JOINED_ALONG = {
    "input_layernorm.weight": None,
    "input_layernorm.bias": None,
    "self_attention.dense.bias": None,
    "post_attention_layernorm.weight": None,
    "post_attention_layernorm.bias": None,
    "mlp.dense_4h_to_h.bias": None,
    "position_embeddings.weight": None,
    "self_attention.dense.weight": 1,
    "mlp.dense_4h_to_h.weight": 1,
}


def merge_layer_slices(states):
    """One state dict of several tensor-parallel ranks' slices of the same layer. Tensors with other names are joined
    along dimension 0."""
    merged = dict(states[0])
    for key, first in merged.items() if len(states) > 1 else ():
        dim = next((dim for name, dim in _JOINED_ALONG.items() if f".{key}".endswith(f".{name}")), 0)
        if torch.is_tensor(first) and first.dim() and dim is not None:
            merged[key] = torch.cat([state[key] for state in states], dim=dim)
    return merged


# ---- deepspeed checkpoint ------------------------------------------------------------------------------------------

EMBEDDING_LAYER_INDEX = 0
FINAL_LAYER_NORM_INDEX = -1
ARGS_KEY = "args"
CHECKPOINT_INFO_KEY = "checkpoint_info"
ITERATION_KEY = "iteration"


class DeepSpeedCheckpoint:
    """``dir``: a tag's folder. The degrees default to those that wrote it; smaller ones show it as of fewer ranks.

    ``final_layer_norm_idx``: which of the layer files, in order, has the final norm. The transformer layers lie between
    the first one, the embedding, and that.
    """

    def __init__(
        self, dir, tp_degree=None, pp_degree=None, dp_degree=None, final_layer_norm_idx=FINAL_LAYER_NORM_INDEX
    ):
        self.dir = dir
        if not os.path.isdir(dir):
            raise FileNotFoundError(f"there is no checkpoint folder {dir}")
        self.final_layer_norm_idx = final_layer_norm_idx
        self.zero_checkpoint = ZeROCheckpoint(dir)
        self.file_list = get_files(dir)
        self.zero_files = self.zero_checkpoint.file_list
        self.layer_files = get_files_with_prefix(self.file_list, LAYER_FILE_PREFIX)
        self.mp_rank_files = get_model_files(dir)
        self._layers = get_layer_files(dir)
        self.layer_keys = [f"{LAYER_FILE_PREFIX}{layer:02d}" for layer in sorted({layer for layer, _ in self._layers})]
        self.layer_count = len(self.layer_keys)
        source = self.zero_checkpoint.src_3d
        self.original_tp_degree, self.original_pp_degree = source.tp_degree, source.pp_degree
        self.original_dp_degree, self.original_world_size = source.dp_degree, source.world_size()
        self.tp_degree = self.original_tp_degree if tp_degree is None else tp_degree
        self.pp_degree = self.original_pp_degree if pp_degree is None else pp_degree
        self.dp_degree = self.original_dp_degree if dp_degree is None else dp_degree
        self.world_size = self.pp_degree * self.tp_degree * self.dp_degree
        self.global_state = {}
        self.old_2d_map = reshape_meg_2d_parallel(
            self.original_pp_degree, self.original_tp_degree, self.original_pp_degree, self.original_tp_degree
        )
        self.new_2d_map = reshape_meg_2d_parallel(
            self.original_pp_degree, self.original_tp_degree, self.pp_degree, self.tp_degree
        )
        self.zero_checkpoint.reshape(model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree))
        self.tp_to_embedding_map = self._files_by_tp(EMBEDDING_LAYER_INDEX)
        self.tp_to_final_norm_map = self._files_by_tp(self.final_layer_norm_idx)
        self.pp_to_transformer_map, self.transformer_file_map = {}, {}
        if not self.layer_count:
            return
        middle = self.layer_keys[EMBEDDING_LAYER_INDEX + 1 : self.final_layer_norm_idx % self.layer_count]
        if len(middle) % self.pp_degree:
            raise ValueError(
                f"{self.dir} has {len(middle)} transformer layers, which {self.pp_degree} pipeline stages cannot share "
                "evenly; choose another pp_degree, or give final_layer_norm_idx if other layers follow the final norm"
            )
        for pp, keys in enumerate(partition_data(middle, self.pp_degree) or [[]] * self.pp_degree):
            self.pp_to_transformer_map[pp] = list(keys)
            for tp in range(self.tp_degree):
                self.transformer_file_map[tp, pp] = [self._layer_files_of(key)[tp] for key in keys]

    def _layer_files_of(self, layer_key):
        """The files of a layer, one list for each of the new tensor-parallel ranks."""
        layer = int(layer_key[len(LAYER_FILE_PREFIX) :])
        return partition_data([path for (number, _), path in sorted(self._layers.items()) if number == layer],
                              self.tp_degree)  # fmt: skip

    def _files_by_tp(self, index):
        return dict(enumerate(self._layer_files_of(self.layer_keys[index]))) if self.layer_count else {}

    # ---- degrees -----------------------------------------------------------------------------------------------------
    def is_change_tp_degree(self):
        return self.tp_degree != self.original_tp_degree

    def is_change_pp_degree(self):
        return self.pp_degree != self.original_pp_degree

    def is_change_dp_degree(self):
        return self.dp_degree != self.original_dp_degree

    # ---- what is where -----------------------------------------------------------------------------------------------
    def show_2d_mapping(self):
        """Prints which old model-parallel ranks each new one takes."""
        self.old_2d_map.print_data("old 2d mapping:")
        self.new_2d_map.print_data("new 2d mapping:")

    def show_tp_embedding_map(self):
        print_map("tp to embedding files:", self.tp_to_embedding_map)

    def show_tp_final_norm_map(self):
        print_map("tp to final norm files:", self.tp_to_final_norm_map)

    def show_pp_transformer_map(self):
        print_map("pp to transformer layers:", self.pp_to_transformer_map)

    def show_transformer_file_map(self):
        print_map("(tp, pp) to files of transformer layers:", self.transformer_file_map)

    def get_embedding_layer_id(self):
        """Key of the first layer, "layer_01" for example."""
        return self._layer_key(EMBEDDING_LAYER_INDEX)

    def get_final_norm_layer_id(self):
        return self._layer_key(self.final_layer_norm_idx)

    def _layer_key(self, index):
        if not self.layer_count:
            raise ValueError(f"{self.dir} has no layer files: no pipeline wrote it")
        return self.layer_keys[index]

    def get_pp_transformer_map(self, pp_index):
        """Keys of the transformer layers of a pipeline stage."""
        return self.pp_to_transformer_map[self._check(pp_index, self.pp_degree, "pp")]

    def get_embedding_files(self, tp_index):
        return self._of_tp(self.tp_to_embedding_map, tp_index)

    def get_final_norm_files(self, tp_index):
        return self._of_tp(self.tp_to_final_norm_map, tp_index)

    def _of_tp(self, files, tp_index):
        self._layer_key(0)
        return files[self._check(tp_index, self.tp_degree, "tp")]

    def get_2d_parallel_files(self, tp_index, pp_index):
        """The ``mp_rank_RR_model_states.pt`` files whose states a model-parallel rank takes."""
        ranks = self.new_2d_map.get_data(pp_index=pp_index, tp_index=tp_index)
        if len(self.mp_rank_files) < self.original_tp_degree * self.original_pp_degree:
            raise FileNotFoundError(
                f"{self.dir} has {len(self.mp_rank_files)} of {self.original_tp_degree * self.original_pp_degree} "
                "files mp_rank_RR_model_states.pt"
            )
        return [self.mp_rank_files[rank] for rank in ranks]

    def get_zero_files(self, pp_index, tp_index, dp_index):
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    @staticmethod
    def _check(index, degree, what):
        if not 0 <= index < degree:
            raise ValueError(f"{what}_index {index} is not below the {what} degree {degree}")
        return index

    # ---- states ------------------------------------------------------------------------------------------------------
    def get_zero_checkpoint_state(self, pp_index, tp_index, dp_index, strip_tensor_paddings=True):
        """The optimizer state of a rank; see ``ZeROCheckpoint.get_state_for_rank``."""
        return self.zero_checkpoint.get_state_for_rank(
            pp_index,
            tp_index,
            dp_index,
            keys_to_ignore=[PARAM_SHAPES],
            strip_tensor_paddings=strip_tensor_paddings,
        )

    def get_embedding_state(self, tp_index):
        """The embedding layer of a tensor-parallel rank."""
        return merge_layer_slices([storage.read(path) for path in self.get_embedding_files(tp_index)])

    def get_final_norm_state(self, tp_index):
        """The final norm, which all tensor-parallel ranks have whole."""
        return storage.read(self.get_final_norm_files(tp_index)[0])

    def get_transformer_state(self, tp_index, pp_index):
        """A state dict for each transformer layer of a pipeline stage."""
        self._of_tp(self.tp_to_embedding_map, tp_index)
        self._check(pp_index, self.pp_degree, "pp")
        return [
            merge_layer_slices([storage.read(path) for path in files])
            for files in self.transformer_file_map[tp_index, pp_index]
        ]

    def get_2d_parallel_state(self, tp_index, pp_index):
        """The model states of a model-parallel rank; tensors of several old ranks lie end to end along dimension 0."""
        return functools.reduce(merge_state, map(storage.read, self.get_2d_parallel_files(tp_index, pp_index)))

    @functools.cached_property
    def _head(self):
        return storage.read(self.mp_rank_files[0]) if self.mp_rank_files else {}

    def _global(self, key, default):
        return self.global_state.setdefault(key, self._head.get(key, default))

    def get_iteration(self):
        """The value of ``iteration`` in the first model file; 0 without."""
        return self._global(ITERATION_KEY, 0)

    def get_args(self):
        """The value of ``args`` in that file: Megatron's arguments, or None."""
        return self._global(ARGS_KEY, None)

    def get_checkpoint_info(self, info_key=CHECKPOINT_INFO_KEY):
        """The value of ``info_key`` in that file, or None."""
        return self._global(info_key, None)

    def validate_files(self):
        """Raises FileNotFoundError that names the files that have gone since this object was made."""
        missing = [path for path in self.file_list if not os.path.isfile(path)]
        if missing:
            raise FileNotFoundError(f"these files of the checkpoint {self.dir} are gone: {', '.join(missing)}")
