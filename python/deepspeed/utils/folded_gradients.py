"""Gradients where tensor-parallel ranks share experts: how what these ranks have of a parameter's gradient becomes one.
``deepspeed.module_inject.auto_ep_folding`` publishes the names."""

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.comm import mesh_views
from deepspeed.utils.norms import is_moe_param
from deepspeed.utils.param_cut import ParamCut, cut_of

AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE = "average"
AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL = "expert_tp_cancel"
AUTOEP_FOLDING_GRAD_REDUCE_SKIP = "skip"
AUTOEP_FOLDING_GRAD_REDUCE_SUM = "sum"

_MARK = "ds_autoep_folding_gradient"  # of a parameter: how its gradients on the tensor-parallel ranks become one


def mark_autoep_folding_router_parameter(param):
    """Says that ``param`` is of a router that sees the whole gradient on each tensor-parallel rank."""
    setattr(param, _MARK, AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE)


def mark_autoep_folding_partial_router_parameter(param):
    """Says that ``param`` is of a router that sees, on each tensor-parallel rank, a part of the gradient."""
    setattr(param, _MARK, AUTOEP_FOLDING_GRAD_REDUCE_SUM)


def mark_autoep_folding_sp_sharded_layernorm_parameter(param):
    """Says that ``param`` is of a norm that sees, on each tensor-parallel rank, a part of the sequence."""
    setattr(param, _MARK, AUTOEP_FOLDING_GRAD_REDUCE_SUM)


def autoep_folding_gradient_reduction_strategy(folding_spec, param, *, param_name=None):
    """The way in which the gradients of ``param`` on the tensor-parallel ranks become one, before the mean over
    data-parallel ranks.

    "skip": they need nothing: the rank has a slice of its own, or all ranks have computed the same. "average": they
    are equal, so their mean is each of them. "sum": each rank has a part. "expert_tp_cancel": ranks of the experts'
    data-parallel group that are tensor-parallel to each other have the same batch, so what is added up over that group
    is divided by the data-parallel ranks of the dense layers, and not by its size.

    Args:
        folding_spec: a ``ParallelFoldingSpec``, or None where nothing is folded.
        param_name: for the message of the ValueError for a parameter that two of these apply to.
    """
    if folding_spec is None or folding_spec.tp_size == 1:
        return AUTOEP_FOLDING_GRAD_REDUCE_SKIP
    mark, expert, sliced = getattr(param, _MARK, None), is_moe_param(param), _is_slice(param)
    if mark is not None and (expert or sliced):
        which = "a parameter" if param_name is None else f"parameter '{param_name}'"
        kind = "of an expert" if expert else "a slice of its own on each"
        raise ValueError(
            f"{which} is marked as one that all tensor-parallel ranks have whole, and it is {kind}: remove the mark"
        )
    if expert:
        return AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL
    return mark or AUTOEP_FOLDING_GRAD_REDUCE_SKIP


def _is_slice(param):
    cut = cut_of(param)
    return getattr(param, "tensor_model_parallel", False) or cut is not None and cut.dim is not None


def sum_partial_gradients(params, spec, tp_group):
    """From now on the gradients of those ``params``, ``(name, parameter)`` pairs, of which each rank of ``tp_group``
    sees a part are summed over it, once. Every rank of the group calls it."""
    for name, param in params:
        strategy = autoep_folding_gradient_reduction_strategy(spec, param, param_name=name)
        if strategy == AUTOEP_FOLDING_GRAD_REDUCE_SUM and cut_of(param) is None:
            param.ds_param_cut = ParamCut(None, None, tp_group, dist.get_rank(tp_group), True)
            _C.sum_gradients(param, mesh_views.tensor_ranks(tp_group))
