"""``deepspeed.checkpointing``: drop-in for ``torch.utils.checkpoint``, and Megatron's random number tracker.

A checkpointed segment keeps its inputs only and runs again in backward, with the random numbers and the autocast
settings of its forward. ``configure`` chooses how the inputs are kept: sharded over the model-parallel ranks, in one
buffer, on the host.
"""

import torch

from deepspeed.activation_checkpointing import function as _reentrant
from deepspeed.activation_checkpointing import non_reentrant as _non_reentrant
from deepspeed.activation_checkpointing import settings as _settings
from deepspeed.activation_checkpointing.buffers import ContiguousBuffers
from deepspeed.activation_checkpointing.function import CheckpointFunction
from deepspeed.activation_checkpointing.keep import (
    gather_partitioned_activations,
    get_cpu_activations_for_backward,
    get_offloaded_activations_for_backward,
    get_partition_size,
    get_partition_start,
    get_partitioned_activations_for_backward,
    partition_activations,
    restore_offloaded_activations,
)
from deepspeed.activation_checkpointing.offload import _ActivationOffloadEngine
from deepspeed.activation_checkpointing.rng import (
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
)
from deepspeed.activation_checkpointing.segment import Call, Options
from deepspeed.activation_checkpointing.tensors import (
    detach_variable,
    extract_tensors,
    is_activation_to_checkpoint,
    merge_tensors,
)
from deepspeed.config import DeepSpeedConfigAssertionError
from deepspeed.config.getters import resolved_sections
from deepspeed.log import log_dist, logger
from deepspeed.utils.random_state import MODEL_PARALLEL, CudaRNGStatesTracker, get_cuda_rng_tracker, set_device_state
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer

# gpt-neox reads these names.
_CUDA_RNG_STATE_TRACKER = get_cuda_rng_tracker()
_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL
_set_cuda_rng_state = set_device_state

__all__ = [
    "CheckpointFunction", "CudaRNGStatesTracker", "checkpoint", "configure", "configure_from", "detach_variable",
    "extract_tensors", "gather_partitioned_activations", "get_cpu_activations_for_backward", "get_cuda_rng_tracker",
    "get_offloaded_activations_for_backward", "get_partition_size", "get_partition_start",
    "get_partitioned_activations_for_backward", "is_activation_to_checkpoint", "is_configured", "merge_tensors",
    "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed", "non_reentrant_checkpoint",
    "partition_activations", "partition_activations_in_checkpoint", "reset", "restore_offloaded_activations",
    "set_num_layers", "split_checkpoint",
]  # fmt: skip

SECTION = "activation_checkpointing"
# Setting -> key of the section, and argument of configure().
_KEYS = {
    "partition": ("partition_activations", "partition_activations"),
    "contiguous": ("contiguous_memory_optimization", "contiguous_checkpointing"),
    "num_layers": ("number_checkpoints", "num_checkpoints"),
    "cpu": ("cpu_checkpointing", "checkpoint_in_cpu"),
    "synchronize": ("synchronize_checkpoint_boundary", "synchronize"),
    "profile": ("profile", "profile"),
}


def checkpoint(function, *args, **kwargs):
    """``function(*args, **kwargs)``, of which only the inputs are kept for backward.

    Takes the keywords of ``torch.utils.checkpoint.checkpoint``: ``use_reentrant`` (True here; False: see
    ``non_reentrant_checkpoint``), ``preserve_rng_state``, ``context_fn``, ``determinism_check``. Tensors are found in
    lists, tuples and dicts of arguments and results, too, and get gradients; other objects pass through. Under
    ``torch.no_grad`` this is a plain call.
    """
    options = Options.taken_from(kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return (_reentrant if options.reentrant else _non_reentrant).run(Call(function, args, kwargs, options))


def non_reentrant_checkpoint(function, *args):
    """``checkpoint`` that leaves the segment's graph in place: it works with ``torch.autograd.grad`` and
    ``backward(inputs=...)``, and inputs need not require gradients for hooks inside of the segment to see them."""
    return checkpoint(function, *args, use_reentrant=False)


def split_checkpoint(function, *args):
    """``non_reentrant_checkpoint`` for a backward in two halves: one recomputation serves both."""
    return checkpoint(function, *args, use_reentrant=False, keep_recomputed=True)


def configure(
    mpu_,
    deepspeed_config=None,
    partition_activations=None,
    contiguous_checkpointing=None,
    num_checkpoints=None,
    checkpoint_in_cpu=None,
    synchronize=None,
    profile=None,
):
    """Chooses how this process keeps the inputs of checkpointed segments for backward.

    mpu_:                     object with Megatron's ``get_model_parallel_{group,rank,world_size}`` methods, or None.
    deepspeed_config:         dict, path or DeepSpeedConfig whose section ``activation_checkpointing`` is read.
    partition_activations:    each model-parallel rank keeps its share of every activation.
    contiguous_checkpointing: activations lie in one buffer; needs the above and ``num_checkpoints``.
    num_checkpoints:          segments per forward.
    checkpoint_in_cpu:        activations are kept on the host.
    synchronize:              waits for the device at both ends of each segment.
    profile:                  logs the time of each segment.

    Arguments win over the section; options that neither names return to their defaults, but an mpu stays. Raises
    DeepSpeedConfigError for a wrong section, and one that is also an AssertionError for options that contradict each
    other. No option changes then.
    """
    wanted = {setting: getattr(_settings.Settings, setting) for setting in _KEYS}
    if deepspeed_config is not None:
        section = _section(deepspeed_config)
        wanted.update({setting: section[key] for setting, (key, _) in _KEYS.items()})
    given = (partition_activations, contiguous_checkpointing, num_checkpoints, checkpoint_in_cpu, synchronize, profile)
    wanted.update({setting: value for setting, value in zip(_KEYS, given) if value is not None})
    if mpu_ is not None:
        wanted["mpu"] = mpu_
    _change(wanted)
    _settings.current.configured = True


def configure_from(config, mpu=None):
    """``configure`` for an engine: does nothing if the section of the DeepSpeedConfig ``config`` sets nothing, so
    that settings of a script stay. Without the keys that its buffers need, contiguous_memory_optimization is left out
    with a warning: scripts that call ``configure`` themselves hear of it as an error there."""
    section = config.activation_checkpointing_config
    if not any(section[key] not in (None, False) for key, _ in _KEYS.values()):
        return
    contiguous = section["contiguous_memory_optimization"]
    missing = [key for key in ("partition_activations", "number_checkpoints") if contiguous and not section[key]]
    if missing:
        logger.warning(
            f"activation_checkpointing.contiguous_memory_optimization is left out, because it needs "
            f"{' and '.join(missing)} as well."
        )
    configure(mpu, deepspeed_config=config, contiguous_checkpointing=contiguous and not missing)


def _section(config):
    section = getattr(config, "activation_checkpointing_config", None)
    if section is not None:
        return section
    return resolved_sections(config, (SECTION,), rules=False)[SECTION]  # _change judges it with the arguments


def _change(wanted):
    current = _settings.current
    now = {name: wanted.get(name, getattr(current, name)) for name in (*_KEYS, "mpu")}
    if now["num_layers"] is not None and (not isinstance(now["num_layers"], int) or now["num_layers"] < 1):
        raise DeepSpeedConfigAssertionError(
            f"num_checkpoints (number_checkpoints in the configuration) is the number of segments per forward, at "
            f"least 1, not {now['num_layers']!r}."
        )
    if now["contiguous"] and not now["partition"]:
        raise DeepSpeedConfigAssertionError(
            "contiguous_checkpointing (contiguous_memory_optimization in the configuration) needs partitioned "
            "activations: set partition_activations to true as well."
        )
    if now["contiguous"] and now["num_layers"] is None:
        raise DeepSpeedConfigAssertionError(
            "contiguous_checkpointing (contiguous_memory_optimization in the configuration) needs to know how many "
            "activations its buffers hold: set num_checkpoints (number_checkpoints) to the number of layers."
        )
    vars(current).update(now)
    current.inputs_compared = False
    current.buffers = ContiguousBuffers(current.num_layers) if current.contiguous else None
    if bool(current.offload) != bool(current.cpu):
        # Everything goes to the host: no exceptions for small or recent activations, as the option promises.
        current.offload = _ActivationOffloadEngine(min_offload_bytes=0, keep_last_count=0) if current.cpu else None
    current.timers = SynchronizedWallClockTimer() if current.profile else NoopTimer()


def is_configured():
    """Whether ``configure`` was called in this process."""
    return _settings.current.configured


def reset():
    """Frees buffers, for evaluation with gradients, where no backward frees them. Options stay."""
    if _settings.current.buffers is not None:
        _settings.current.buffers.close()
    if _settings.current.offload is not None:
        _settings.current.offload.reset()


def set_num_layers(nlayers):
    """Sets the number of segments in one forward, for the buffers."""
    _change({"num_layers": nlayers})


def partition_activations_in_checkpoint(partition_activation):
    """Turns the sharding of activations over model-parallel ranks on or off."""
    _change({"partition": bool(partition_activation)})
    log_dist(f"partitioned activations: {_settings.current.partition}", ranks=[0])


def __getattr__(name):
    if name == "_cpu_offload_engine":  # the engine while checkpoint_in_cpu is on, else None
        return _settings.current.offload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
