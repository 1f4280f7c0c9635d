"""Links 16-bit parameters to one partition of a flat fp32 tensor; see utils.tensor_fragment."""

import types

from deepspeed.utils.tensor_fragment import (
    get_full_hp_grad,
    get_full_hp_param,
    get_hp_fragment_mapping,
    set_full_hp_grad,
    set_full_hp_param,
)

_METHODS = (get_full_hp_param, get_full_hp_grad, set_full_hp_param, set_full_hp_grad)


def link_hp_params(
    lp_param_list,
    flat_hp_partition,
    gradient_dict,
    offload_gradient_dict,
    use_offload,
    param_group_index,
    partition_start,
    partition_size,
    dp_group,
):
    """Gives every parameter ``_hp_mapping`` (None outside of the partition), ``_dp_group`` and the four methods.

    ``lp_param_list``: the parameters of a group, in their order in the flat group, which has no gaps.
    ``flat_hp_partition``: the fp32 values from ``partition_start`` on, flat. ``dp_group``: the ranks that hold the
    other partitions, or None.
    """
    partition = (flat_hp_partition, gradient_dict, offload_gradient_dict, use_offload, param_group_index,
                 partition_start, partition_size)  # fmt: skip
    offset, in_partition = 0, 0
    for param in lp_param_list:
        param._hp_mapping = None
        param._dp_group = dp_group
        for method in _METHODS:
            setattr(param, method.__name__, types.MethodType(method, param))
        if offset < partition_start + partition_size and offset + param.numel() > max(partition_start, offset):
            param._index_in_param_group = in_partition
            in_partition += 1
            param._hp_mapping = get_hp_fragment_mapping(param, offset, *partition)
        offset += param.numel()


def lazy_init_hp_params_optimizer_state(lp_param_list, flat_hp_partition, optimizer_state):
    """Once the states of ``flat_hp_partition`` exist in ``optimizer_state``, the parameters' fragments get theirs."""
    for param in lp_param_list:
        if param._hp_mapping is not None:
            param._hp_mapping.set_optim_state_fragment(flat_hp_partition, optimizer_state[flat_hp_partition])
