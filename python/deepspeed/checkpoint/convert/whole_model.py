"""Weights of a run for others to read, in the dtype that the model computes with.

At ZeRO stage 3 a parameter is in slices (``csrc/plan/saved_layout.h`` says whose), and experts are on other ranks: one
at a time passes to rank 0, on every rank in the same order.
"""

import contextlib
import functools
import os

import torch

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.checkpoint.write.by_rank import saves
from deepspeed.checkpoint.write.ranks import Ranks
from deepspeed.comm.agreement import attempt
from deepspeed.formats.coded_weight import CodedWeight
from deepspeed.formats.lazy_tensor import itemsize
from deepspeed.formats.weight_files import StoredWeight, as_weight, write_safetensors, write_torch, write_whole
from deepspeed.log import logger
from deepspeed.ops.fp_quantizer.weight_form import coded_params
from deepspeed.utils.param_cut import cut_of
from deepspeed.zero.gathers.gathered import GatheredParameters
from deepspeed.zero.parameters.param_ranks import own_extent, ranks_of, saved_part
from deepspeed.zero.parameters.sharded_parameter import is_sharded


class _PassingWeight(StoredWeight):
    """A weight that not all ranks have whole. Rank 0 reads it while the others send it (``gather``), so every rank must
    come to the same ones in the same order.

    ``parts``: (first element, numel, rank that sends it), in order. ``own``: gives this rank's part, flat; or None.
    ``joint``: all ranks that have ``own`` call it when one of them sends what it gives.
    """

    def __init__(self, shape, dtype, parts, own, device, joint=False):
        self.joint = joint
        self.shape, self.dtype, self.parts = torch.Size(shape), dtype, sorted(parts)
        self.own, self.device, self.rank = own, device, dist.get_rank() if dist.is_initialized() else 0
        self.gathered, self._left = 0, []

    def _start(self):
        self.gathered, self._left = self.gathered + 1, list(self.parts)

    def _pass(self):
        """The parts that are left, on rank 0."""
        while self._left:
            _, numel, source = self._left.pop(0)
            if self.rank == 0 and source != 0:
                values = torch.empty(numel, dtype=self.dtype, device=self.device)
                dist.recv(values, source)
                yield values
            elif self.rank == 0:
                yield self.own()
            elif source == self.rank:
                dist.send(self.own().to(self.device), 0)
            elif self.joint and self.own is not None:
                self.own()

    def _parts(self):
        self._start()
        for values in self._pass():
            yield from StoredWeight([(values, 0, values.numel())], values.shape, self.dtype)._parts()

    def finish(self):
        """Takes what is left of a passage that was broken off."""
        for _ in self._pass():
            pass

    def gather(self):
        """Takes part in a passage that writes nothing here: on other ranks, and on rank 0 after it has failed."""
        self._start()
        self.finish()


class _JoinedWeight(_PassingWeight):
    """A weight of which the ranks that share a layer have slices. They all join it; rank 0 keeps it."""

    def __init__(self, param, device):
        self.param, self.cut = param, cut_of(param)
        super().__init__(self.cut.whole_shape(saved_part(param)[1]), param.dtype, [], None, device)

    def _start(self):
        self.gathered, self._left = self.gathered + 1, [self.param]

    def _pass(self):
        while self._left:
            whole = _joined(self._left.pop())
            if self.rank == 0:
                yield whole


def _joined(param):
    """The whole values, flat, of a parameter of which ranks that share a layer have slices. All of them call it."""
    with GatheredParameters([param]) if is_sharded(param) else contextlib.nullcontext():
        return cut_of(param).join(param.detach().contiguous()).contiguous().view(-1)


def _lent(param):
    """A function that gives the elements that this rank has of a tensor, flat."""
    if is_sharded(param):
        return lambda: param.ds_handle.shard.detach()[: max(0, param.ds_handle.own_numel)]
    return lambda: param.detach().contiguous().view(-1)


def _state_of(run, exclude_frozen_parameters):
    """The module's state dict, of all ranks, in which weights that not all have whole are ``_PassingWeight``; tied
    names with the same object."""
    state = run.module_state(keep_vars=True, exclude_frozen_parameters=exclude_frozen_parameters)
    params, holders = run.weights.params, run.ranks.dp_ranks[: run.ranks.holders]
    remote = _remote(run, state) if run.weights.differs else {}
    cut = {name: param for name, param in params.items() if name in state and is_sharded(param)}
    layout = _C.SavedLayout.sliced([param.ds_numel for param in cut.values()], [], len(holders), "the model")
    made = {}
    for number, (name, param) in enumerate(cut.items()):
        if ranks_of(param) is None and id(param) not in made and not _is_joined(param):
            # Rank 0 has nothing of the model of other model-parallel ranks.
            runs = layout.runs(number) if 0 in holders else []
            parts = [(offset, numel, holders[rank]) for offset, numel, rank, _ in runs]
            made[id(param)] = _PassingWeight(param.ds_shape, param.dtype, parts, _lent(param), run.device)
        state[name] = made.get(id(param), state[name])
    for name, param in params.items():
        if name in state and _is_joined(param):
            made[id(param)] = made.get(id(param)) or _JoinedWeight(param, run.device)
            state[name] = made[id(param)]
    state.update(remote)
    for name, facts in coded_params(params).items():
        name = run.weights.named(name)
        if name in state:
            codes = as_weight(state[name])
            state[name] = made[id(codes)] = made.get(id(codes)) or CodedWeight(codes, facts)
    return state


def _passing(value):
    """The ``_PassingWeight`` that ``value`` is, or is decoded from; None for anything else."""
    value = value.codes if isinstance(value, CodedWeight) else value
    return value if isinstance(value, _PassingWeight) else None


def _is_joined(param):
    return cut_of(param) is not None and cut_of(param).dim is not None


def _remote(run, state):
    """``_PassingWeight`` of all tensors that not all ranks have, which are taken out of ``state``; its other entries
    get their names in checkpoints."""
    weights, own, told = run.weights, {}, {}
    named, copies, layers = weights.named, weights.copies, weights.layers
    first_slice = layers is None or not layers.slices or layers.slices.endswith("_00")
    for name in list(state):
        value, param = state.pop(name), weights.params.get(name)
        layer = layers.find(name) if layers is not None else None
        if name not in copies and layer is None:
            state[named(name)] = value
            continue
        tensor = value if param is None else param
        if param is not None and _is_joined(param):
            own[named(name)] = functools.partial(_joined, param)
            shape = cut_of(param).whole_shape(saved_part(param)[1])
            told[named(name)] = [list(shape), str(param.dtype).removeprefix("torch."), 0, shape.numel(), True]
            continue
        own[named(name)] = _lent(tensor)
        saved = is_sharded(tensor) or saves(run, copies.get(name))  # of slices each rank has another one
        if saved and first_slice and (layer is None or layer[0] in layers.writes):
            shape = saved_part(param)[1] if param is not None else value.shape
            told[named(name)] = [list(shape), str(value.dtype).removeprefix("torch."), *own_extent(tensor), False]
    found = {}
    for rank, some in enumerate(Ranks(run.ranks, False).gather(told)):
        for name, (shape, dtype, begin, numel, joint) in some.items():
            parts = found.setdefault(name, (shape, getattr(torch, dtype), {}, joint))[2]
            if numel:
                parts.setdefault(begin, (begin, numel, rank))
    return {
        name: _PassingWeight(shape, dtype, parts.values(), own.get(name), run.device, joint)
        for name, (shape, dtype, parts, joint) in found.items()
    }


def _turns(state, safetensors):
    """The weights that pass through, in the order in which a file of this format asks for their chunks."""
    found = [value for value in state.values() if _passing(value) is not None]
    if safetensors:  # it has no ties: a weight is written under each of its names
        return [_passing(value) for value in sorted(found, key=lambda weight: -itemsize(weight.dtype))]
    return list({id(value): _passing(value) for value in found}.values())


def _write(state, path, turns):
    """Rank 0's part. A failure does not leave the others alone in a collective."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if path.endswith(".safetensors"):  # it holds nothing but tensors
            tensors = {name: value for name, value in state.items() if as_weight(value) is not None}
            write_whole(path, write_safetensors, tensors)
        else:
            write_whole(path, write_torch, state)
    finally:
        for weight in turns:
            weight.finish()
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
    Ranks(run.ranks, False).agree(error, f"the model is not saved to {path}")
    return True


@torch.no_grad()
def whole_state_dict(run, exclude_frozen_parameters=False):
    """Rank 0: the module's state dict with whole parameters on the CPU, tied ones as one tensor; None elsewhere.

    Parameters pass one at a time. Every rank calls it.
    """
    keep, made = run.ranks.rank == 0, {}
    state = _state_of(run, exclude_frozen_parameters)
    for name, value in state.items():
        if _passing(value) is not None or isinstance(value, CodedWeight):
            if id(value) not in made:
                passing = _passing(value)
                made[id(value)] = value.contiguous() if keep else passing and passing.gather()
            state[name] = made[id(value)]
        elif torch.is_tensor(value) and keep:
            state[name] = made.setdefault(id(value), value.detach().to("cpu", copy=True))
    return state if keep else None
