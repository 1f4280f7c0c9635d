"""What an engine has when it is saved: counters, degrees, the shapes and shards of ZeRO, and its memory.

Memory that changes only in calls of the engine (fp32 masters, states of a native optimizer) can be copied later.
"""

import collections

from deepspeed._compat import named_parameters, storage_of
from deepspeed.checkpoint.constants import CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.read import storage
from deepspeed.checkpoint.write.snapshot import MemoryRanges
from deepspeed.comm.mesh_views import splitter_of
from deepspeed.zero.param_ranks import SavedNames, ranks_of
from deepspeed.zero.sharded_parameter import is_sharded
from deepspeed.zero.wrapped_optimizer import WrappedOptimizer

# ---- counters ------------------------------------------------------------------------------------------------------
# How far a run has come and how many ranks it has: what every layout says of the engine under the same keys.


def counters_of(engine):
    """dict with the published keys, in the order of the model file."""
    return {
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": engine.sparse_tensor_module_names,
        "skipped_steps": engine.skipped_steps,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "dp_world_size": engine.parallel.dp_world_size,
        "mp_world_size": engine.mp_world_size,
        names.RESERVED_KEY: parallel_metadata(engine.parallel.mpu),
    }


# ---- parallel metadata ---------------------------------------------------------------------------------------------
# The parallel degrees that a model file notes.

_PIPELINE = ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size")
_TENSOR = (
    "get_tensor_model_parallel_world_size",
    "get_slice_parallel_world_size",
    "get_model_parallel_world_size",
)


def parallel_metadata(mpu):
    """``{pp_degree, tp_degree}`` of an ``mpu``, under whichever names it has them; 1 each without."""
    return {CHECKPOINT_PP_DEGREE: _ask(mpu, _PIPELINE), CHECKPOINT_TP_DEGREE: _ask(splitter_of(mpu), _TENSOR)}


def _ask(mpu, methods):
    for name in methods:
        method = getattr(mpu, name, None)
        if method is not None:
            return method()
    return 1


# ---- zero states ---------------------------------------------------------------------------------------------------
# What a checkpoint holds of an engine with ZeRO: shapes, shards, and the whole weights when asked for.


def _shape(param):
    return param.ds_shape if is_sharded(param) else param.shape


def sharded_names(module):
    """All names of sharded parameters, tied ones under each of their names."""
    return {name for name, param in named_parameters(module) if is_sharded(param)}


def param_shapes(engine):
    """One ordered dict name -> torch.Size for each parameter group of the optimizer, in its order, of what all ranks
    train."""
    if engine.basic_optimizer is None:
        return []
    named = SavedNames(engine.module)
    called = {id(param): named(name) for name, param in engine.module.named_parameters()}
    return [
        collections.OrderedDict(
            (called.get(id(p), engine.optimizer.param_names.get(p)), _shape(p)) for p in group if ranks_of(p) is None
        )
        for group in engine.optimizer.bit16_groups
    ]


def _frozen(engine):
    """Parameters that no file of optimizer states has, frozen ones and those the optimizer was not given, nor an
    expert's file."""
    named, trained = SavedNames(engine.module), {id(param) for group in engine.trained_groups for param in group}
    return [
        (named(name), param)
        for name, param in engine.module.named_parameters()
        if id(param) not in trained
        and (named.expert(name) is None or is_sharded(param) and ranks_of(param) is None)
    ]


def frozen_shapes(engine):
    """Ordered dict name -> torch.Size of parameters that are not trained."""
    return collections.OrderedDict((name, _shape(param)) for name, param in _frozen(engine))


def frozen_fragments(engine):
    """Ordered dict name -> values of parameters that are not trained: this rank's slice at stage 3, else the whole."""
    return collections.OrderedDict(
        (name, storage.compact(p.ds_tensor if is_sharded(p) else p.data)) for name, p in _frozen(engine)
    )


def shared_params(module, named=str):
    """dict alias -> first name of the same parameter, for tied weights. ``named``: their names in checkpoints."""
    first, found = {}, {}
    for name, param in named_parameters(module):
        if id(param) in first:
            found[named(name)] = first[id(param)]
        first.setdefault(id(param), named(name))
    return found


# ---- the optimizer as a whole --------------------------------------------------------------------------------------


def groups_of(engine):
    """Hyperparameters of each parameter group."""
    groups = engine.basic_optimizer.param_groups if engine.stepping is not None else ()
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def extra_of(engine):
    """What ``SavedState.extra`` gives back."""
    stepping = engine.stepping
    if stepping is None:
        return {}
    found = {"overflow": bool(stepping.overflow)}
    if stepping.scaler is not None:
        found["loss_scaler"] = dict(vars(stepping.scaler))
        found["dynamic_loss_scale"] = bool(stepping.scaler.dynamic)
    if isinstance(engine.optimizer, WrappedOptimizer) and not engine._stage_policy.shards_params:
        found["clip_grad"] = engine.optimizer.clip_grad
    return found


# ---- engine states -------------------------------------------------------------------------------------------------


def _is_on_host(tensor):
    return tensor is not None and tensor.device.type == "cpu" and tensor.numel() > 0


class EngineStates:
    """That memory of ``engine``, and its hold on it. Weights are not in it, even where they are their own masters, and
    neither are the states of an optimizer of somebody else: programs write to them between steps."""

    def __init__(self, engine):
        self._core = engine.core
        weights = [*engine.module.parameters(), *engine.module.buffers()]
        known = {storage_of(weight).data_ptr() for weight in weights}
        self._ranges = MemoryRanges()
        self._watched = {}  # address of a storage -> (a tensor over it, its version)
        for tensor in self._tensors():
            storage = storage_of(tensor)
            if storage.data_ptr() not in known and storage.data_ptr() not in self._watched:
                self._ranges.add(storage.data_ptr(), storage.nbytes())
                self._watched[storage.data_ptr()] = tensor, tensor._version

    def _tensors(self):
        if self._core is None:
            return []
        found = list(self._core.masters())
        for slot in range(len(self._core.slot_names())):
            found += self._core.slots(slot)
        return [tensor for tensor in found if _is_on_host(tensor)]

    def cover(self, address, bytes):
        """Whether all of it is such memory."""
        return self._ranges.find(address, bytes) is not None

    def hold(self):
        """From now on calls that would change it wait for ``let_go``."""
        self._core.hold_states()

    def let_go(self):
        self._core.let_states_go()

    def check_unchanged(self):
        """RuntimeError if it was written to since this was made, as far as torch saw it."""
        if any(tensor._version != version for tensor, version in self._watched.values()):
            raise RuntimeError(
                "fp32 masters or optimizer states were written to, by other means than the engine, between "
                "save_checkpoint and the next engine.step(), while they were being copied. Call "
                "engine.checkpoint_engine.wait() before you change them, or use safe_set_full_fp32_param and "
                "safe_set_full_optimizer_state, which wait by themselves"
            )
