"""``zero.Init``: parameters are sharded as they are created, so that no rank ever holds the whole model."""

import contextlib
import enum
import functools
import os
import threading
import weakref

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.agreement import attempt, problems_of_ranks
from deepspeed.comm.mesh_views import EngineMesh
from deepspeed.config.getters import resolved_sections
from deepspeed.config.read import read
from deepspeed.config.sections import OffloadDeviceEnum
from deepspeed.log import logger
from deepspeed.utils.forwarding import answers_from, forwarded
from deepspeed.zero.gathers.gathered import GatheredParameters
from deepspeed.zero.init.initializers import follow_initializers
from deepspeed.zero.parameters import sharded_parameter as sharding
from deepspeed.zero.parameters.loading import follow_loading

_PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class DeepSpeedTensorOverride(enum.Enum):
    """The decisions of ``zero.Init`` about tensors that a constructor makes."""

    dtype = 1
    device = 2


DEFAULT_TENSOR_OVERRIDES = (DeepSpeedTensorOverride.dtype, DeepSpeedTensorOverride.device)


def _contradicting_single_rank_pg_error(dp_world_size, explicit_process_group, env=None):
    """The error when the default group has one rank although several were started, or None: every rank
    would silently hold the whole model. ``env``: the environment, default this process's."""
    world = int((os.environ if env is None else env).get("WORLD_SIZE", "1") or 1)
    if explicit_process_group or dp_world_size != 1 or world <= 1:
        return None
    return (
        f"zero.Init would shard over one rank, but WORLD_SIZE says that {world} ranks were started: the process "
        "group does not have them all. Call deepspeed.init_distributed() on every rank before, or pass "
        "data_parallel_group="
    )


class _Nesting(threading.local):
    """Contexts that are open in this thread, innermost last, and what they have patched."""

    def __init__(self):
        self.contexts, self.constructing = [], []
        self.patches = contextlib.ExitStack()


_nesting = _Nesting()


def is_zero_init_enabled():
    """Whether a ``zero.Init`` context is open."""
    return any(context.enabled for context in _nesting.contexts)


class InsertPostInitMethodToModuleSubClasses:
    """Calls ``_post_init_method(module)`` when the constructor of a module, of whatever class, is through."""

    def __init__(self, enabled=True, mem_efficient_linear=True, ds_config=None, dtype=None):
        self.mem_efficient_linear = mem_efficient_linear
        self.enabled = enabled
        self.dtype = dtype if dtype is not None else _dtype_of(ds_config)

    def __enter__(self):
        if self.enabled:
            self.patch_init_and_builtins()
        return self

    def __exit__(self, exc_type, exc_value, traceback):
        if self.enabled:
            self.unpatch_init_and_builtins()

    def patch_init_and_builtins(self):
        _nesting.contexts.append(self)
        if len(_nesting.contexts) == 1:
            _patch()

    def unpatch_init_and_builtins(self):
        _nesting.contexts.remove(self)
        if not _nesting.contexts:
            _nesting.patches.close()

    def _post_init_method(self, module):
        raise NotImplementedError


@answers_from({"get_partition_rank": "access.rank", "get_dp_process_group": "access.group"})
class Init(InsertPostInitMethodToModuleSubClasses):
    """Inside the context, and for ``module`` if one is given, parameters become shards over ``data_parallel_group``.

    All ranks start from the values of the group's first rank. ``dtype``: of the parameters; default: fp16 or bf16 as
    the configuration says, as they are made where it asks for neither, and fp16 without a configuration. A ``module``
    that is passed keeps its dtype unless ``dtype`` or the configuration says otherwise. Parameters made on the meta
    device (inside ``torch.device("meta")``, or with ``device="meta"``) become zeros on this rank's device, with a
    warning: values are to be loaded, or set inside ``GatheredParameters``. ``remote_device`` "cpu" or "nvme": slices go
    there as they are made, to host memory (page-locked with ``pin_memory``) or to a file below
    ``offload_param.nvme_path``; None: where ``offload_param`` of the configuration says, "none": nowhere.
    ``config_dict_or_path`` (``config``): the configuration that the model will be trained with.
    ``enabled=False`` does nothing. ``mpu``: its data-parallel group is used. Contexts may be nested; the innermost
    counts. ``zero_param_parallel_group`` (the ranks that have a second copy together, hpZ), ``zero_quantized_weights``
    and ``zero_quantized_nontrainable_weights`` (frozen parameters) are what the engine does that trains the model, as
    the keys of the configuration are; parameters without an engine are slices in their own dtype. ``tensor_overrides``: which of dtype and device the context decides; default both. Parameters are gathered
    again inside ``GatheredParameters`` or when an engine runs the model.
    """

    num_partitions = forwarded("access.world", False, "Ranks that share one copy of a parameter.")
    ds_process_group = forwarded("access.group", False)

    def __init__(
        self,
        module=None,
        data_parallel_group=None,
        mem_efficient_linear=True,
        remote_device=None,
        pin_memory=False,
        config_dict_or_path=None,
        config=None,
        enabled=True,
        dtype=None,
        mpu=None,
        zero_param_parallel_group=None,
        zero_quantized_weights=False,
        zero_quantized_nontrainable_weights=False,
        sequence_data_parallel_group=None,
        param_swapper=None,
        tensor_overrides=DEFAULT_TENSOR_OVERRIDES,
    ):
        if config is not None:
            logger.warning("zero.Init: the argument `config` is deprecated; use `config_dict_or_path`")
        found = config_dict_or_path if config_dict_or_path is not None else config
        super().__init__(enabled=enabled, mem_efficient_linear=mem_efficient_linear, ds_config=found, dtype=dtype)
        if not enabled:
            return
        if self.dtype is None and found is None and module is None:
            self.dtype = torch.float16
        self._off_meta = {}  # id of a parameter on the meta device -> (it, its replacement, its name)
        if param_swapper:
            raise NotImplementedError("zero.Init: param_swapper is not supported yet; leave it out")
        try:
            remote = None if remote_device is None else OffloadDeviceEnum(remote_device)
        except ValueError:
            raise ValueError(
                f"zero.Init: remote_device is None, 'none', 'cpu' or 'nvme', not {remote_device!r}"
            ) from None
        overrides = set(tensor_overrides or ())
        if DeepSpeedTensorOverride.dtype not in overrides:
            self.dtype = None
        self.keep_device = DeepSpeedTensorOverride.device not in overrides
        # Models are built before the "auto" blanks of the configuration are filled in: only this section is read.
        zero = None if found is None else resolved_sections(found, ["zero_optimization"])["zero_optimization"]
        self.override_module_apply = zero is None or zero["override_module_apply"]
        if remote is None:
            remote = _offload_device(zero)
            pin_memory = pin_memory or (remote is not None and zero["offload_param"]["pin_memory"])
        self.remote_device = remote_device if remote_device is not None else remote
        self.pin_memory = pin_memory
        # Before anything is created: what the group and the parameters need of memory belongs on this rank's device.
        local_rank = os.environ.get("LOCAL_RANK")
        if local_rank is not None:
            get_accelerator().set_device(int(local_rank))
        if not dist.is_initialized():
            dist.init_distributed()
        group = sequence_data_parallel_group or data_parallel_group
        group = group or (EngineMesh(mpu).dp_group if mpu is not None else None)
        group = self._sharing_ranks(group, zero)
        self.access = sharding.ShardAccess.of_group(group)
        self.access.second_group = zero_param_parallel_group
        self.access.codes_weights = bool(zero_quantized_weights)
        self.access.codes_frozen = bool(zero_quantized_nontrainable_weights)
        problem = _contradicting_single_rank_pg_error(self.access.world, group is not None)
        if problem:
            raise RuntimeError(problem)
        self.local_device = torch.device(get_accelerator().current_device_name())
        self._remote = None
        if remote in (OffloadDeviceEnum.cpu, OffloadDeviceEnum.nvme):
            native = read(getattr(found, "_param_dict", found) or {}, strict=False, sections_only=True)
            place = (self.local_device, remote.value, bool(pin_memory), dist.get_rank())
            self._remote, error = attempt(lambda: _native._C.RemoteSlices(native, *place))
            self._agree(error)
            # Files of slices that get no engine; at the end of the process.
            weakref.finalize(Init, self._remote.exit_guard())
        if module is not None:
            for sub in module.modules():
                self._follow(sub)
            self._convert(module.named_parameters(recurse=True))
            self._ended()

    def _sharing_ranks(self, group, zero):
        """The group of ranks that share one copy, of the data-parallel ``group`` (None: all ranks). ``zero``: the
        section of the configuration, or None."""
        return group

    def __exit__(self, exc_type, exc_value, traceback):
        super().__exit__(exc_type, exc_value, traceback)
        if self.enabled and exc_type is None:
            self._ended()

    def _ended(self):
        if self._off_meta and self.access.rank == 0:
            names = [name for _, _, name in self._off_meta.values()]
            logger.warning(
                f"zero.Init: {len(names)} parameters were made on the meta device (the first: {names[0]}) and are "
                "zeros now: load a state dict or a checkpoint, or set them inside deepspeed.zero.GatheredParameters"
            )
        self._off_meta.clear()
        if self._remote is not None:
            self._agree(attempt(self._remote.settle)[1])

    def _agree(self, error):
        """A slice that one rank cannot put where ``remote_device`` says is an error of all: they wait for each other at
        the next parameter. Every rank calls it."""
        group = self.access.copies
        if self.access.world > 1:
            failed = torch.tensor([int(error is not None)], device=self.local_device)
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
            if failed.item():
                rank, text = problems_of_ranks(None if error is None else str(error), group)[0]
                error = error or RuntimeError(f"zero.Init: data-parallel rank {rank} could not go on: {text}")
        if error is not None:
            raise error

    def get_partition_dp_group(self, param):
        return param.ds_process_group

    def _post_init_method(self, module):
        self._follow(module)
        self._convert(module.named_parameters(recurse=False), type(module).__name__)

    def _follow(self, module):
        """Before its parameters are sharded. Zeros replace parameters on the meta device, the same
        ones in all modules: a tensor cannot leave it."""
        follow_initializers(type(module))
        follow_loading(module)
        for name, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            if id(param) not in self._off_meta:
                data = torch.zeros(param.shape, dtype=param.dtype, device=self.local_device)
                real = torch.nn.Parameter(data, requires_grad=param.requires_grad)
                real.__dict__.update(param.__dict__)
                self._off_meta[id(param)] = (param, real, f"{type(module).__name__}.{name}")
            module._parameters[name] = self._off_meta[id(param)][1]

    @torch.no_grad()
    def _convert(self, named, owner=None):
        taken, error = False, None
        for name, param in named:
            if sharding.is_sharded(param):
                continue
            target = param.device if self.keep_device else self.local_device
            if param.device != target or (self.dtype is not None and param.is_floating_point()):
                param.data = param.data.to(target, self.dtype if param.is_floating_point() else None)
            self.access.broadcast(param)
            sharding.shard(param, self.access, f"{owner}.{name}" if owner else name)
            self.access.gatherer.acquire([param.ds_handle])
            self.access.gatherer.release([param.ds_handle])
            taken = self._remote is not None
            if taken and error is None:
                _, error = attempt(functools.partial(self._remote.take, param.ds_handle))
        if taken:
            self._agree(error)


def _offload_device(zero):
    """The placement of parameters by ``offload_param`` of a resolved section, or None."""
    section = zero["offload_param"] if zero is not None and zero["stage"] == 3 else None
    device = OffloadDeviceEnum(section["device"]) if section is not None else OffloadDeviceEnum.none
    return None if device == OffloadDeviceEnum.none else device


def _dtype_of(config):
    if config is None:
        return None
    sections = resolved_sections(config, list(_PRECISIONS))
    return next((dtype for name, dtype in _PRECISIONS.items() if sections[name]["enabled"]), None)


# ---- following constructors ---------------------------------------------------------------------------------


def _every_subclass(cls):
    for sub in type.__subclasses__(cls):
        yield sub
        yield from _every_subclass(sub)


def _follow(cls):
    """Wraps the class's own constructor, if it has one, once."""
    init = cls.__dict__.get("__init__")
    if init is None or hasattr(init, "_ds_wrapped"):
        return

    @functools.wraps(init)
    def wrapper(module, *args, **kwargs):
        # Only the outermost constructor of an object tells when it is complete: bases call each other in between.
        outermost = not any(module is one for one in _nesting.constructing)
        if not outermost or not _nesting.contexts:
            return init(module, *args, **kwargs)
        _nesting.constructing.append(module)
        try:
            init(module, *args, **kwargs)
        finally:
            _nesting.constructing.pop()
        _nesting.contexts[-1]._post_init_method(module)

    wrapper._ds_wrapped = init
    _put(cls, "__init__", wrapper)


def _put(cls, name, value):
    """Replaces an attribute of a class as long as contexts are open."""
    had, before = name in vars(cls), vars(cls).get(name)
    _nesting.patches.callback(*((setattr, cls, name, before) if had else (delattr, cls, name)))
    setattr(cls, name, value)


def _patch():
    for cls in set(_every_subclass(torch.nn.Module)):
        _follow(cls)
    original = torch.nn.Module.__dict__.get("__init_subclass__")

    def follow_new(cls, **kwargs):
        if original is not None:
            original.__func__(cls, **kwargs)
        else:
            super(torch.nn.Module, cls).__init_subclass__(**kwargs)
        _follow(cls)

    _put(torch.nn.Module, "__init_subclass__", classmethod(follow_new))
    _put(torch.nn.Module, "to_empty", _to_empty)
    if getattr(_nesting.contexts[0], "override_module_apply", True):
        _put(torch.nn.Module, "apply", _gathering_apply(torch.nn.Module.apply))
    # Constructors often initialise parameters of modules that are complete and sharded already.
    sharding.gather_while_building = lambda params: GatheredParameters(list(params), modifier_rank=0)
    _nesting.patches.callback(setattr, sharding, "gather_while_building", None)


def _to_empty(module, *, device, recurse=True):
    """``Module.to_empty`` while models are built (``torch.nn.utils.skip_init`` calls it): slices of sharded parameters
    exist already and stay, everything else becomes memory without values on ``device``."""

    def emptied(tensor):
        return tensor if sharding.is_sharded(tensor) else torch.empty_like(tensor, device=device)

    return module._apply(emptied) if recurse else module._apply(emptied, recurse=False)


def _gathering_apply(apply):
    @functools.wraps(apply)
    def gathering(module, fn):
        """``Module.apply`` where ``fn`` may read and write sharded parameters; rank 0's changes count."""
        for child in module.children():
            gathering(child, fn)
        own = [p for p in module.parameters(recurse=False) if sharding.is_sharded(p)]
        with GatheredParameters(own, modifier_rank=0 if own else None):
            fn(module)
        return module

    return gathering
