"""Models whose layers are cut over ranks: the plan is made, proven and carried out. See ``docs/tutorials``."""

import torch

from deepspeed import comm as dist
from deepspeed.log import log_dist, logger
from deepspeed.module_inject.cut_plan import cut_model, plan_of
from deepspeed.module_inject.layers import cut_of
from deepspeed.module_inject.tensor_proof import PlanError, prove

PLAN = "ds_tensor_plan"  # the attribute of a model that is cut


def cut_over(model, group, settings=None, policy=None):
    """Cuts ``model`` in place over torch's ``group``, all of whose ranks call it with the same model; rank 0's weights
    count. ``settings``: the section ``tensor_parallel``. Returns the ``CutPlan``. A model that is cut already stays as
    it is; ValueError where that was done for another number of ranks. PlanError where a cut would compute something
    else than the model; then no weight has changed."""
    ranks = dist.get_world_size(group)
    earlier = getattr(model, PLAN, None)
    if earlier is not None:
        if earlier.ranks != ranks:
            raise ValueError(
                f"the model is cut over {earlier.ranks} ranks by an earlier tp_model_init, and "
                f"tensor_parallel.autotp_size is {ranks}: make them equal"
            )
        return earlier
    plan = plan_of(model, ranks, settings, policy)
    if settings is None or settings.verify:
        for name, one in plan.kinds().items():
            _prove(model.get_submodule(name), name, one, plan, group)
    _same_weights(model, group)
    cut_model(model, plan, group, settings is not None and settings.tp_overlap_comm)
    setattr(model, PLAN, plan)
    tell(plan)
    return plan


def _prove(block, name, one, plan, group):
    """An error, or a warning where a script wrote the rules."""
    if one.given is None or not one.groups and not one.ruled:
        return
    try:
        prove(block, name, one, plan.ranks, group)
    except PlanError as error:
        if not plan.source.by_user:
            raise
        logger.warning(f"{plan.source.name}: {error}")


def _same_weights(model, group):
    """Gives all ranks the weights and buffers of the first one."""
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type != "meta":
                dist.broadcast(tensor.data, source, group=group)


def tell(plan):
    """Logs what stays whole, once for each kind of block."""
    whole = ", ".join(f"{layer} ({reason})" for layer, reason in plan.reasons().items())
    if whole:
        log_dist(f"Tensor parallelism: every rank has these layers whole: {whole}", ranks=[0])


@torch.no_grad()
def whole_weights(model, state):
    """A state dict of ``model`` with whole tensors in place of this rank's slices. Every rank of the group calls it."""
    cuts = {
        f"{name}.{last}".lstrip("."): cut_of(param)
        for name, module in model.named_modules(remove_duplicate=False)
        for last, param in module._parameters.items()
        if param is not None
    }
    return {
        name: value if cuts.get(name) is None else cuts[name].join(value.to(_device_of(model))).to(value.device)
        for name, value in state.items()
    }


def _device_of(model):
    return next((param.device for param in model.parameters()), torch.device("cpu"))
