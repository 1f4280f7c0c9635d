"""Builds the native engine core from parameter groups."""

import torch

from deepspeed import _native
from deepspeed.comm import comms_log
from deepspeed.comm.timeouts import default_timeout
from deepspeed.comm.watch import group_facts


def build_core(
    param_groups,
    names=None,
    orders=None,
    counts_in_norm=None,
    data_parallel=None,
    model_parallel=None,
    stage=0,
    grad_dtype=None,
    comm_dtype=None,
    bucket_numel=500_000_000,
    overlap=True,
    predivide=1.0,
    postscale=1.0,
    find_nonfinite_grads=False,
    scatter=True,
    allgather=True,
    allgather_bucket_numel=500_000_000,
    others=(),
    gathers=None,
    max_live=1_000_000_000,
    max_reuse=1_000_000_000,
    persistence=100_000,
    model_persistence=2**63 - 1,
    prefetch=50_000_000,
    replicas=None,
    grad_forms=None,
):
    """Returns ``(core, names)``.

    ``param_groups`` are those of an optimizer. ``names`` and ``orders`` map a parameter's id to its name and to its
    position in the module; without them parameters are called ``group.index`` and ordered as given. Groups of ranks are
    torch's or native communicators, None for a single process; ``gathers`` makes the one for gathers when they need it.
    ``predivide`` multiplies gradients before they are summed over the ranks, ``postscale`` after. ``scatter``:
    gradients are reduced to their owners only; ``allgather``: updated parameters travel by all-gather, else by
    broadcasts; ``allgather_bucket_numel`` limits one gather. ``grad_forms``: the id of a parameter -> 1 where only the
    touched rows of its gradient travel (stage 0), 2 where the user's optimizer gets them as a sparse tensor, too. The
    threads of CPU kernels are ``torch.get_num_threads()``.
    """
    tensors, called, groups, places, counted, forms = [], [], [], [], [], []
    for index, group in enumerate(param_groups):
        for position, param in enumerate(group["params"]):
            tensors.append(param)
            called.append((names or {}).get(id(param), f"{index}.{position}"))
            groups.append(index)
            places.append((orders or {}).get(id(param), len(tensors)))
            forms.append((grad_forms or {}).get(id(param), 0))
            counted.append(True if counts_in_norm is None else bool(counts_in_norm(param)))
    # One object for one group: what is logged is the communicator's. Ranks of one host that compute on its cores move
    # the bulk through its memory.
    on_cpu = all(_device(param).type == "cpu" for param in [*tensors, *others])
    data_parallel, model_parallel, replicas = [
        None if group is None else _communicator(group, name, shared=on_cpu and name == "data parallel")
        for name, group in (
            ("data parallel", data_parallel),
            ("model parallel", model_parallel),
            ("replicas", replicas),
        )
    ]
    core = _native._C.Engine(
        tensors=tensors,
        names=called,
        groups=groups,
        orders=places,
        counts_in_norm=counted,
        data_parallel=data_parallel,
        model_parallel=model_parallel,
        stage=stage,
        threads=torch.get_num_threads(),
        grad_dtype=grad_dtype,
        comm_dtype=comm_dtype,
        bucket_numel=int(bucket_numel),
        overlap=bool(overlap),
        predivide=float(predivide),
        postscale=float(postscale),
        find_nonfinite_grads=bool(find_nonfinite_grads),
        scatter=bool(scatter),
        allgather=bool(allgather),
        allgather_bucket_numel=int(allgather_bucket_numel),
        sharded=[param.ds_handle for param in tensors] if stage == 3 else [],
        others=[param.ds_handle for param in others],
        gathers=gathers,
        max_live=int(max_live),
        max_reuse=int(max_reuse),
        persistence=int(persistence),
        model_persistence=int(model_persistence),
        prefetch=int(prefetch),
        replicas=replicas,
        grad_forms=forms,
    )
    comms_log.watch(core, core.communicators)
    return core, called


def _device(param):
    """Where its memory is: that of a sharded parameter's slice, whatever its tensor says while it is released."""
    return param.ds_handle.shard.device if hasattr(param, "ds_handle") else param.device


def _communicator(group, name, shared):
    return _native._C.Communicator(group, shared=shared, timeout=default_timeout(), facts=group_facts(name))
