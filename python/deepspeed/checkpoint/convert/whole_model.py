"""Weights of a run for others to read, in the dtype that the model computes with.

At ZeRO stage 3 a parameter is whole only while it is gathered, and experts are on other ranks: one at a time passes
through, on every rank in the same order.
"""

import contextlib
import os

import torch

from deepspeed import comm as dist
from deepspeed._compat import named_parameters
from deepspeed.checkpoint.write.by_rank import saves
from deepspeed.checkpoint.write.ranks import Ranks, attempt
from deepspeed.formats.lazy_tensor import itemsize
from deepspeed.formats.weight_files import StoredWeight, as_weight, write_safetensors, write_torch, write_whole
from deepspeed.log import logger
from deepspeed.zero.gathered import GatheredParameters
from deepspeed.zero.param_ranks import SavedNames, copies_by_name, differs_by_rank, layers_of, ranks_of, saved_part
from deepspeed.zero.sharded_parameter import is_sharded


class _PassingWeight(StoredWeight):
    """A weight that passes through. Whoever reads it on rank 0 needs the others to call ``gather`` meanwhile, so every
    rank must come to the same ones in the same order."""

    gathered = 0  # how often it has passed


class _ShardedWeight(_PassingWeight):
    """A parameter of stage 3."""

    def __init__(self, param):
        self.param = param
        self.shape, self.dtype = torch.Size(param.ds_shape), param.dtype

    def _parts(self):
        self.gathered += 1
        with torch.no_grad(), GatheredParameters([self.param]):
            values = self.param.detach()
            yield from StoredWeight([(values, 0, values.numel())], self.shape, self.dtype)._parts()

    def gather(self):
        """What the other ranks do meanwhile, or this one when it no longer writes."""
        self.gathered += 1
        with GatheredParameters([self.param]):
            pass


class _RemoteWeight(_PassingWeight):
    """A tensor that not all ranks have. ``parts``: (first element, numel, rank that sends it), in order; ``own``: what
    this rank has of it, or None."""

    def __init__(self, shape, dtype, parts, own, device):
        self.shape, self.dtype, self.parts = torch.Size(shape), dtype, sorted(parts)
        self.own, self.device, self.rank = own, device, dist.get_rank()

    @contextlib.contextmanager
    def _mine(self):
        sharded = self.own is not None and is_sharded(self.own)
        with torch.no_grad(), GatheredParameters([self.own]) if sharded else contextlib.nullcontext():
            yield None if self.own is None else self.own.detach().contiguous().view(-1)

    def _parts(self):
        self.gathered += 1
        with self._mine() as mine:
            for _, numel, source in self.parts:
                if source == self.rank:
                    values = mine
                else:
                    values = torch.empty(numel, dtype=self.dtype, device=self.device)
                    dist.recv(values, source)
                yield from StoredWeight([(values, 0, numel)], [numel], self.dtype)._parts()

    def gather(self):
        """As that of ``_ShardedWeight``: who has a part sends it to rank 0."""
        self.gathered += 1
        with self._mine() as mine:
            for _, numel, source in self.parts:
                if source == self.rank and self.rank != 0:
                    dist.send(mine, 0)
                elif source != self.rank and self.rank == 0:
                    dist.recv(torch.empty(numel, dtype=self.dtype, device=self.device), source)


def _state_of(run, exclude_frozen_parameters):
    """The module's state dict, of all ranks; sharded and remote parameters as weights, tied names with the same
    object."""
    state = run.module_state(keep_vars=True, exclude_frozen_parameters=exclude_frozen_parameters)
    by_name = dict(named_parameters(run.module))
    remote = _remote(run, state, by_name) if differs_by_rank(run.module) else {}
    made = {}
    for name in state:
        param = by_name.get(name)
        if param is not None and is_sharded(param) and ranks_of(param) is None:
            state[name] = made.setdefault(id(param), _ShardedWeight(param))
    state.update(remote)
    return state


def _remote(run, state, by_name):
    """``_RemoteWeight`` of all tensors that not all ranks have, which are taken out of ``state``; its other entries get
    their names in checkpoints."""
    named, copies, own, told = SavedNames(run.module), copies_by_name(run.module), {}, {}
    layers = layers_of(run.module)
    first_slice = layers is None or not layers.slices or layers.slices.endswith("_00")
    for name in list(state):
        value, param = state.pop(name), by_name.get(name)
        place = layers.find(name) if layers is not None else None
        if name not in copies and place is None:
            state[named(name)] = value
            continue
        own[named(name)] = value
        if saves(run, copies.get(name)) and first_slice and (place is None or place[0] in layers.writes):
            begin, shape = saved_part(param) if param is not None else (0, value.shape)
            numel = param.ds_numel if is_sharded(value) else value.numel()
            told[named(name)] = [list(shape), str(value.dtype).removeprefix("torch."), begin, numel]
    found = {}
    for rank, some in enumerate(Ranks(run.ranks, False).gather(told)):
        for name, (shape, dtype, begin, numel) in some.items():
            found.setdefault(name, (shape, getattr(torch, dtype), []))[2].append((begin, numel, rank))
    return {name: _RemoteWeight(*about, own.get(name), run.device) for name, about in found.items()}


def _drain(run):
    if run.core is not None and run.core.gatherer is not None:
        run.core.gatherer.drain()


def _tensors_only(state):
    """For a format that holds nothing else."""
    return {name: value for name, value in state.items() if as_weight(value) is not None}


def _turns(state, safetensors):
    """The weights that pass through, in the order in which a file of this format asks for their chunks."""
    found = [value for value in state.values() if isinstance(value, _PassingWeight)]
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


def save_16bit_model(run, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
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
    if run.policy.shards_params and not run.config.zero_config.gather_16bit_weights_on_model_save:
        logger.warning(
            f"nothing is saved to {save_dir}: set zero_optimization.stage3_gather_16bit_weights_on_model_save to true "
            "to gather the weights of ZeRO stage 3 for it"
        )
        return False
    state = _state_of(run, exclude_frozen_parameters)
    turns = _turns(state, path.endswith(".safetensors"))
    leads = run.ranks.rank == 0
    _, error = attempt(lambda: _write(state, path, turns) if leads else [weight.gather() for weight in turns])
    _drain(run)
    Ranks(run.ranks, False).agree(error, f"the model is not saved to {path}")
    return True


@torch.no_grad()
def whole_state_dict(run, exclude_frozen_parameters=False):
    """Rank 0: the module's state dict with whole parameters on the CPU, tied ones as one tensor; None elsewhere.

    Parameters are gathered one at a time. Every rank calls it.
    """
    keep, made = run.ranks.rank == 0, {}
    state = _state_of(run, exclude_frozen_parameters)
    for name, value in state.items():
        if isinstance(value, _PassingWeight):
            if id(value) not in made:
                made[id(value)] = value.contiguous() if keep else value.gather()
            state[name] = made[id(value)]
        elif torch.is_tensor(value) and keep:
            state[name] = made.setdefault(id(value), value.detach().to("cpu", copy=True))
    _drain(run)
    return state if keep else None
