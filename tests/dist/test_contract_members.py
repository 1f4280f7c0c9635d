"""Every member that clients and other people's tests touch, by the list in ``tests/python/data/engine_members.json``:
``{class: {member: signature, or "attribute"}}``. Attributes are asked of an object in use."""

import json
import os
import pathlib
import sys

import pytest
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "python"))

import deepspeed  # noqa: E402
import pipe_models as models  # noqa: E402
import surface  # noqa: E402
from deepspeed.config import DeepSpeedConfig  # noqa: E402
from deepspeed.config.inference import DeepSpeedInferenceConfig  # noqa: E402
from deepspeed.monitor.monitor import MonitorMaster  # noqa: E402
from deepspeed.profiling.flops_profiler import FlopsProfiler  # noqa: E402
from deepspeed.utils.timer import ThroughputTimer  # noqa: E402
from engine_models import config, loss_on, make_net  # noqa: E402
from harness import run_ranks  # noqa: E402
from runs import take_step  # noqa: E402
from surface_tables import ABSENT_MEMBERS, OWN_PARAMETERS  # noqa: E402

MEMBERS = json.loads(pathlib.Path(os.path.dirname(HERE), "python", "data", "engine_members.json").read_text())


def engine_at(stage, **more):
    made = config(1, zero_optimization={"stage": stage}, **more)
    engine = deepspeed.initialize(model=make_net(), config=made)[0]
    take_step(engine, loss_on(engine, 0))
    return engine


class Answers(torch.nn.Linear):
    """As a model of transformers: the engine hands on what it has not itself."""

    def __init__(self):
        super().__init__(2, 2)
        self.config = {}

    def generate(self):
        return []


def objects():
    """One object of each class of the list, which has trained."""
    pipeline = models.engine_of("plain", 1, 1, 2)
    pipeline.train_batch(models.batches("plain", 1, 2, 0))
    stage3 = engine_at(3)
    return {
        "DeepSpeedEngine": engine_at(0, flops_profiler={"enabled": True}),
        "PipelineEngine": pipeline,
        "PipelineModule": pipeline.module,
        "DeepSpeedZeroOptimizer": engine_at(1).optimizer,
        "DeepSpeedZeroOptimizer_Stage3": stage3.optimizer,
        "DeepSpeedZeRoOffload": stage3.optimizer.parameter_offload,
        "BF16_Optimizer": engine_at(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}).optimizer,
        "InferenceEngine": deepspeed.init_inference(Answers(), dtype=torch.float32),
        "DeepSpeedConfig": DeepSpeedConfig({"train_batch_size": 1}),
        "ThroughputTimer": ThroughputTimer(),
    }


def problems_of(name, one):
    """``[(member, what is wrong)]``. Attributes of the wrapped model are none of the engine."""
    cls, found = type(one), []
    for member, kind in MEMBERS[name].items():
        if not kind.startswith("("):
            if not _has(one, member):
                found.append((member, "is missing"))
            continue
        value = getattr(cls, member, None)
        if value is None:
            found.append((member, "is missing"))
            continue
        names = [base.__name__ + ("" if member == "__init__" else f".{member}") for base in cls.__mro__]
        ours = [key for full in names for key in OWN_PARAMETERS.get(full, ())]
        module = sys.modules[cls.__module__]
        real = surface.real_parameters(value, not isinstance(vars(cls).get(member), staticmethod), ours)
        difference = surface.compare_parameters(surface.published_parameters(kind, module), real)
        if difference:
            found.append((member, difference))
    return found


def _has(one, member):
    if isinstance(one, deepspeed.DeepSpeedEngine):  # which hands on attributes of the model
        return hasattr(type(one), member) or member in vars(one) or member in one._modules
    return hasattr(one, member)


def lists_of(kind):
    return lambda value: type(value) is list and bool(value) and all(isinstance(one, kind) for one in value)


# class -> member -> what it is, or what its call without arguments gives: a type, a value of its own type, or a
# function that says yes. Of attributes and of methods without arguments each that does not only act.
VALUES = {
    "DeepSpeedEngine": {
        "__call__": callable, "_config": DeepSpeedConfig, "_get_zero_param_shapes": None, "autotp_size": 0,
        "basic_optimizer": torch.optim.Optimizer, "bfloat16_enabled": False, "config": dict,
        "coalesce_grad_reduction": lambda made: hasattr(made, "__enter__"),
        "no_sync": lambda made: hasattr(made, "__exit__"),
        "data_parallel_group": lambda group: group is not None, "device": torch.device, "dp_world_size": 1,
        "dynamic_loss_scale": False, "eigenvalue_enabled": False, "eval": deepspeed.DeepSpeedEngine,
        "flops_profiler": FlopsProfiler, "fp16_enabled": False, "get_global_grad_norm": lambda norm: norm > 0,
        "get_lr": [3e-3], "get_mom": lambda moms: [tuple(one) for one in moms] == [(0.9, 0.95)], "get_pld_theta": None,
        "get_type": ["FusedAdam"], "global_rank": 0, "global_samples": 8, "global_steps": 1,
        "gradient_accumulation_steps": 1, "gradient_average": True, "gradient_clipping": 0.5, "is_compiled": False,
        "is_gradient_accumulation_boundary": True, "local_rank": 0, "log_level": None, "loss_scale": 1.0,
        "lr_scheduler": None, "micro_steps": 1, "module": torch.nn.Module, "monitor": MonitorMaster, "mp_world_size": 1,
        "optimizer": lambda made: lists_of(dict)(made.param_groups), "optimizer_name": "adamw",
        "random_ltd_enabled": False, "random_ltd_scheduler": None, "scheduler_name": None, "seq_parallel_group": None,
        "skipped_steps": 0, "sparse_tensor_module_names": lambda names: list(names) == [], "steps_per_print": None,
        "tput_timer": ThroughputTimer, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 8,
        "training_dataloader": None, "wall_clock_breakdown": True, "was_step_applied": True, "world_size": 1,
        "zero_gather_16bit_weights_on_model_save": False, "zero_optimization": False, "zero_optimization_stage": 0,
        "get_wall_clock_timers": lambda times: {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"} <= times.keys()
        and all(type(one) is float and one >= 0 for one in times.values()),
    },
    "PipelineEngine": {
        "_INSTRUCTION_MAP": lambda made: type(made) is dict and all(map(callable, made.values())),
        "_compute_loss": True, "fwd_outputs": lists_of(torch.Tensor), "get_additional_losses": None,
        "grid": lambda grid: (grid.get_data_parallel_rank(), grid.get_pipe_parallel_world_size(), grid.get_stage_id())
        == (0, 1, 0), "is_first_stage": True, "is_last_stage": True, "micro_batches": 2, "total_loss": torch.Tensor,
    },
    "PipelineModule": {
        "activation_checkpoint_func": callable, "activation_checkpoint_interval": 0, "forward_funcs": lists_of(object),
        "get_additional_losses": None, "is_checkpointable_results": [], "mpu": lambda grid: grid.get_stage_id() == 0,
        "num_pipeline_stages": 1, "partitions": lists_of(int), "tied_modules": torch.nn.ModuleDict,
        "tied_weight_attrs": dict, "topology": lambda made: made.get_axis_names() == ["pipe", "data"],
    },
    "DeepSpeedZeroOptimizer": {
        "averaged_gradients": dict, "bit16_groups": lists_of(list), "cur_scale": 1.0,
        "dp_process_group": lambda group: True, "dynamic_loss_scale": False, "get_lr": 3e-3, "loss_scale": 1.0,
        "loss_scaler": lambda scaler: scaler.cur_scale == 1.0, "needs_scaler": False,
        "optimizer": torch.optim.Optimizer,
        "overflow": False, "param_groups": lists_of(dict),
        "param_names": lambda names: {type(name) for name in names.values()} == {str},
        "single_partition_of_fp32_groups": lists_of(torch.Tensor), "state": lambda state: len(state) > 0,
        "state_dict": dict,
    },
    "DeepSpeedZeroOptimizer_Stage3": {
        "averaged_gradients": dict, "dtype": torch.float32, "fp16_groups": lists_of(list),
        "fp32_partitioned_groups_flat": lists_of(torch.Tensor), "module": torch.nn.Module, "overflow": False,
        "parameter_offload": lambda made: type(made).__name__ == "DeepSpeedZeRoOffload", "state_dict": dict,
    },
    "DeepSpeedZeRoOffload": {
        "backward_hooks": list, "forward_hooks": list,
        "get_param_coordinator": lambda made: hasattr(made, "is_invalid_trace"),
        "module": torch.nn.Module, "param_coordinator": lambda made: hasattr(made, "is_invalid_trace"),
    },
    "BF16_Optimizer": {"get_grads_for_reduction": tuple, "param_groups": lists_of(dict), "state_dict": dict},
    "InferenceEngine": {
        "_config": DeepSpeedInferenceConfig, "config": {}, "generate": callable, "module": torch.nn.Module,
    },
    "DeepSpeedConfig": {},
    "ThroughputTimer": {"end_time": 0},
}  # fmt: skip
ACTIONS = {
    "_backward_epilogue", "allreduce_gradients", "compile", "destroy", "empty_partition_cache", "zero_grad",
    "reset_activation_shape", "allreduce_tied_weight_gradients", "refresh_fp32_params", "quantize_nontrainable_params",
    "partition_all_parameters", "clear_hp_grads", "model_times", "_configure_train_batch_size", "print_user_config",
}  # fmt: skip


def wrong_values(name, one):
    """``[(member, what it is)]`` of members that are not what ``VALUES`` says, or that it does not have."""
    known, found = VALUES[name], []
    asked = {member for member, kind in MEMBERS[name].items() if kind in ("attribute", "()")}
    absent = {full.split(".")[1] for names in ABSENT_MEMBERS.values() for full in names}
    for member in sorted(asked - known.keys() - ACTIONS - absent):
        found.append((member, "has no row in VALUES"))
    for member, wanted in known.items():
        value = getattr(one, member)
        value = value() if MEMBERS[name].get(member, "()") == "()" else value
        if isinstance(wanted, type):
            right = isinstance(value, wanted)
        elif callable(wanted):
            right = wanted(value)
        else:
            right = type(value) is type(wanted) and value == wanted
        if not right:
            found.append((member, f"is {value!r:.100}"))
    return found


def compares(rank, world):
    made = objects()
    assert set(made) == set(MEMBERS) == set(VALUES)
    values = {name: wrong_values(name, one) for name, one in made.items()}
    return {name: problems_of(name, one) for name, one in made.items()}, values


@pytest.fixture(scope="module")
def compared():
    (found,) = run_ranks(1, compares, init=True)
    return found


@pytest.fixture(scope="module")
def problems(compared):
    return compared[0]


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_types_and_contents(name, compared):
    assert not compared[1][name]


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_members(name, problems):
    absent = {full.split(".")[1] for names in ABSENT_MEMBERS.values() for full in names if full.split(".")[0] == name}
    wrong = [f"{name}.{member} {text}" for member, text in problems[name] if member not in absent]
    assert not wrong, "\n".join(wrong)


def test_every_absent_member_is_still_absent(problems):
    missing = {f"{name}.{member}" for name, found in problems.items() for member, _ in found}
    here = sorted({full for names in ABSENT_MEMBERS.values() for full in names} - missing)
    assert not here, f"these are here now: take them out of ABSENT_MEMBERS in tests/python/surface_tables.py: {here}"
