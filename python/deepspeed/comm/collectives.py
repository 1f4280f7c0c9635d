"""The operations of ``deepspeed.comm``: torch.distributed's, run by the backend of this process.

``prof``, ``log_name`` and ``debug`` describe an operation for the log of operations and do not change what it does.
``group`` None is all ranks; ``op`` is a ``ReduceOp`` of ours or of torch. With ``async_op`` a handle is returned
whose ``wait()`` must be called before the result is read; without, the result is there on return.
"""
# ruff: noqa: B008 (the published signatures evaluate get_caller_func() in their defaults)

from deepspeed.comm.caller import get_caller_func
from deepspeed.comm.process_group import current_backend
from deepspeed.comm.reduce_op import ReduceOp
from deepspeed.comm.timed import timed_op


# ---- reductions ---------------------------------------------------------------------------------------------------
@timed_op
def all_reduce(
    tensor,
    op=ReduceOp.SUM,
    group=None,
    async_op=False,
    prof=False,
    log_name="all_reduce",
    debug=get_caller_func(),
):
    """Every rank's ``tensor`` becomes the reduction over the ranks."""
    return current_backend().all_reduce(tensor, op, group, async_op)


@timed_op
def inference_all_reduce(
    tensor,
    op=ReduceOp.SUM,
    group=None,
    async_op=False,
    prof=False,
    log_name="all_reduce",
    debug=get_caller_func(),
):
    """``all_reduce`` for the small tensors of token generation."""
    if async_op:
        return current_backend().all_reduce(tensor, op, group, async_op)
    return current_backend().inference_all_reduce(tensor, op, group)


@timed_op
def all_reduce_coalesced(
    tensors,
    op=ReduceOp.SUM,
    group=None,
    async_op=False,
    prof=False,
    log_name="all_reduce",
    debug=get_caller_func(),
):
    """``all_reduce`` of each tensor of the list, all under way at the same time."""
    return current_backend().all_reduce_coalesced(tensors, op, group, async_op)


@timed_op
def reduce(
    tensor,
    dst,
    op=ReduceOp.SUM,
    group=None,
    async_op=False,
    prof=False,
    log_name="reduce",
    debug=get_caller_func(),
):
    """Rank ``dst``'s ``tensor`` becomes the reduction over the ranks."""
    return current_backend().reduce(tensor, dst, op, group, async_op)


@timed_op
def reduce_scatter(
    output,
    input_list,
    op=ReduceOp.SUM,
    group=None,
    async_op=False,
    prof=False,
    log_name="reduce_scatter",
    debug=get_caller_func(),
):
    """``output`` of rank r becomes the reduction of the ranks' ``input_list[r]``."""
    return current_backend().reduce_scatter(output, input_list, op, group, async_op)


@timed_op
def reduce_scatter_tensor(
    output_tensor,
    tensor,
    op=ReduceOp.SUM,
    group=None,
    async_op=False,
    prof=False,
    log_name="reduce_scatter_tensor",
    debug=get_caller_func(),
):
    """``output_tensor`` of rank r becomes part r of the reduction of the ranks' ``tensor``."""
    return current_backend().reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


@timed_op
def reduce_scatter_fn(
    output_tensor,
    tensor,
    op=ReduceOp.SUM,
    group=None,
    async_op=False,
    prof=False,
    debug=get_caller_func(),
):
    """The older name of ``reduce_scatter_tensor``."""
    return current_backend().reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


# ---- data movement ------------------------------------------------------------------------------------------------
@timed_op
def broadcast(
    tensor,
    src,
    group=None,
    async_op=False,
    prof=False,
    log_name="broadcast",
    debug=get_caller_func(),
):
    """Every rank's ``tensor`` becomes that of the global rank ``src``."""
    return current_backend().broadcast(tensor, src, group, async_op)


@timed_op
def broadcast_object_list(object_list, src, group=None, device=None):
    """Every rank's list gets the picklable objects of the global rank ``src``; lists of equal length."""
    return current_backend().broadcast_object_list(object_list, src, group, device)


@timed_op
def all_gather(
    tensor_list,
    tensor,
    group=None,
    async_op=False,
    prof=False,
    log_name="all_gather",
    debug=get_caller_func(),
):
    """``tensor_list[r]`` becomes rank r's ``tensor``."""
    return current_backend().all_gather(tensor_list, tensor, group, async_op)


@timed_op
def all_gather_into_tensor(
    output_tensor,
    tensor,
    group=None,
    async_op=False,
    prof=False,
    log_name="all_gather_into_tensor",
    debug=get_caller_func(),
):
    """``output_tensor`` gets the ranks' tensors one after the other."""
    return current_backend().all_gather_into_tensor(output_tensor, tensor, group, async_op)


@timed_op
def allgather_fn(output_tensor, input_tensor, group=None, async_op=False, debug=get_caller_func()):
    """The older name of ``all_gather_into_tensor``."""
    return current_backend().all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


@timed_op
def all_gather_coalesced(output_tensors, input_tensors, group=None, async_op=False):
    """``all_gather_into_tensor`` of each pair of the lists, all under way at the same time."""
    return current_backend().all_gather_coalesced(output_tensors, input_tensors, group, async_op)


@timed_op
def all_gather_object(
    object_list,
    obj,
    group=None,
    prof=False,
    log_name="all_gather_object",
    debug=get_caller_func(),
):
    """``object_list[r]`` becomes rank r's picklable ``obj``."""
    return current_backend().all_gather_object(object_list, obj, group)


@timed_op
def all_to_all_single(
    output,
    tensor,
    output_split_sizes=None,
    input_split_sizes=None,
    group=None,
    async_op=False,
    prof=False,
    log_name="all_to_all_single",
    debug=get_caller_func(),
):
    """Part r of ``output`` becomes this rank's part of rank r's ``tensor``; parts are equal or as the sizes say."""
    return current_backend().all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op)


@timed_op
def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
    """``output_tensor_list[r]`` becomes what rank r holds for this rank."""
    return current_backend().all_to_all(output_tensor_list, input_tensor_list, group, async_op)


@timed_op
def gather(
    tensor,
    gather_list=None,
    dst=0,
    group=None,
    async_op=False,
    prof=False,
    log_name="gather",
    debug=get_caller_func(),
):
    """Rank ``dst``'s ``gather_list[r]`` becomes rank r's ``tensor``."""
    return current_backend().gather(tensor, gather_list, dst, group, async_op)


@timed_op
def scatter(
    tensor,
    scatter_list=None,
    src=0,
    group=None,
    async_op=False,
    prof=False,
    log_name="scatter",
    debug=get_caller_func(),
):
    """Rank r's ``tensor`` becomes rank ``src``'s ``scatter_list[r]``."""
    return current_backend().scatter(tensor, scatter_list, src, group, async_op)


# ---- point to point -----------------------------------------------------------------------------------------------
@timed_op
def send(tensor, dst, group=None, tag=0, prof=False, log_name="send", debug=get_caller_func()):
    """Sends to the global rank ``dst`` and waits until the tensor may be changed."""
    return current_backend().send(tensor, dst, group, tag)


@timed_op
def recv(tensor, src=None, group=None, tag=0, prof=False, log_name="recv", debug=get_caller_func()):
    """Receives from the global rank ``src``, or from anyone; returns the sender."""
    return current_backend().recv(tensor, src, group, tag)


@timed_op
def isend(tensor, dst, group=None, tag=0, prof=False, log_name="isend", debug=get_caller_func()):
    """Starts to send; returns a handle."""
    return current_backend().isend(tensor, dst, group, tag)


@timed_op
def irecv(tensor, src=None, group=None, tag=0, prof=False, log_name="irecv", debug=get_caller_func()):
    """Starts to receive; returns a handle."""
    return current_backend().irecv(tensor, src, group, tag)


class P2POp:
    """A send or receive for ``batch_isend_irecv``.

    Args:
        op: ``deepspeed.comm.isend`` or ``irecv``, or torch's. tensor: what is sent, or what is filled. peer: the global rank
        of the other side. group, tag: as for ``isend``.
    """

    def __init__(self, op, tensor, peer=None, group=None, tag=0):
        name = getattr(op, "__name__", "")
        if name not in ("isend", "irecv"):
            raise ValueError(f"op is {op!r}; a P2POp takes deepspeed.comm.isend or deepspeed.comm.irecv")
        self.op, self.sends, self.tensor, self.peer, self.group, self.tag = op, name == "isend", tensor, peer, group, tag


def batch_isend_irecv(p2p_op_list):
    """Starts all of a list of ``P2POp``; returns their handles. Messages may cross: no order between ranks is needed."""
    if not p2p_op_list or not all(isinstance(one, P2POp) for one in p2p_op_list):
        raise ValueError("batch_isend_irecv takes a list of deepspeed.comm.P2POp that is not empty")
    return current_backend().batch_isend_irecv(p2p_op_list)


# ---- meeting points -----------------------------------------------------------------------------------------------
@timed_op
def barrier(
    group=None,
    async_op=False,
    device_ids=None,
    prof=False,
    log_name="barrier",
    debug=get_caller_func(),
):
    """Returns when every rank of the group has called it."""
    return current_backend().barrier(group, async_op, device_ids)


@timed_op
def monitored_barrier(
    group=None,
    timeout=None,
    wait_all_ranks=False,
    prof=False,
    log_name="monitored_barrier",
    debug=get_caller_func(),
):
    """A barrier that names the ranks that did not come in time; gloo groups only."""
    return current_backend().monitored_barrier(group, timeout, wait_all_ranks)
