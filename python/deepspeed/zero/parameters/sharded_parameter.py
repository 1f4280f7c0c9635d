"""Parameters of which every rank holds one slice: what ZeRO stage 3 makes of ``torch.nn.Parameter``.

The object stays the same and its class changes with its state: ``ShardedParameter`` while the values are here,
``ReleasedParameter`` while they are not. The second one refuses every operation that needs the values, by name, or
fetches them when a module that is running turns out to need them.
"""

import enum
import functools
import itertools
import weakref

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.comm import held, mesh_views
from deepspeed.config.sections import OffloadDeviceEnum
from deepspeed.utils.forwarding import answers_from, forwarded
from deepspeed.zero.core import writing
from deepspeed.zero.nested import tensors_in
from deepspeed.zero.parameters.own_slice import OwnSlice
from deepspeed.zero.parameters.recomputed import keep_values_in_recomputed_segments
from deepspeed.zero.parameters.released_data import (
    EMPTY_WHILE_BUILDING,
    as_released,
    empty_result,
    first_of,
    is_data_getter,
    needs_no_values,
    only_copies,
    operation_of,
    run_plainly,
    untouchable,
    warn_of_empty,
)


class ZeroParamType(enum.Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


partitioned_param_data_shape = [0]  # of a parameter whose values are not here


def get_allgather_dtype(param, param_ds_tensor):
    """dtype in which a parameter's slices travel: their own."""
    return param_ds_tensor.dtype


# While zero.Init is open: a context that gathers parameters for one operation of a constructor, on all ranks alike.
gather_while_building = None


class ShardAccess:
    """The native gatherer of the parameters of a group of ranks, and that group.

    ``core``: of the engine that has the parameters, whose gatherer is used as long as somebody holds that. Parameters
    have a ``ShardAccess`` as an attribute, and the core holds its parameters: it must not be held from here.
    """

    def __init__(self, gatherer, group, world, rank, copies=None, core=None):
        self._gatherer, self._core = gatherer, weakref.ref(core) if core is not None else lambda: None
        self.group, self.world, self.rank = group, world, rank
        self.copies = copies if copies is not None else group  # every rank that trains the same parameters
        self.efficient_linear = False  # see zero.linear
        self.checks_writes = False  # a write into gathered values without a modifier_rank is an error
        self.second_group = None  # the ranks that have a second copy together (hpZ)
        self.codes_weights = self.codes_frozen = False  # asked for by zero.Init
        self.give_up = None  # see zero.model.take_over

    def through(self, core):
        """The same through the ``core`` of an engine."""
        access = ShardAccess(self._gatherer, self.group, self.world, self.rank, self.copies, core)
        access.second_group = self.second_group
        return access

    @property
    def core(self):
        return self._core()

    @property
    def gatherer(self):
        core = self._core()
        return self._gatherer if core is None else core.gatherer

    @classmethod
    def of_group(cls, group=None, copies=None):
        """Collectives of ``group`` (None: all ranks), which every rank issues in the same order."""
        if not dist.is_initialized():
            return cls(_native._C.ParamGatherer(None), None, 1, 0)
        group = group if group is not None else dist.get_world_group()
        world = dist.get_world_size(group)
        communicator = mesh_views.gathers(group) if world > 1 else None
        gatherer = _native._C.ParamGatherer(communicator)
        held.hold(gatherer, [communicator])
        return cls(gatherer, group, world, dist.get_rank(group), copies=copies)

    @torch.no_grad()
    def broadcast(self, param, rank=0):
        """Every rank that trains ``param``, whose values are here, gets those of ``rank`` among them."""
        if self.copies is None or dist.get_world_size(self.copies) == 1:
            return
        values = param.detach().contiguous()
        dist.broadcast(values, dist.get_global_rank(self.copies, rank), group=self.copies)
        if values.data_ptr() != param.data_ptr():
            param.detach().copy_(values)


_ids = itertools.count()


def is_sharded(param):
    """Whether ``param`` belongs to ZeRO stage 3."""
    return isinstance(param, ShardedParameter)


@answers_from({"partition_numel": "ds_handle.slice_numel"})
class ShardedParameter(torch.nn.Parameter):
    """A parameter of stage 3 while its values are gathered. Its handle, ``ds_handle``, is the native object."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def ds_status(self):
        return ZeroParamStatus(self.ds_handle.status)

    @property
    def ds_shape(self):
        return torch.Size(self.ds_handle.sizes)

    ds_numel, ds_persist = forwarded("ds_handle.numel", False), forwarded("ds_handle.persistent", False)
    ds_world_size = forwarded("ds_handle.parts", False)
    ds_process_group = forwarded("ds_access.group", False)
    ds_zero_param_process_group = forwarded("ds_access.second_group", False)
    ds_secondary_tensor = forwarded(
        "ds_handle.second",
        False,
        "This rank's part of the copy that its group of ranks has beside the slices (hpZ), flat; None without one.",
    )

    @property
    def data(self):
        """As of any tensor. Writes to what it gives are not counted by torch: the parameter is compared with its slices
        before it is released."""
        values = torch.Tensor.data.__get__(self)
        if not isinstance(self, ReleasedParameter):
            self.ds_handle.data_given = True
        return values

    @data.setter
    def data(self, values):
        torch.Tensor.data.__set__(self, values)

    @property
    def ds_tensor(self):
        """This rank's slice, flat: ``ceil(ds_numel / ranks)`` elements, the last rank's padded with zeros.

        It may be written to, in place or with ``ds_tensor.data = values``; see ``own_slice``. What all ranks write before
        a forward of the engine is what all read in it: a rank that has written waits for the others to come there, and
        a rank that was there already without a write gets an error. Before ``GatheredParameters`` outside of a forward
        the script calls ``dist.barrier()``.
        Where slices rest in files (``offload_param``) or as codes (MixZ++) each access reads a copy, and
        ``ds_tensor.data = values`` writes. With hpZ all ranks write before the same forward, or none does.
        """
        handle = self.ds_handle
        shard = handle.shard
        known = {"status": ZeroParamStatus.AVAILABLE, "ds_numel": shard.numel(), "final_location": None}
        if handle.in_file or handle.rests_as_codes:
            known["final_location"] = OffloadDeviceEnum.nvme if handle.in_file else None
            return OwnSlice.of(shard, handle.name, handle.set_slice, self._before_slice_write, **known)
        found = self.__dict__.get("_ds_slice")
        if found is None or not found.shows(shard):
            found = self.__dict__["_ds_slice"] = OwnSlice.of(
                shard, handle.name, before=self._before_slice_write, **known
            )
        return found

    def _before_slice_write(self):
        gatherer, handle = self.ds_access.gatherer, self.ds_handle
        gatherer.before_slice_write()
        if gatherer.written(handle):  # the slice has what was written to the gathered values, and then more
            handle.write_back()

    @ds_tensor.setter
    def ds_tensor(self, values):
        self.ds_tensor.take(values)

    def all_gather(self, param_list=None, async_op=False, hierarchy=0):
        """Gathers this parameter, or all of ``param_list``, until ``partition`` is called."""
        _acquire(param_list or [self])

    all_gather_coalesced = all_gather

    def partition(self, param_list=None, hierarchy=0, has_been_updated=False, free_data=True):
        """Releases what ``all_gather`` has gathered. ``has_been_updated``: slices take the values there are now."""
        params = param_list or [self]
        if has_been_updated:
            write_back(params)
        _release(params)

    def aligned_size(self):
        return self.ds_handle.slice_numel * self.ds_handle.parts

    def padding_size(self):
        """Elements of padding behind the last slice."""
        return self.aligned_size() - self.ds_numel

    def convert_to_zero_parameters(self, param_list=None):
        """Shards the plain parameters among ``param_list`` as this one is sharded."""
        for param in param_list or []:
            if not is_sharded(param):
                shard(param, self.ds_access)

    def ds_summary(self, slice_shape=None, use_debug_name=False):
        return {
            "id": self.ds_id,
            "status": self.ds_status.name,
            "numel": self.numel(),
            "ds_numel": self.ds_numel,
            "shape": tuple(self.shape),
            "ds_shape": tuple(self.ds_shape),
            "requires_grad": self.requires_grad,
            "persist": self.ds_persist,
        }

    def __deepcopy__(self, memo):
        """A sharded copy with a slice of its own; no rank needs another one for it. Inside ``GatheredParameters`` a
        plain parameter, which keeps the values."""
        if self.__dict__.get("_ds_gathered") and not isinstance(self, ReleasedParameter):
            copy = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
            memo[id(self)] = copy
            return copy
        access, empty = self.ds_access, torch.empty(0, dtype=self.ds_handle.dtype, device=self.ds_handle.device)
        copy = torch.nn.Parameter(empty, self.requires_grad)
        if access.core is not None:
            access = ShardAccess.of_group(access.group, access.copies)
        _dress(copy, self.ds_handle.copy_for(copy, ShardedParameter, ReleasedParameter), access)
        return copy

    def __reduce_ex__(self, protocol):
        """Pickled it is a plain parameter: with its values while they are gathered, else empty, with a warning."""
        if isinstance(self, ReleasedParameter):
            warn_of_empty("pickling", self.ds_handle.name, tuple(self.ds_shape))
        with torch._C.DisableTorchFunction():
            return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class ReleasedParameter(ShardedParameter):
    """A parameter of stage 3 whose values are not here."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation_of(func)
        if is_data_getter(func):
            if args[0].ds_access.gatherer.touch(args[0].ds_handle):  # inside a call of the model
                return args[0].data
            return as_released(run_plainly(func, args, kwargs), args[0].ds_handle.name, tuple(args[0].ds_shape))
        if func == torch.Tensor.data.__set__ and args[1].numel() > 0:
            if args[0].ds_access.gatherer.touch(args[0].ds_handle):
                return func(*args)
            raise RuntimeError(untouchable(args[0].ds_handle.name, tuple(args[0].ds_shape), "param.data = ..."))
        given = first_of(args, kwargs)
        if needs_no_values(name, given, ReleasedParameter):
            return run_plainly(func, args, kwargs)
        released = [one for one in tensors_in((args, kwargs)) if isinstance(one, ReleasedParameter)]
        for param in released:
            handle = param.ds_handle
            if param.ds_access.gatherer.touch(handle):
                continue
            copied = param is given and only_copies(name, args, kwargs)
            if gather_while_building is not None and not (copied and name in EMPTY_WHILE_BUILDING):
                with gather_while_building(released):
                    return func(*args, **kwargs)
            if copied:
                return empty_result(func, args, kwargs, handle.name, tuple(param.ds_shape))
            raise RuntimeError(untouchable(handle.name, tuple(param.ds_shape), name))
        return func(*args, **kwargs)


def _dress(param, handle, access):
    handle.id = next(_ids)
    param.__dict__.update(
        ds_handle=handle,
        ds_access=access,
        ds_id=handle.id,
        ds_param_type=ZeroParamType.PARTITIONED,
        ds_active_sub_modules=set(),
    )


def _new_parameter(new):
    """``torch.nn.Parameter.__new__`` that takes a sharded parameter for the plain tensor of its values, as
    ``torch.nn.utils.parametrizations`` passes it; torch's own wants a copy of the same class."""

    @functools.wraps(new)
    def wrapped(cls, data=None, *args, **kwargs):
        if isinstance(data, ReleasedParameter):
            raise RuntimeError(untouchable(data.ds_handle.name, tuple(data.ds_shape), cls.__name__))
        return new(cls, data.detach() if isinstance(data, ShardedParameter) else data, *args, **kwargs)

    wrapped._ds_wrapped = new
    return staticmethod(wrapped)


def shard(param, access, name=None):
    """Makes a stage 3 parameter of ``param``, in place; it stays gathered until its slices have memory or are released.

    Every rank calls it with the same values, or with values of which its own slice is right.
    """
    if not hasattr(torch.nn.Parameter.__new__, "_ds_wrapped"):
        torch.nn.Parameter.__new__ = _new_parameter(torch.nn.Parameter.__new__)
        keep_values_in_recomputed_segments()
    name = name or f"parameter {tuple(param.shape)}"
    handle = _native._C.ShardedParam(param, name, access.world, access.rank, ShardedParameter, ReleasedParameter)
    _dress(param, handle, access)
    return param


def _by_access(params):
    """``[(access, its params)]``."""
    groups = {}
    for param in params:
        groups.setdefault(id(param.ds_access), (param.ds_access, []))[1].append(param)
    return list(groups.values())


def _acquire(params):
    for access, own in _by_access(params):
        access.gatherer.acquire([param.ds_handle for param in own])


def _release(params):
    for access, own in _by_access(params):
        access.gatherer.release([param.ds_handle for param in own])


def write_back(params):
    """Slices, and masters where there are any, take the gathered values. Every rank calls it with the same values."""
    for access, own in _by_access(params):
        with writing(access.core):
            for param in own:
                _write_back(param)


def _write_back(param):
    handle = param.ds_handle
    if handle.reshaped():
        if param.ds_access.core is not None:
            raise RuntimeError(
                f"parameter '{handle.name}' has changed from {tuple(handle.sizes)} to {tuple(param.shape)} after "
                "deepspeed.initialize: the optimizer's states no longer fit. Resize before initialize."
            )
        handle.adopt_shape()
        return
    handle.write_back()
    link = getattr(param, "_ds_link", None)
    if link is not None and link.owner is not None:
        link.set("fp32", param.detach())
