"""Flat buffers of which each data-parallel rank has updated its part."""

from deepspeed import comm as dist


def all_gather_dp_groups(
    groups_flat, partitioned_param_groups, dp_process_group, start_alignment_factor, allgather_bucket_size
):
    """Gives every rank the parts of all ranks.

    Args:
        groups_flat: the flat buffer of each group, a 1-D tensor; its parts are views of it.
        partitioned_param_groups: for each group the parts of all ranks, in rank order; each rank has updated its own.
        dp_process_group: for each group the process group of these ranks.
        start_alignment_factor, allgather_bucket_size: not needed here, because a group is gathered by one collective.
    """
    for group, parts in zip(dp_process_group, partitioned_param_groups):
        if dist.get_world_size(group) > 1:
            dist.all_gather(list(parts), parts[dist.get_rank(group)].clone(), group=group)
