"""Experts in models whose other layers are cut: what stays whole, and experts of ``deepspeed.moe`` that are cut, too
(``enable_expert_tensor_parallelism``)."""

import torch

from deepspeed import comm as dist
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.block_twin import NotAnalysed, keep_whole
from deepspeed.module_inject.cut_plan import BlockPlan, cut_block
from deepspeed.module_inject.tensor_analysis import analyse
from deepspeed.module_inject.tensor_proof import prove
from deepspeed.module_inject.tp_model import computes
from deepspeed.moe.errors import fail
from deepspeed.moe.layer import MoE

_ROWS = 5


def parts_with_experts(model, config=None):
    """``[(name, module, share)]`` of what the cut of a model's blocks leaves whole: layers of ``deepspeed.moe``, and
    with ``config``, an ``AutoEPConfig``, routers and experts of the layers that it describes. ``share``: of the
    module's weights that a rank will have."""
    found = [(name, one, 1.0) for name, one in model.named_modules() if isinstance(one, MoE)]
    for spec in AutoEP(model, config).ep_parser() if config is not None else ():
        layer = model.get_submodule(spec.moe_module_name)
        for name, share in ((spec.router_name, 1.0), (spec.experts_name, 1 / config.autoep_size)):
            found.append((f"{spec.moe_module_name}.{name}", getattr(layer, name), share))
    return found


def cut_experts(name, layer, group, overlap=False, proves=True):
    """Cuts each expert of ``layer``, an ``MoE`` called ``name``, in place over torch's ``group``, whose ranks have the
    same experts. All of them call it. An expert is analysed as a block of a model is; MoEError where nothing of it can
    be cut, and PlanError with ``proves`` where it would compute something else."""
    experts, rank, ranks = layer.deepspeed_moe.experts, dist.get_rank(group), dist.get_world_size(group)
    keep_whole(experts, False)
    one = experts.deepspeed_experts[0]
    generator = torch.Generator().manual_seed(0)
    given = (torch.randn(_ROWS, layer.deepspeed_moe.gate.wg.in_features, generator=generator),), {}
    try:
        analysed = analyse(one, given, ranks)
    except NotAnalysed as error:
        fail(name, f"enable_expert_tensor_parallelism: its experts cannot be analysed: {error}")
    if not analysed.groups:
        fail(name, f"enable_expert_tensor_parallelism: nothing of its experts can be cut ({analysed.whole})")
    plan = BlockPlan(analysed.groups, analysed.whole, given)
    if proves and computes():
        prove(one, f"{name}, an expert", plan, ranks, group)
    for expert in experts.deepspeed_experts:
        cut_block(expert, plan, ranks, group, rank, overlap)
    experts.see_steps()
