"""The optimizer files of a checkpoint, seen as a grid of pipeline, tensor and data-parallel ranks, or a smaller one."""

import itertools
import os

import torch

from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARAM_SLICE_MAPPINGS,
    PARTITION_COUNT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.checkpoint.layouts import storage
from deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor
from deepspeed.checkpoint.reshape_utils import get_zero_files, merge_state
from deepspeed.utils.tensor_fragment import fragment_address


class ZeROCheckpoint:
    """``dir``: a tag's folder. ``source_3d``: the degrees that wrote it, read off the file names by default."""

    def __init__(self, dir, source_3d=None):
        self.dir = dir
        self.file_list = get_zero_files(dir)
        self.num_files = len(self.file_list)
        if not self.num_files:
            raise FileNotFoundError(
                f"{dir} has no file *_optim_states.pt: it is not a folder of a ZeRO checkpoint (its parent may be one)"
            )
        self.src_3d = source_3d if source_3d is not None else get_model_3d_descriptor(dir)
        if self.src_3d.world_size() != self.num_files:
            raise ValueError(
                f"{dir} has {self.num_files} optimizer files, a grid of {self.src_3d.get_desc()} has "
                f"{self.src_3d.world_size()}: files are missing, or the degrees are wrong"
            )
        self.reshape(self.src_3d)

    def get_src_world_size(self):
        return self.src_3d.world_size()

    def get_src_tp_degree(self):
        return self.src_3d.tp_degree

    def get_src_pp_degree(self):
        return self.src_3d.pp_degree

    def get_src_dp_degree(self):
        return self.src_3d.dp_degree

    def get_file_indices_for_rank(self, pp_index, tp_index, dp_index):
        """Positions in ``file_list`` of the files whose states the rank of the target grid takes."""
        valid, errors = self.target_3d.is_valid(pp_index, tp_index, dp_index)
        if not valid:
            raise ValueError("; ".join(errors))
        return self._3d_file_map[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index, tp_index, dp_index):
        return [self.file_list[index] for index in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)]

    def get_state_for_rank(self, pp_index, tp_index, dp_index, keys_to_ignore=[], strip_tensor_paddings=True):  # noqa: B006
        """The states of the rank's files as one; flat tensors lie end to end.

        ``strip_tensor_paddings``: what the ranks have appended to make shards equal goes first, and ``group_paddings``
        become 0. Keys of ``keys_to_ignore`` are left out of the files.
        """
        merged = None
        for path in self.get_files_for_rank(pp_index, tp_index, dp_index):
            state = {key: value for key, value in storage.read(path).items() if key not in keys_to_ignore}
            if strip_tensor_paddings:
                _strip_paddings(state)
            _join_mappings(merged, state)
            merged = state if merged is None else merge_state(merged, state)
        inner, degree = _inner(merged), self.target_3d.dp_degree
        count, paddings = inner.get(PARTITION_COUNT), inner.get(GROUP_PADDINGS)
        if count is not None:
            inner[PARTITION_COUNT] = [degree] * len(count) if isinstance(count, (list, tuple)) else degree
        if strip_tensor_paddings and paddings:
            inner[GROUP_PADDINGS] = [0] * len(paddings)
        return merged

    def print_3d_index_map(self, tag=None):
        """Prints, for each rank of the target grid, the positions of its files."""
        self._print(tag, self.get_file_indices_for_rank)

    def print_3d_file_map(self, tag=None):
        """The same with file names."""
        self._print(tag, lambda *rank: [os.path.basename(path) for path in self.get_files_for_rank(*rank)])

    def _print(self, tag, of_rank):
        if tag:
            print(tag)
        grid = self.target_3d
        for dp, pp, tp in itertools.product(*map(range, (grid.dp_degree, grid.pp_degree, grid.tp_degree))):
            print(f"pp {pp}, tp {tp}, dp {dp}: {of_rank(pp, tp, dp)}")

    def reshape(self, target_3d_desc):
        """From now on states are those of the ranks of ``target_3d_desc``. Raises ValueError when it does not fit."""
        self._3d_file_map = self.src_3d.reshape(target_3d_desc)
        self.target_3d = target_3d_desc


def _inner(state):
    found = state.get(OPTIMIZER_STATE_DICT)
    return found if isinstance(found, dict) else {}


def _strip_paddings(state):
    """Cuts each group's padding off its states, which keep it on disk; the fp32 shards there have none."""
    inner = _inner(state)
    paddings = inner.get(GROUP_PADDINGS)
    base = inner.get(BASE_OPTIMIZER_STATE)
    if not paddings or not isinstance(base, dict):
        return
    shards = inner.get(SINGLE_PARTITION_OF_FP32_GROUPS) or []
    for group, states in base.get("state", {}).items():
        for name, value in states.items():
            if torch.is_tensor(value) and value.dim():
                wanted = shards[group].numel() if group < len(shards) else value.numel() - paddings[group]
                states[name] = value[:wanted]


def _join_mappings(merged, state):
    """Adds to ``merged`` the ranges of parameters when the shards of ``state`` follow. Slices of one parameter that are
    not end to end have no range: then neither keeps a mapping."""
    if merged is None or not _inner(state).get(PARAM_SLICE_MAPPINGS):
        return
    ours, theirs = _inner(merged), _inner(state)
    found = ours.pop(PARAM_SLICE_MAPPINGS, None)
    added = theirs.pop(PARAM_SLICE_MAPPINGS)
    shards = ours.get(SINGLE_PARTITION_OF_FP32_GROUPS)
    if found is None or shards is None:
        return
    for group, (mapping, more) in enumerate(zip(found, added, strict=True)):
        offset = shards[group].numel()
        for name, piece in more.items():
            before = mapping.get(name)
            if before is None:
                mapping[name] = fragment_address(numel=piece.numel, start=piece.start + offset)
            elif before.start + before.numel == piece.start + offset:
                mapping[name] = fragment_address(numel=before.numel + piece.numel, start=before.start)
            else:
                return
    ours[PARAM_SLICE_MAPPINGS] = found
