"""Models whose layers are cut over ranks: the plan is made, proven and carried out. See ``docs/tutorials``."""

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.config.errors import config_error
from deepspeed.log import log_dist, logger
from deepspeed.module_inject.block_twin import features, with_tensors
from deepspeed.module_inject.cut_copy import make_copyable
from deepspeed.module_inject.cut_plan import cut_model, plan_of
from deepspeed.module_inject.layers import set_autotp_mode
from deepspeed.module_inject.tensor_proof import PlanError, prove
from deepspeed.moe.layer import MoE
from deepspeed.utils.param_cut import cut_of
from deepspeed.zero.parameters.sharded_parameter import is_sharded

PLAN = "ds_tensor_plan"  # the attribute of a model that is cut


def cut_over(model, group, settings=None, policy=None, chain=None):
    """Cuts ``model`` in place over torch's ``group``, all of whose ranks call it with the same model; rank 0's weights
    count. ``settings``: the section ``tensor_parallel``. Returns the ``CutPlan``. A model that is cut already stays as
    it is; ValueError where that was done for another number of ranks. ``chain``: a ``LayerChain`` of the pipeline of
    which ``model`` has some layers, under the same names. PlanError where a cut would compute something else than the
    model; then no weight has changed. The ranks draw the same random numbers from now on."""
    earlier = earlier_plan(model, dist.get_world_size(group), "tensor_parallel.autotp_size")
    if earlier is not None:
        return earlier
    overlap, split = (getattr(settings, key, False) for key in ("tp_overlap_comm", "split_sequence"))
    if overlap and split:
        raise config_error(
            "tensor_parallel.tp_overlap_comm overlaps all-reduces, and with split_sequence there are none: leave one "
            "of them out",
            ["tensor_parallel.tp_overlap_comm", "tensor_parallel.split_sequence"],
        )
    grain = 1 if settings is None else settings.tp.tp_grain_size
    plan = proven_plan(model, group, settings, policy, grain=grain, chain=chain)
    if computes():
        layers = [one for one in model.modules() if isinstance(one, MoE) and one.ep_size > 1]
        others = [one.deepspeed_moe.experts for one in layers if not one.enable_expert_tensor_parallelism]
        same_weights(model, group, others)  # but for experts, of which each rank has others
        share_random_state(group)
    carry_out(model, plan, group, overlap)
    return plan


def computes():
    """False in the planner, which has no values: it trusts the plan, which the job proves."""
    return get_accelerator().device_name() != "meta"


def earlier_plan(model, ranks, key):
    """The plan by which a model is cut already; None: it is not. ValueError for another number than ``ranks``."""
    earlier = getattr(model, PLAN, None)
    if earlier is not None and earlier.ranks != ranks:
        raise ValueError(f"the model is cut over {earlier.ranks} ranks already, and {key} is {ranks}: make them equal")
    return earlier


def proven_plan(model, group, settings=None, policy=None, training=True, grain=1, chain=None):
    """The ``CutPlan`` of ``model`` for the ranks of ``group``; PlanError where it would compute something else. No
    weight changes. ``training`` false: nobody needs gradients. ``grain``: slices of single channels are multiples of it
    where it divides them."""
    set_autotp_mode(training)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers go on as if there were no plan
        torch.manual_seed(0)
        plan = plan_of(model if chain is None else chain, dist.get_world_size(group), settings, policy, training)
    if chain is not None:
        plan = plan.among(name for name, _ in model.named_children())
    for name, one in plan.kinds().items():
        _set_grain(model.get_submodule(name), one, grain)
    if getattr(settings, "verify", True) and computes():
        for name, one in plan.kinds().items():
            one.given = with_tensors(one.given, lambda _, tensor: _of_first(tensor, group))
            _prove(model.get_submodule(name), name, one, plan, group, training)
            if plan.split:
                _prove(model.get_submodule(name), name, one, plan, group, training, split=True)
    return plan


def carry_out(model, plan, group, overlap=False, training=True):
    """Cuts ``model`` as the plan says, and notes the plan on it."""
    cut_model(model, plan, group, overlap, training)
    setattr(model, PLAN, plan)
    make_copyable(model, group)
    tell(plan)


def _prove(block, name, one, plan, group, training, split=False):
    """An error, or a warning where a script wrote the rules."""
    if one.given is None or not one.groups and not one.ruled:
        return
    try:
        prove(block, name, one, plan.ranks, group, training, split)
    except PlanError as error:
        if split or not plan.source.by_user:
            raise
        logger.warning(f"{plan.source.name}: {error}")


def _set_grain(block, plan, grain):
    for one in plan.groups:
        if features(block.get_submodule(one.rows[0]))[0] == one.units:  # not heads
            one.grain = grain


def _of_first(tensor, group):
    """The tensor of the first rank of ``group``: weights, and so what a block is called with, may differ."""
    sent = tensor.to(get_accelerator().current_device_name())
    dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
    return sent


def same_weights(model, group, others=()):
    """Gives all ranks the weights and buffers of the first one, but for those of the modules ``others``."""
    source, device = dist.get_global_rank(group, 0), get_accelerator().current_device_name()
    own = {id(tensor) for module in others for tensor in (*module.parameters(), *module.buffers())}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type != "meta" and id(tensor) not in own and not is_sharded(tensor):
                sent = tensor.data.to(device)
                dist.broadcast(sent, source, group=group)
                tensor.data.copy_(sent)


def share_random_state(group):
    """Gives all ranks the state of the random numbers of the first one, so that what they draw is the same."""
    source, device = dist.get_global_rank(group, 0), get_accelerator().current_device_name()
    for get, put in (
        (torch.get_rng_state, torch.set_rng_state),
        (get_accelerator().get_rng_state, get_accelerator().set_rng_state),
    ):
        state = get().to(device)
        dist.broadcast(state, source, group=group)
        put(state.cpu())


def tell(plan):
    """Logs what stays whole, once for each kind of block. A warning where that is everything."""
    whole = ", ".join(f"{layer} ({reason})" for layer, reason in plan.reasons().items())
    if whole and not any(one.groups or one.ruled for one in plan.blocks.values()) and not plan.outside:
        logger.warning(f"Tensor parallelism: no layer of these blocks is cut, every rank has them whole: {whole}")
    elif whole:
        log_dist(f"Tensor parallelism: every rank has these layers whole: {whole}", ranks=[0])


@torch.no_grad()
def whole_weights(model, state):
    """A state dict of ``model`` with whole tensors in place of this rank's slices. Every rank of the group calls it."""
    cuts = _cuts_in(model)
    return {
        name: value if cuts.get(name) is None else cuts[name].join(value.to(_device_of(model))).to(value.device)
        for name, value in state.items()
    }


def _cuts_in(model):
    return {
        f"{name}.{last}".lstrip("."): cut_of(param)
        for name, module in model.named_modules(remove_duplicate=False)
        for last, param in module._parameters.items()
        if param is not None
    }


def own_weights(model, state):
    """The inverse: this rank's slices in place of the whole tensors of a state dict."""
    cuts = _cuts_in(model)
    return {name: value if cuts.get(name) is None else cuts[name].own(value) for name, value in state.items()}


def _device_of(model):
    return next((param.device for param in model.parameters()), torch.device("cpu"))
