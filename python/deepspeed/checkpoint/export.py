"""Weights of a running engine for others to read, in the dtype that the model computes with.

At ZeRO stage 3 a parameter is whole only while it is gathered: one at a time, on every rank, in the same order.
"""

import os

import torch

from deepspeed import comm as dist
from deepspeed._compat import named_parameters
from deepspeed.checkpoint.ranks import failure_of, raise_together
from deepspeed.log import logger
from deepspeed.utils.lazy_tensor import itemsize
from deepspeed.utils.weight_files import StoredWeight, as_weight, write_safetensors, write_torch, write_whole
from deepspeed.zero.gathered import GatheredParameters
from deepspeed.zero.sharded_parameter import is_sharded


class _ShardedWeight(StoredWeight):
    """A parameter of stage 3. ``chunks()`` gathers it, so every rank must ask for the chunks of the same ones."""

    def __init__(self, param):
        self.param, self.gathered = param, 0
        self.shape, self.dtype = torch.Size(param.ds_shape), param.dtype

    def chunks(self):
        self.gathered += 1
        with torch.no_grad(), GatheredParameters([self.param]):
            values = self.param.detach()
            yield from StoredWeight([(values, 0, values.numel())], self.shape, self.dtype).chunks()

    def gather(self):
        """What the other ranks do meanwhile, or this one when it no longer writes."""
        self.gathered += 1
        with GatheredParameters([self.param]):
            pass


def _state_of(engine, exclude_frozen_parameters):
    """The module's state dict with sharded parameters as weights, tied names with the same object."""
    state = engine.module_state_dict(keep_vars=True, exclude_frozen_parameters=exclude_frozen_parameters)
    by_name = dict(named_parameters(engine.module))
    made = {}
    for name in state:
        param = by_name.get(name)
        if param is not None and is_sharded(param):
            state[name] = made.setdefault(id(param), _ShardedWeight(param))
    return state


def _drain(engine):
    if engine.core is not None and engine.core.gatherer is not None:
        engine.core.gatherer.drain()


def _tensors_only(state):
    """For a format that holds nothing else."""
    return {name: value for name, value in state.items() if as_weight(value) is not None}


def _turns(state, safetensors):
    """The sharded weights in the order in which a file of this format asks for their chunks."""
    found = [value for value in state.values() if isinstance(value, _ShardedWeight)]
    if safetensors:  # it has no ties: a weight is written under each of its names
        return sorted(found, key=lambda weight: -itemsize(weight.dtype))
    return list({id(weight): weight for weight in found}.values())


def _write(state, path, turns):
    """Rank 0's part. A failure does not leave the others alone in a collective."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write = write_safetensors if path.endswith(".safetensors") else write_torch
        write_whole(path, write, _tensors_only(state) if path.endswith(".safetensors") else state)
    finally:
        done = sum(weight.gathered for weight in {id(weight): weight for weight in turns}.values())
        for weight in turns[done:]:
            weight.gather()


def save_16bit_model(engine, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
    """Rank 0 writes the module's state dict to ``save_dir/save_filename``, as safetensors when the name ends in
    ``.safetensors``; every rank calls it.

    Parameters pass through one after the other: no rank holds more of the model than it does anyway, and the largest
    parameter. Returns True; at ZeRO stage 3 False, with nothing written, unless
    ``zero_optimization.stage3_gather_16bit_weights_on_model_save`` is on. ValueError without ``save_dir``; the error of
    rank 0 on every rank.
    """
    if not save_dir:
        raise ValueError(f"save_16bit_model needs a directory, got save_dir={save_dir!r}")
    path = os.path.join(os.fspath(save_dir), save_filename)
    if engine._stage_policy.shards_params and not engine.zero_gather_16bit_weights_on_model_save():
        logger.warning(
            f"nothing is saved to {save_dir}: set zero_optimization.stage3_gather_16bit_weights_on_model_save to true "
            "to gather the weights of ZeRO stage 3 for it"
        )
        return False
    state = _state_of(engine, exclude_frozen_parameters)
    turns, error = _turns(state, path.endswith(".safetensors")), None
    try:
        if engine.global_rank == 0:
            _write(state, path, turns)
        else:
            for weight in turns:
                weight.gather()
    except Exception as caught:
        error = caught
    _drain(engine)
    failures = [failure_of(engine.global_rank, error)]
    if engine.world_size > 1:
        failures = failures * engine.world_size
        dist.all_gather_object(failures, failures[0])
    raise_together(failures, f"the model is not saved to {path}", error)
    return True


@torch.no_grad()
def whole_state_dict(engine, exclude_frozen_parameters=False):
    """Rank 0: the module's state dict with whole parameters on the CPU, tied ones as one tensor; None elsewhere.

    Parameters are gathered one at a time. Every rank calls it.
    """
    keep, made = engine.global_rank == 0, {}
    state = _state_of(engine, exclude_frozen_parameters)
    for name, value in state.items():
        if isinstance(value, _ShardedWeight):
            if id(value) not in made:
                with GatheredParameters([value.param]):
                    made[id(value)] = value.param.detach().to("cpu", copy=True) if keep else None
            state[name] = made[id(value)]
        elif torch.is_tensor(value) and keep:
            state[name] = made.setdefault(id(value), value.detach().to("cpu", copy=True))
    _drain(engine)
    return state if keep else None
