"""Parameters that can load their fp32 values and optimizer states from the folder of a universal checkpoint.

The engine reads universal checkpoints by itself (``checkpoint.load_universal``); these functions serve callers that
keep flat fp32 partitions of their own (``utils.link_hp_params``), and read one parameter at a time.
"""

import glob
import os
import types

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.layouts import storage
from deepspeed.checkpoint.layouts.saved_universal import SubparamShape, local_slice  # noqa: F401 (published here)
from deepspeed.utils.tensor_slices import cut_of_widths, even_cut, narrow


def enable_universal_checkpoint(param_list):
    """Gives every parameter the method ``load_hp_checkpoint_state``."""
    for param in param_list:
        param.load_hp_checkpoint_state = types.MethodType(load_hp_checkpoint_state, param)


def load_hp_checkpoint_state(self, folder, tp_rank, tp_world_size, ep_rank=0, ep_size=1):
    """Method of a linked parameter: its fragment takes its part of the values and states in ``folder``.

    ``folder``: that of the parameter, ``zero/<name>``. Experts are cut along dimension 0 into ``ep_size`` parts.
    Returns the step, or None without one. Raises FileNotFoundError without files, ValueError where shapes do not fit.
    """
    files = sorted(glob.glob(os.path.join(folder, "*.pt")))
    if not files:
        raise FileNotFoundError(
            f"the universal checkpoint has no parameter {folder}: the model has other parameters than the one that was "
            "saved"
        )
    step = None
    for path in files:
        key = os.path.splitext(os.path.basename(path))[0]
        saved = storage.read(path)
        if key == "step":
            step = saved
        elif self._hp_mapping is not None:
            _load_fragment(self, key, _local(self, folder, saved, tp_rank, tp_world_size, ep_rank, ep_size))
    return step


def _local(param, folder, saved, tp_rank, tp_world_size, ep_rank, ep_size):
    file = saved if isinstance(saved, dict) else {keys.PARAM: saved}
    full = file[keys.PARAM]
    if file.get(keys.EP_IS_EXPERT_PARAM) and ep_size > 1:
        full = narrow(full, 0, even_cut([full.shape[0]], ep_size, f"experts of {folder}"), ep_rank)
    resolved = _resolve_autotp_partition(param, file, full, tp_rank, tp_world_size)
    if resolved is not None:
        return resolved
    return local_slice(os.path.basename(folder), file, full, param.shape, tp_rank, tp_world_size).reshape(-1)


def _load_fragment(param, key, flat):
    mapping = param._hp_mapping
    part = mapping.lp_fragment_address
    piece = flat.narrow(0, part.start, part.numel)
    if key == keys.FP32_WEIGHT_KEY:
        mapping.put_hp_fragment(piece)
    else:
        mapping.put_optim_state_fragment(key, piece)


def _get_param_uc_restore_meta(param):
    """The notes of automatic tensor parallelism on a parameter about the slice that it is, or None."""
    return getattr(param, keys.DS_AUTOTP_UC_META, None)


def _narrow_sub_params(full_view, partition_dim, sub_dim_sizes, shard_widths, tp_rank, tp_world_size, uc_version):
    """A rank's slices of sub-parameters that lie end to end along ``partition_dim`` of ``full_view``, side by side.

    ``sub_dim_sizes``: their sizes. ``shard_widths``: for each one the widths of all ranks' slices; with None, or with
    widths of another number of ranks, slices are equal. Raises ValueError where equal ones leave a rest.
    """
    if shard_widths is None or any(len(width) != tp_world_size for width in shard_widths):
        what = f"sub-parameters of sizes {tuple(sub_dim_sizes)} in a universal checkpoint of version {uc_version}"
        cut = even_cut(sub_dim_sizes, tp_world_size, what)
    else:
        cut = cut_of_widths(sub_dim_sizes, shard_widths)
    return narrow(full_view, partition_dim, cut, tp_rank)


def _resolve_autotp_partition(current_param, ckpt_dict, full_hp_param, tp_rank, tp_world_size):
    """The rank's slice of a whole parameter, flat, by the notes of automatic tensor parallelism; None without any."""
    meta = _get_param_uc_restore_meta(current_param)
    if not meta:
        return None
    if meta.get("unsupported_reason"):
        raise ValueError(f"this parameter cannot be loaded from a universal checkpoint: {meta['unsupported_reason']}")
    dim = meta.get("partition_dim")
    if meta.get("replicated") or dim is None:
        return full_hp_param.reshape(-1)
    logical = meta.get("logical_shape") or full_hp_param.shape
    same = torch.Size(logical).numel() == full_hp_param.numel()
    full = full_hp_param.reshape(tuple(logical)) if same else full_hp_param
    sizes, widths = meta.get("sub_param_sizes"), meta.get("sub_param_shard_widths")
    if sizes is None:  # the parameter is the only one
        sizes, widths = [full.shape[dim]], [meta.get("partition_sizes") or ()]
    version = ckpt_dict.get(keys.UNIVERSAL_CHECKPOINT_VERSION_KEY, keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE)
    part = _narrow_sub_params(full, dim, sizes, widths, tp_rank, tp_world_size, version)
    wanted = meta.get("target_partition_shape")
    if wanted is not None and torch.Size(wanted).numel() != part.numel():
        raise ValueError(
            f"the universal checkpoint gives a slice of shape {tuple(part.shape)}, this model has {tuple(wanted)}: it "
            "is another model, or another number of tensor-parallel ranks was meant"
        )
    return part.reshape(-1)
