"""Experts of ``deepspeed.moe`` that are cut over the ranks that cut the layers beside them
(``enable_expert_tensor_parallelism``)."""

import torch

from deepspeed import comm as dist
from deepspeed.module_inject.block_twin import NotAnalysed, keep_whole
from deepspeed.module_inject.cut_plan import BlockPlan, cut_block
from deepspeed.module_inject.tensor_analysis import analyse
from deepspeed.module_inject.tensor_proof import prove
from deepspeed.module_inject.tp_model import computes
from deepspeed.moe.errors import fail

_ROWS = 5


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
