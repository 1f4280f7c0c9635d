"""File names of a checkpoint folder, and copies of states that are safe to save."""

import os

import torch

from deepspeed.checkpoint.constants import MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX
from deepspeed.checkpoint.layouts import names, storage


def get_model_ckpt_name_for_rank(base_folder, mp_rank_str):
    """``mp_rank_str`` with its leading zero, "00" for example."""
    return os.path.join(base_folder, f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder, dp_rank, mp_rank):
    """Path of an optimizer file of ranks without bf16."""
    return names.OPTIM_STATES.path(base_folder, dp_rank=dp_rank, mp_rank=mp_rank)


def get_layer_ckpt_name_for_rank(base_folder, layer_id, tp_rank):
    """Path of a layer file; ``layer_id`` with its prefix, "layer_03" for example."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}-{MODEL_FILE_SUFFIX[1:]}")


def clone_tensors_for_torch_save(item, device=torch.device("cpu")):  # noqa: B008 (published default)
    """``item`` (nested dicts, lists and tuples) with every tensor detached and in memory of its own on ``device``.

    A view of a flat buffer would drag the whole buffer into the file. Everything else is passed on as it is.
    """
    return storage.compact(item, device)
