"""Proves a plan of cuts before any weight moves: one block of each class runs cut and whole, and outputs and gradients
are compared.

The block is a copy in fp32 with random parameters that are alike on all ranks, so that biases and gates that begin as
zeros count, too. Every rank of the group takes part.
"""

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.block_twin import copy_of, tensors_in, with_tensors
from deepspeed.module_inject.cut_group import own_units
from deepspeed.module_inject.cut_plan import cut_block
from deepspeed.module_inject.layers import TensorParallel_Layer, cut_of
from deepspeed.module_inject.split_sequence import SequenceSplit, split_block
from deepspeed.utils import tensor_slices

_RELATIVE = 1e-3


class PlanError(ValueError):
    """A plan of cuts that computes something else than the model."""


class _Record:
    """One run of a block, forward and backward: ``outputs`` of its modules by name, in the order of their ends, and
    ``grads`` of parameters and arguments by name. ``weights``: of the results in the sum that is differentiated, by a
    function of their numbers and shapes; None: random ones."""

    def __init__(self, block, given, backward=True, weights=None):
        self.outputs, self.grads, self.running, hooks = {}, {}, [], []
        for name, module in block.named_modules():
            hooks.append(module.register_forward_pre_hook(self._begin(name)))
            hooks.append(module.register_forward_hook(self._keep(name)))
        given = with_tensors(given, _leaf)
        with torch.enable_grad():
            args, kwargs = with_tensors(given, lambda _, tensor: tensor.clone())  # the block may change them in place
            made = [one for _, one in tensors_in(self._run(block, args, kwargs)) if one.requires_grad]
            generator = torch.Generator().manual_seed(1)
            weights = weights or (lambda index, shape: torch.rand(shape, generator=generator))
            self.weights = [weights(index, one.shape) for index, one in enumerate(made)]
            total = sum((one * weight.to(one.device)).sum() for one, weight in zip(made, self.weights))
        if backward and isinstance(total, torch.Tensor):
            total.backward()
        for hook in hooks:
            hook.remove()
        self.params = dict(block.named_parameters())
        self.grads = {f"parameter '{name}'": one.grad for name, one in self.params.items()}
        self.grads.update({f"argument {place}": one.grad for place, one in tensors_in(given) if one.requires_grad})

    def _run(self, block, args, kwargs):
        try:
            return block(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError) as error:
            raise RuntimeError(f"'{self.running[-1]}' fails: {type(error).__name__}: {error}") from error

    def _begin(self, name):
        return lambda module, args: self.running.append(name)

    def _keep(self, name):
        def keep(module, args, made):
            self.running.pop()
            self.outputs[name] = [one.detach() for _, one in tensors_in(made) if one.is_floating_point()]

        return keep


def _leaf(place, tensor):
    found = tensor.detach().to(get_accelerator().current_device_name(), copy=True)
    return found.float().requires_grad_() if found.is_floating_point() else found


def trial_copy(block):
    """A copy of a block in fp32 with random parameters, the same ones on every rank, in evaluation."""
    generator = torch.Generator().manual_seed(0)
    device = get_accelerator().current_device_name()
    made = copy_of(block, {id(param): _random(param, generator) for param in block.parameters()})
    return made.float().to(device).eval()


def _random(param, generator):
    shape = getattr(param, "ds_shape", param.shape)
    values = torch.randn(shape, generator=generator)
    values = values.abs() + 0.5 if len(shape) < 2 else values * shape[-1] ** -0.5
    return torch.nn.Parameter(values, requires_grad=param.requires_grad)


def prove(block, name, plan, ranks, group, training=True, split=False):
    """Raises PlanError where ``block``, cut as its ``BlockPlan`` says, gives other outputs or gradients than the whole
    one. The text names the first module that differs. ``split``: each rank has a part of every sequence outside of cut
    layers. Every rank of torch's ``group`` calls it with equal arguments."""
    rank = dist.get_rank(group)
    whole = trial_copy(block)
    before = _Record(whole, plan.given, training)
    cut = trial_copy(block)
    problem = None
    try:
        cut_block(cut, plan, ranks, group, rank)
        if split:
            split_block(cut, name, plan, group, SequenceSplit(group))

        def own_weight(index, shape):
            return _own_weight(before.weights[index], shape, plan.groups, ranks, rank)

        after = _Record(cut, plan.given, training, own_weight)
        if split:  # modules see parts, and layers may see tokens in another order
            after.outputs = {"": after.outputs[""]}
        problem = _difference(before, after, cut)
    except (RuntimeError, ValueError, TypeError) as error:
        problem = str(error)
    found = [None] * ranks
    dist.all_gather_object(found, problem, group=group)
    told = [(one, text) for one, text in enumerate(found) if text]
    if told:
        advice = (
            "Correct the plan, or leave these layers whole with an entry of "
            "tensor_parallel.partition_config.layer_specs of partition_type skip"
        )
        raise PlanError(
            f"tensor parallelism: block '{name}' ({type(block).__name__}) computes something else when it is cut over "
            f"{ranks} ranks{' and each has a part of every sequence' if split else ''}: {told[0][1]} (rank "
            f"{told[0][0]} of the group). {'Leave tensor_parallel.split_sequence out' if split else advice}"
        )


def _own_weight(weight, shape, groups, ranks, rank):
    """The part of a result's weight for a result of ``shape``, which may have this rank's heads alone."""
    if weight.shape == shape:
        return weight
    parts = (own_units(weight, dim, group, ranks, rank) for group in groups for dim in range(weight.dim()))
    found = next((part for part in parts if part.shape == shape), None)
    if found is None:
        raise ValueError(f"a result has the shape {tuple(shape)}, and {tuple(weight.shape)} in one process")
    return found


def _difference(before, after, block):
    """A text about the first difference, or None."""
    for name, outputs in after.outputs.items():
        module = block.get_submodule(name)
        for one, wanted in zip(outputs, before.outputs.get(name, ())):
            if isinstance(module, TensorParallel_Layer) and module.along_outputs:
                wanted = _slice_of(wanted, one, module)
            if wanted is None or one.shape != wanted.shape:
                continue  # something between two layers that are cut: this rank's channels of it
            if not _close(one, wanted):
                what = f"'{name}'" if name else "the block"
                return f"the output of {what} differs by {_gap(one, wanted):.2g}"
    # Gradients that are zero but for rounding (of the bias of keys, for example) are compared with the largest one.
    largest = max((float(grad.abs().max()) for grad in before.grads.values() if grad is not None), default=0.0)
    for name, grad in after.grads.items():
        wanted = before.grads[name]
        if grad is None or wanted is None:
            if (grad is None) != (wanted is None):
                return f"the gradient of {name} is missing in one of the two runs"
            continue
        owner = name.split("'")[1] if "'" in name else None
        made = cut_of(after.params[owner]) if owner in after.params else None
        wanted = wanted if made is None else made.own(wanted)
        if not _close(grad, wanted, _RELATIVE * largest):
            return f"the gradient of {name} differs by {_gap(grad, wanted):.2g}"
    return None


def _slice_of(whole, own, layer):
    cut, rank = layer.cut, layer.tp_index
    if layer.gather_output or whole.shape[-1] == own.shape[-1]:
        return whole
    return tensor_slices.narrow(whole, -1, cut, rank)


def _close(one, wanted, least=1e-12):
    return _gap(one, wanted, least) <= _RELATIVE


def _gap(one, wanted, least=1e-12):
    """The largest difference, relative to the largest value, or to ``least`` where that is more."""
    if one.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    return float((one - wanted).abs().max() / wanted.abs().max().clamp_min(least))
