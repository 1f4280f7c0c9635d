"""Weights of experts, read by themselves: what a script that loads the rest on its own adds to it."""

import os
import re

import torch

from deepspeed.checkpoint.layouts.open_saved import open_saved
from deepspeed.checkpoint.layouts.saved_named import expert_files
from deepspeed.checkpoint.layouts.saved_state import eager
from deepspeed.utils import groups
from deepspeed.utils.norms import is_moe_param
from deepspeed.zero.parameters.param_ranks import saved_part, shape_of

_OLD = re.compile(r"(\.deepspeed_experts\.)(\d+)(?=\.)")


def of_model(folder, weights, mp_rank, checkpoint_engine):
    """name in the model with these ``weights`` (``ModuleTensors``) -> tensor of all weights and buffers of experts that
    this rank has, of a checkpoint that any number of ranks and any stage has saved. ValueError that names one that it
    has not."""
    named = weights.named
    wanted = {n: p for n, p in weights.params.items() if named.expert(n) is not None or is_moe_param(p)}
    buffers = {n: b for n, b in weights.buffers.items() if named.expert(n) is not None}
    given = _in_files(folder, mp_rank, named.numbers(), checkpoint_engine)
    found = {name: given[named(name)] for name in [*wanted, *buffers] if named(name) in given}
    if len(found) == len(wanted) + len(buffers):
        return found
    saved = open_saved(folder, mp_rank, with_optimizer=False, experts=named.numbers())
    for name, param in wanted.items():
        known = named(name)
        first, whole = saved_part(param)
        if tuple(saved.weight_shape(known) or ()) != tuple(whole):
            raise ValueError(
                f"{folder} has '{known}' with shape {tuple(saved.weight_shape(known) or ())}, and the model's is "
                f"{tuple(whole)}: build the model with the experts that were saved"
            )
        value = torch.empty(shape_of(param), dtype=param.dtype)
        saved.read_into(value, saved.pieces(known, "weight"), first, f"parameter '{known}'")
        found[name] = value
    module = saved.module()
    found.update({name: eager(module[named(name)]) for name in buffers if named(name) in module})
    return found


def of_old_files(folder, num_experts, mp_rank, checkpoint_engine):
    """The same of files ``expert_E_mp_rank_RR_model_states.pt``, without a model: the ranks of the largest expert group
    share ``num_experts`` (a number, or a list, whose largest counts) experts of each layer."""
    total = max(num_experts) if isinstance(num_experts, (list, tuple)) else num_experts
    name = groups._get_max_expert_size_name()
    rank, ranks = groups._get_expert_parallel_rank(name), groups._get_expert_parallel_world_size(name)
    if total % ranks != 0:
        raise ValueError(f"num_experts={num_experts} cannot be shared by the {ranks} ranks of {name}")
    local = total // ranks
    given = _in_files(folder, mp_rank, range(rank * local, (rank + 1) * local), checkpoint_engine)
    return {_OLD.sub(lambda m: f"{m[1]}{int(m[2]) - rank * local}", key): value for key, value in given.items()}


def _in_files(folder, mp_rank, numbers, checkpoint_engine):
    found = {}
    for name in expert_files(folder, mp_rank, set(numbers)):
        found.update(checkpoint_engine.load(os.path.join(folder, name), map_location="cpu"))
    return found
