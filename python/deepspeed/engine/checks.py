"""Errors and warnings before an engine is built."""

import os
import tempfile

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.agreement import problems_of_ranks
from deepspeed.comm.process_group import group_refuses
from deepspeed.comm.timed import suppress_logging
from deepspeed.host.drives import drive_of
from deepspeed.log import log_dist, logger
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.by_name import is_native
from deepspeed.zero.errors import ZeRORuntimeException
from deepspeed.zero.parameters.param_ranks import ranks_of, shape_of

OWN_OPERATIONS = "operations of torch"  # the kernels of csrc/zero/any_kernels.cpp
KNOWN_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)


def check_precision(engine):
    accelerator = get_accelerator()
    if engine.fp16_enabled() and not accelerator.is_fp16_supported():
        raise ValueError(f"fp16.enabled: fp16 is not supported on {accelerator.device_name()} here; use bf16 or fp32")
    if engine.bfloat16_enabled() and not accelerator.is_bf16_supported():
        raise ValueError(f"bf16.enabled: bf16 is not supported on {accelerator.device_name()} here; use fp16 or fp32")


def check_device(engine):
    """Raises RuntimeError on all data-parallel ranks if one of them cannot train: the others would wait for it."""
    device, problem = engine.device, None
    try:
        kernels = _native._C.kernels_of(str(device))
        if kernels == OWN_OPERATIONS and device.type != "cpu":
            log_dist(f"There is no kernel library of {device.type}: the kernels are {kernels}.", ranks=[0])
    except (RuntimeError, ValueError) as error:
        problem = str(error)
    problem = problem or _several_devices(engine.module)
    alone = engine.dp_world_size == 1
    if not alone:
        problem = problem or group_refuses(engine.data_parallel_group, device)
    problems = problems_of_ranks(problem, engine.data_parallel_group, alone)
    if problems:
        texts = [text if alone else f"data-parallel rank {rank}: {text}" for rank, text in problems]
        raise RuntimeError(f"this engine cannot train on {device}. {'; '.join(texts)}")


def check_trained(engine):
    """Raises ValueError for a parameter of the optimizer that the model lacks: nobody would gather it at stage 3, and
    no checkpoint would have its value."""
    known = set(map(id, engine.module.parameters()))
    for index, group in enumerate(engine.trained_groups):
        for position, param in enumerate(group):
            if id(param) not in known:
                raise ValueError(
                    f"parameter {position} of group {index} of the optimizer, of shape {tuple(shape_of(param))}, is "
                    "not in the model that is passed to deepspeed.initialize: checkpoints, which are of the model, "
                    "would lack its value. Make it an attribute of the model (model.name = parameter) before "
                    "deepspeed.initialize, or leave it to an optimizer of its own"
                )


def check_file(engine, path, key):
    """Makes the folder of ``path``, which ``key`` names, and tries to append to the file on rank 0. Where that fails,
    all ranks, which all call it, raise ValueError."""
    problem = None
    if engine.global_rank == 0:
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            open(path, "a", encoding="utf-8").close()
        except OSError as error:
            problem = f"{key}: {error}. Name a file in a folder that rank 0 can write to, or leave it out"
    refuse_on_all(engine, problem)


def check_folder(engine, path, key):
    """Makes the folder ``path``, which ``key`` names, and a file in it, on every rank. Where that fails on one, all
    ranks, which all call it, raise ValueError."""
    problem = None
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        problem = f"{key}: {error}. Name a folder that every rank can write to, or leave it out"
    problems = problems_of_ranks(problem, alone=engine.world_size == 1)
    if problems:
        raise ValueError("; ".join(f"rank {rank}: {text}" for rank, text in problems))


def refuse_on_all(engine, problem, kind=ValueError):
    """Raises an error of ``kind`` on all ranks with the ``problem`` of rank 0, None where there is none: all ranks call
    it."""
    told = told_by_rank_0(engine, problem)
    if told is not None:
        raise kind(f"rank 0: {told}")


def told_by_rank_0(engine, value):
    """The value that rank 0 gives, on all ranks: all of them call it."""
    told = [value]
    if engine.world_size > 1:
        with suppress_logging():
            dist.broadcast_object_list(told, 0)
    return told[0]


def _several_devices(module):
    found = {}
    for name, param in module.named_parameters():
        if not getattr(param, "ds_optim_param", False):  # a frozen weight may rest on the host
            found.setdefault(getattr(param, "ds_handle", param).device, name)
    if len(found) > 1:
        listed = ", ".join(f"'{name}' on {device}" for device, name in found.items())
        return f"Parameters lie on {len(found)} devices: {listed}. Move the model to one device"
    return None


def check_frozen_rows(engine):
    """Raises ValueError for a frozen weight whose rows are shared by ranks that have other layers."""
    frozen = {
        name: ranks_of(param).lists()["ep"]
        for name, param in engine.module.named_parameters()
        if getattr(param, "ds_optim_param", False) and ranks_of(param) is not None
    }
    same = set(engine.parallel.mesh.ranks(["dp", "sp", "tp"])) if frozen else ()
    for name, sharers in frozen.items():
        if not same.issuperset(sharers):
            raise ValueError(
                f"parameter '{name}' is shared by ranks {sharers} (base_weight_sharding={len(sharers)}), and this stage "
                f"of the pipeline is on ranks {sorted(same)}: use a base_weight_sharding that divides their number"
            )


def check_grad_dtype(engine):
    given = engine._config.grad_accum_dtype
    for group in engine.trained_groups if given is not None else ():
        for param in group:
            if param.dtype == torch.float64:
                names = [name for name, p in engine.module.named_parameters() if p is param]
                raise ValueError(
                    f"data_types.grad_accum_dtype \"{given}\": parameter '{names[0] if names else '?'}' is "
                    "float64, and its gradients stay so. Convert it, or leave data_types.grad_accum_dtype out"
                )


def check_known(engine, optimizer):
    """ZeRO cuts parameters into pieces: an optimizer that looks at whole ones would compute something else."""
    if getattr(optimizer, "states_in_one_piece", False):
        raise ValueError(
            f"{type(optimizer).__name__} packs the states of a parameter so that they cannot be cut into shards: "
            'use FusedAdam, whose states ZeRO shards, or "zero_optimization": {"stage": 0}.'
        )
    if optimizer is None or engine.client_optimizer is None or engine.zero_allow_untested_optimizer():
        return
    known = is_native(optimizer) or type(optimizer) in KNOWN_OPTIMIZERS
    assert known, (
        f"{type(optimizer).__name__} is not known to work on pieces of parameters, as ZeRO gives it. If it treats "
        'every element alone (as Adam, SGD, Adagrad or Lion do), set "zero_allow_untested_optimizer": true in the '
        "configuration; if it uses norms of whole parameters (as LAMB does), use ZeRO stage 0"
    )


def check_step_strategy(engine):
    """Keys that say when a step is made speak of the steps that the native core makes."""
    zero = engine._config.zero_config
    offload = zero.offload_optimizer
    key = "zenflow" if zero.zenflow is not None else "offload_optimizer.super_offload"
    wanted = zero.zenflow is not None or (offload is not None and offload.super_offload)
    if wanted and engine.stepping is not None and not engine.stepping.fused:
        raise ValueError(
            f"zero_optimization.{key} needs an optimizer whose step the engine makes, and "
            f"{type(engine.basic_optimizer).__name__} makes its own: use deepspeed.ops.adam.DeepSpeedCPUAdam, name the "
            "optimizer in the configuration, or leave the key out"
        )


def check_offload(engine, optimizer):
    """With an offloaded step, a client's optimizer has to be for it; states in files have to be the core's."""
    if optimizer is None:
        return
    kind, placement = type(optimizer), engine._config.zero_config.placement
    section = engine.zero_offload_optimizer()
    found = placement is not None and placement.auto and section is not None and section.nvme_path is not None
    if found and not is_native(optimizer):
        raise ZeRORuntimeException(
            f"zero_optimization.placement may put masters into files, and {kind.__module__}.{kind.__qualname__} steps "
            "tensors. Use an optimizer of deepspeed.ops (DeepSpeedCPUAdam, or a type of the configuration), or leave "
            "offload_optimizer.nvme_path out."
        )
    if not engine.zero_use_cpu_optimizer():
        return
    if engine.client_optimizer is not None and engine.zero_force_ds_cpu_optimizer():
        if not isinstance(optimizer, DeepSpeedCPUAdam):
            raise ZeRORuntimeException(
                "zero_optimization.offload_optimizer moves the step to the host, and the optimizer that was passed is "
                f"{kind.__module__}.{kind.__qualname__}, which may be slow there. Pass a "
                "deepspeed.ops.adam.DeepSpeedCPUAdam, or name an optimizer in the configuration; to use this one "
                'knowing that, set "zero_force_ds_cpu_optimizer": false.'
            )


def tell_of_unpinned(engine):
    """An accelerator copies from host memory that is not page-locked at a fraction of its rate."""
    if engine.core is None or engine.device.type == "cpu":
        return
    usage = engine.core.storage.usage()
    if usage["unpinned"]:
        logger.warning(
            f"zero_optimization.offload_optimizer: {usage['unpinned']} bytes of host memory are not page-locked, so "
            f"copies are slow: {usage['unpinned_reason']}. Raise the limit (ulimit -l), or set pin_memory to false."
        )


def tell_of_drives(engine):
    """A path with a spelling mistake is made like any other: this line shows on which drive it is."""
    sections = {"offload_param": engine.zero_offload_param(), "offload_optimizer": engine.zero_offload_optimizer()}
    for name, section in sections.items():
        if engine.core is None or section is None or section.nvme_path is None or section.device != "nvme":
            continue
        device, kind, mount = drive_of(section.nvme_path)
        log_dist(
            f"zero_optimization.{name}: files rest in {section.nvme_path}, on the drive {device} ({kind}, mounted at "
            f"{mount}).",
            ranks=[0],
        )


def tell_of_missing_grads(engine, params):
    """Stage 0: what scripts do to ``.grad`` between backward and step would silently do nothing."""
    other = [param.dtype for param in params if engine.kept_grad_dtype(param) != param.dtype]
    if other:
        log_dist(
            f"Gradients are kept in {engine._grad_dtype} (gradient_accumulation_steps is "
            f"{engine.gradient_accumulation_steps()}, data_types.grad_accum_dtype {engine._config.grad_accum_dtype}), "
            f"so {len(other)} parameters in {other[0]} have no .grad between backward and step: change gradients "
            "with deepspeed.utils.safe_set_full_grad, or set data_types.grad_accum_dtype to the parameters' type.",
            ranks=[0],
        )
