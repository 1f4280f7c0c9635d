"""The verbs of ``deepspeed.comm``: those of torch.distributed. The native communicator of the group and the device runs
them; torch itself does where there is none.

A row of the table ``VERBS`` is a function under ``verb``: its name, its arguments, and the arguments behind them that
describe a call for the log of operations and do not change it. Where torch serves a call, torch's function of that name
gets its arguments.

``group`` None is all ranks; ``op`` is a ``ReduceOp`` of ours or of torch. With ``async_op`` a handle is returned
whose ``wait()`` must be called before the result is read; without, the result is there on return.
"""

import functools
import inspect

import torch
import torch.distributed as dist

from deepspeed.comm.caller import get_caller_func
from deepspeed.comm.group_communicators import ANY_RANK, ServedByTorch, of, rank_in
from deepspeed.comm.reduce_op import ReduceOp, core_name, to_torch
from deepspeed.comm.timed import call_log, logged
from deepspeed.comm.utils import argument_names

LOGGED = ("prof", "log_name", "debug")  # arguments that describe a call for the log of operations
VERBS = {}  # name -> the function without those arguments, which are not recorded


def verb(*described, log_name=None):
    """Decorates a function, which becomes a row of the table. The result takes the arguments ``described``, too, and is
    recorded as ``log_name`` (default: the function's name) while the log listens."""

    def row(function):
        signature = inspect.signature(function)
        defaults = {"prof": False, "log_name": log_name or function.__name__, "debug": get_caller_func()}
        more = [
            inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=defaults[one]) for one in described
        ]
        count = len(signature.parameters)

        @functools.wraps(function)
        def plain(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except ServedByTorch:
                pass
            return _by_torch(function, args, kwargs)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if call_log.records or len(args) > count or (kwargs and kwargs.keys() & defaults):
                own = {name: value for name, value in kwargs.items() if name not in described}
                return logged(call, args, kwargs, functools.partial(plain, *args[:count], **own))
            return plain(*args, **kwargs)

        call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *more])
        VERBS[function.__name__] = plain
        return call

    return row


def _by_torch(function, args, kwargs):
    """Returns what torch's function of that name returns, which takes the same arguments in the same order."""
    given = argument_names(function, args, kwargs)
    if "op" in given:
        given["op"] = to_torch(given["op"], next(one for one in given.values() if torch.is_tensor(one)).dtype)
    return getattr(dist, function.__name__)(*given.values())


class _Joined:
    """A handle for several."""

    def __init__(self, works):
        self._works = works

    def wait(self, timeout=None):
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self):
        return all(work.is_completed() for work in self._works)


def _all_of(works, async_op):
    joined = _Joined([work for work in works if work is not None])
    if not async_op:
        joined.wait()
    return joined if async_op else None


# ---- reductions ---------------------------------------------------------------------------------------------------
@verb(*LOGGED)
def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """Every rank's ``tensor`` becomes the reduction over the ranks."""
    return of(group, tensor, op).run("all_reduce", [], [tensor], async_op, core_name(op))


@verb(*LOGGED, log_name="all_reduce")
def inference_all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """``all_reduce`` for the small tensors of token generation."""
    return all_reduce(tensor, op, group, async_op)


@verb(*LOGGED, log_name="all_reduce")
def all_reduce_coalesced(tensors, op=ReduceOp.SUM, group=None, async_op=False):
    """``all_reduce`` of each tensor of the list, all under way at the same time."""
    return _all_of([all_reduce(tensor, op, group, True) for tensor in tensors], async_op)


@verb(*LOGGED)
def reduce(tensor, dst, op=ReduceOp.SUM, group=None, async_op=False):
    """Rank ``dst``'s ``tensor`` becomes the reduction over the ranks."""
    return of(group, tensor, op).run("reduce", [], [tensor], async_op, core_name(op), rank_in(group, dst))


@verb(*LOGGED)
def reduce_scatter(output, input_list, op=ReduceOp.SUM, group=None, async_op=False):
    """``output`` of rank r becomes the reduction of the ranks' ``input_list[r]``."""
    return of(group, output, op, input_list).run("reduce_scatter", input_list, [output], async_op, core_name(op))


@verb(*LOGGED)
def reduce_scatter_tensor(output_tensor, tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """``output_tensor`` of rank r becomes part r of the reduction of the ranks' ``tensor``."""
    return of(group, output_tensor, op).run("reduce_scatter", [tensor], [output_tensor], async_op, core_name(op))


@verb("prof", "debug")
def reduce_scatter_fn(output_tensor, tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """The older name of ``reduce_scatter_tensor``."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


# ---- data movement ------------------------------------------------------------------------------------------------
@verb(*LOGGED)
def broadcast(tensor, src, group=None, async_op=False):
    """Every rank's ``tensor`` becomes that of the global rank ``src``."""
    return of(group, tensor).run("broadcast", [], [tensor], async_op, peer=rank_in(group, src))


@verb()
def broadcast_object_list(object_list, src, group=None, device=None):
    """Every rank's list gets the picklable objects of the global rank ``src``; lists of equal length."""
    return dist.broadcast_object_list(object_list, src=src, group=group, device=device)


@verb(*LOGGED)
def all_gather(tensor_list, tensor, group=None, async_op=False):
    """``tensor_list[r]`` becomes rank r's ``tensor``."""
    return of(group, tensor, parts=tensor_list).run("all_gather", [tensor], tensor_list, async_op)


@verb(*LOGGED)
def all_gather_into_tensor(output_tensor, tensor, group=None, async_op=False):
    """``output_tensor`` gets the ranks' tensors one after the other."""
    return of(group, output_tensor).run("all_gather", [tensor], [output_tensor], async_op)


@verb("debug")
def allgather_fn(output_tensor, input_tensor, group=None, async_op=False):
    """The older name of ``all_gather_into_tensor``."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


@verb()
def all_gather_coalesced(output_tensors, input_tensors, group=None, async_op=False):
    """``all_gather_into_tensor`` of each pair of the lists, all under way at the same time."""
    if len(output_tensors) != len(input_tensors):
        raise ValueError(
            f"all_gather_coalesced got {len(output_tensors)} outputs for {len(input_tensors)} inputs; "
            f"it needs one output tensor per input tensor."
        )
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _all_of([all_gather_into_tensor(*pair, group, True) for pair in pairs], async_op)


@verb(*LOGGED)
def all_gather_object(object_list, obj, group=None):
    """``object_list[r]`` becomes rank r's picklable ``obj``."""
    return dist.all_gather_object(object_list, obj, group=group)


@verb(*LOGGED)
def all_to_all_single(output, tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    """Part r of ``output`` becomes this rank's part of rank r's ``tensor``; parts are equal or as the sizes say."""
    splits = (list(input_split_sizes or ()), list(output_split_sizes or ()))
    return of(group, output).run("all_to_all", [tensor], [output], async_op, splits=splits)


@verb()
def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
    """``output_tensor_list[r]`` becomes what rank r holds for this rank."""
    return of(group, output_tensor_list[0]).run("all_to_all", input_tensor_list, output_tensor_list, async_op)


@verb(*LOGGED)
def gather(tensor, gather_list=None, dst=0, group=None, async_op=False):
    """Rank ``dst``'s ``gather_list[r]`` becomes rank r's ``tensor``."""
    return of(group, tensor).run("gather", [tensor], gather_list or [], async_op, peer=rank_in(group, dst))


@verb(*LOGGED)
def scatter(tensor, scatter_list=None, src=0, group=None, async_op=False):
    """Rank r's ``tensor`` becomes rank ``src``'s ``scatter_list[r]``."""
    return of(group, tensor).run("scatter", scatter_list or [], [tensor], async_op, peer=rank_in(group, src))


# ---- point to point -----------------------------------------------------------------------------------------------
@verb(*LOGGED)
def send(tensor, dst, group=None, tag=0):
    """Sends to the global rank ``dst`` and waits until the tensor may be changed."""
    return of(group, tensor).run("send", [tensor], [], peer=rank_in(group, dst), tag=tag)


@verb(*LOGGED)
def recv(tensor, src=None, group=None, tag=0):
    """Receives from the global rank ``src``, or from anyone; returns the sender."""
    of(group, tensor)  # raises where torch receives
    work = irecv(tensor, src, group, tag)
    work.wait()
    if src is None:
        sender = work._source_rank()
        src = sender if group in (None, dist.group.WORLD) else dist.get_global_rank(group, sender)
    return src


@verb(*LOGGED)
def isend(tensor, dst, group=None, tag=0):
    """Starts to send; returns a handle."""
    return of(group, tensor).run("send", [tensor], [], True, peer=rank_in(group, dst), tag=tag)


@verb(*LOGGED)
def irecv(tensor, src=None, group=None, tag=0):
    """Starts to receive; returns a handle."""
    return of(group, tensor).run(
        "recv", [], [tensor], True, peer=ANY_RANK if src is None else rank_in(group, src), tag=tag
    )


class P2POp:
    """A send or receive for ``batch_isend_irecv``.

    Args:
        op: ``deepspeed.comm.isend`` or ``irecv``, or torch's. tensor: what is sent, or what is filled. peer: the global
        rank of the other side. group, tag: as for ``isend``.
    """

    def __init__(self, op, tensor, peer=None, group=None, tag=0):
        name = getattr(op, "__name__", "")
        if name not in ("isend", "irecv"):
            raise ValueError(f"op is {op!r}; a P2POp takes deepspeed.comm.isend or deepspeed.comm.irecv")
        self.op, self.sends, self.tensor = op, name == "isend", tensor
        self.peer, self.group, self.tag = peer, group, tag


def batch_isend_irecv(p2p_op_list):
    """Starts all of a list of ``P2POp``; returns their handles. Messages may cross: ranks need no order."""
    if not p2p_op_list or not all(isinstance(one, P2POp) for one in p2p_op_list):
        raise ValueError("batch_isend_irecv takes a list of deepspeed.comm.P2POp that is not empty")
    if all(one.tensor.is_cpu for one in p2p_op_list):
        return [(isend if one.sends else irecv)(one.tensor, one.peer, one.group, one.tag) for one in p2p_op_list]
    made = [
        dist.P2POp(dist.isend if one.sends else dist.irecv, one.tensor, one.peer, one.group, one.tag)
        for one in p2p_op_list
    ]
    return dist.batch_isend_irecv(made)  # a backend of a device launches them together


# ---- meeting points -----------------------------------------------------------------------------------------------
@verb(*LOGGED)
def barrier(group=None, async_op=False, device_ids=None):
    """Returns when every rank of the group has called it."""
    return of(group, None).run("barrier", [], [], async_op)


@verb(*LOGGED)
def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
    """A barrier that names the ranks that did not come in time; gloo groups only."""
    return dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)
