"""The arguments of configure(), and the effect of each on one rank."""

import inspect
import json
import weakref

import pytest
import torch

import deepspeed
from deepspeed import checkpointing
from deepspeed.activation_checkpointing import settings
from deepspeed.activation_checkpointing.checkpointing import checkpoint, configure_from
from deepspeed.config import DeepSpeedConfig
from deepspeed.runtime.activation_checkpointing import checkpointing as facade
from deepspeed.runtime.activation_checkpointing.offload_activations import (
    CheckpointHiddenStatesOffload,
    get_checkpoint_hidden_states_offloading_ctx_manager,
)
from logs import logged
from refusals import refused
from segments import assert_same, both, plainly

CONTIGUOUS = {"partition_activations": True, "contiguous_checkpointing": True}
SIGNATURES = {
    "CheckpointFunction.forward": "(ctx, run_function, all_outputs, *args)",
    "CheckpointFunction.backward": "(ctx, *grads)",
    "CudaRNGStatesTracker.reset": "(self)",
    "CudaRNGStatesTracker.get_states": "(self)",
    "CudaRNGStatesTracker.set_states": "(self, states)",
    "CudaRNGStatesTracker.add": "(self, name, seed)",
    "CudaRNGStatesTracker.fork": "(self, name='model-parallel-rng')",
    "checkpoint": "(function, *args, **kwargs)",
    "configure": "(mpu_, deepspeed_config=None, partition_activations=None, contiguous_checkpointing=None, "
    "num_checkpoints=None, checkpoint_in_cpu=None, synchronize=None, profile=None)",
    "detach_variable": "(inputs, device=None)",
    "extract_tensors": "(all_objects)",
    "gather_partitioned_activations": "(tensors, device=None)",
    "get_cpu_activations_for_backward": "(args, inputs)",
    "get_cuda_rng_tracker": "()",
    "get_offloaded_activations_for_backward": "(args, engine)",
    "get_partition_size": "(item)",
    "get_partition_start": "(item)",
    "get_partitioned_activations_for_backward": "(args, inputs, contiguous_checkpoint)",
    "is_activation_to_checkpoint": "(item)",
    "is_configured": "()",
    "merge_tensors": "(tensor_objects, non_tensor_objects, tensor_flags)",
    "model_parallel_cuda_manual_seed": "(seed)",
    "model_parallel_reconfigure_tp_seed": "(seed)",
    "non_reentrant_checkpoint": "(function, *args)",
    "partition_activations": "(args, cpu_checkpoint, contiguous_checkpoint)",
    "partition_activations_in_checkpoint": "(partition_activation)",
    "reset": "()",
    "restore_offloaded_activations": "(tensors, engine)",
    "set_num_layers": "(nlayers)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_names_and_signatures(name):
    for module in (checkpointing, facade):
        found = module
        for part in name.split("."):
            found = getattr(found, part)
        assert str(inspect.signature(found)) == SIGNATURES[name]


def test_signatures_of_offloading():
    expected = (
        "(use_pin_memory=True, use_streams=True, min_offload_bytes=1024, max_fwd_stash_count=2, "
        "max_cpu_buffer_pool_count=64, keep_last_count=1)"
    )
    assert str(inspect.signature(get_checkpoint_hidden_states_offloading_ctx_manager)) == expected
    assert str(inspect.signature(CheckpointHiddenStatesOffload)) == expected


def test_is_configured():
    assert not checkpointing.is_configured()
    checkpointing.configure(mpu_=None)
    assert checkpointing.is_configured()
    checkpointing.reset()
    assert checkpointing.is_configured()


SECTION = {
    "partition_activations": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 4,
    "cpu_checkpointing": True,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}


@pytest.mark.parametrize("form", ["dict", "file", "object"])
def test_the_section_of_a_configuration(form, tmp_path):
    config = {"train_batch_size": 4, "activation_checkpointing": SECTION}
    if form == "file":
        (tmp_path / "ds.json").write_text(json.dumps(config))
        config = str(tmp_path / "ds.json")
    elif form == "object":
        config = DeepSpeedConfig(config, world_size=1)
    checkpointing.configure(None, deepspeed_config=config, num_checkpoints=6)
    found = settings.current
    assert (found.partition, found.contiguous, found.cpu, found.synchronize, found.profile) == (True,) * 5
    assert found.num_layers == 6  # arguments go first
    assert facade._cpu_offload_engine is not None
    checkpointing.configure(None, num_checkpoints=2)
    found = settings.current  # what is not named is off again
    assert not any((found.partition, found.contiguous, found.cpu, found.synchronize, found.profile))
    assert found.num_layers == 2 and facade._cpu_offload_engine is None


def test_an_mpu_stays():
    mpu = object()
    checkpointing.configure(mpu)
    checkpointing.configure(None, profile=True)
    assert settings.current.mpu is mpu


def test_the_engine_configures_only_what_its_section_sets():
    checkpointing.configure(None, synchronize=True)
    configure_from(DeepSpeedConfig({"train_batch_size": 4}, world_size=1))
    assert settings.current.synchronize
    mpu = object()
    configure_from(DeepSpeedConfig({"train_batch_size": 4, "activation_checkpointing": {"profile": True}}), mpu)
    assert settings.current.profile and not settings.current.synchronize and settings.current.mpu is mpu
    settings.forget()
    configure_from(DeepSpeedConfig({"train_batch_size": 4}, world_size=1))
    assert not checkpointing.is_configured()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"contiguous_checkpointing": True}, "partition_activations"),
        ({"contiguous_checkpointing": True, "partition_activations": True}, "num_checkpoints"),
        ({"num_checkpoints": 0}, "at least 1"),
        ({"deepspeed_config": {"activation_checkpointing": {"profil": True}}}, "profile"),
        ({"deepspeed_config": {"activation_checkpointing": {"profile": "yes"}}}, "profile"),
        ({"deepspeed_config": {"activation_checkpointing": {"contiguous_memory_optimization": True}}}, "partition"),
    ],
)
def test_options_that_do_not_fit_change_nothing(options, text):
    error = refused(deepspeed.DeepSpeedConfigError, text, checkpointing.configure, None, synchronize=True, **options)
    assert "deepspeed_config" in options or isinstance(error, AssertionError)
    assert not checkpointing.is_configured() and not settings.current.synchronize and not settings.current.contiguous


def test_arguments_complete_the_section():
    section = {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 2}}
    checkpointing.configure(None, section, partition_activations=True)
    assert settings.current.contiguous


def test_layers_and_partitioning_by_functions():
    checkpointing.partition_activations_in_checkpoint(True)
    assert settings.current.partition
    checkpointing.configure(None, **CONTIGUOUS, num_checkpoints=3)
    assert settings.current.buffers.slots == 3
    checkpointing.set_num_layers(5)
    assert settings.current.buffers.slots == 5


# ---- what the options do ------------------------------------------------------------------------------------------
def step(run, layers=4, rows=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
    x = torch.randn(rows, 8, requires_grad=True)
    hidden = x
    for layer in model:
        hidden = run(lambda v, layer=layer: torch.nn.functional.dropout(layer(v).tanh(), 0.2), hidden)
    return model, x, hidden


def grads(run=plainly, made=None):
    """The gradients of the step ``made``, or of a new one."""
    model, x, hidden = made or step(run)
    hidden.sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


OPTIONS = [
    {"checkpoint_in_cpu": True},
    {"partition_activations": True},
    {"partition_activations": True, "checkpoint_in_cpu": True},
    {**CONTIGUOUS, "num_checkpoints": 4},
    {**CONTIGUOUS, "num_checkpoints": 3, "checkpoint_in_cpu": True},
    {"synchronize": True, "profile": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
@both
def test_gradients_under_every_option(run, options):
    expected = grads()
    checkpointing.configure(None, **options)
    for _ in range(3):
        assert_same(grads(run), expected)
    checkpointing.reset()


def saved_storages(run, layers):
    places = {}

    def pack(tensor):
        storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()
        places[tensor.data_ptr()] = storage.data_ptr()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model, x, hidden = step(run, layers)
    own = {p.data_ptr() for p in model.parameters()}
    return [storage for place, storage in places.items() if place not in own], hidden


@both
def test_contiguous_activations_share_one_buffer(run):
    checkpointing.configure(None, **CONTIGUOUS, num_checkpoints=4)
    storages, first = saved_storages(run, 4)
    assert len(storages) == 4 and len(set(storages)) == 1
    again, second = saved_storages(run, 4)  # without a backward between: nothing is written over
    assert not set(again) & set(storages)
    more, third = saved_storages(run, 6)  # more layers than announced: a second buffer
    assert len(set(more)) == 2
    for hidden in (first, second, third):
        hidden.sum().backward()


@both
def test_a_buffer_is_not_written_over_while_it_is_needed(run):
    """Two forwards, then both backwards, as pipelines and evaluation with gradients do."""
    checkpointing.configure(None, **CONTIGUOUS, num_checkpoints=3)
    expected = grads()
    for made in [step(run) for _ in range(3)]:
        assert_same(grads(made=made), expected)


@both
def test_activations_that_were_copied_are_freed(run):
    checkpointing.configure(None, **CONTIGUOUS, num_checkpoints=4)
    layer, alive = torch.nn.Linear(8, 8), []

    def forward():
        hidden = layer(torch.randn(3, 8))
        for _ in range(4):
            alive.append(weakref.ref(hidden))
            hidden = run(lambda v: layer(v).tanh(), hidden)
        return hidden

    out = forward()
    assert all(one() is None for one in alive)
    out.sum().backward()


@both
def test_the_next_forward_begins_in_a_new_buffer(run):
    checkpointing.configure(None, **CONTIGUOUS, num_checkpoints=9)
    first, hidden = saved_storages(run, 4)
    hidden.sum().backward()  # five slots were not used
    del hidden
    second, _ = saved_storages(run, 8)
    assert len(set(first)) == 1 and len(set(second)) == 1  # eight do not fit behind four


@both
def test_segments_inside_of_a_recomputed_one_take_no_slots(run):
    checkpointing.configure(None, **CONTIGUOUS, num_checkpoints=1)
    taken = []
    real = settings.current.buffers.slot
    settings.current.buffers.slot = lambda *args: taken.append(args) or real(*args)
    x = torch.ones(3, requires_grad=True)
    checkpoint(lambda v: run(torch.sin, run(torch.cos, v)), x).sum().backward()
    assert len(taken) == 1
    torch.testing.assert_close(x.grad, -torch.cos(torch.cos(x)) * torch.sin(x))


@pytest.fixture
def log():
    with logged() as lines:
        yield lines


@both
def test_profile_logs_the_time_of_each_segment(run, log):
    checkpointing.configure(None, profile=True)
    log.clear()
    grads(run)
    assert sum("checkpoint_forward:" in line for line in log) == 4
    assert sum("checkpoint_recompute:" in line for line in log) == 4
    refused(KeyError, "", run, lambda v: {}[v], torch.ones(2, requires_grad=True))
    log.clear()
    grads(run)
    assert sum("checkpoint_forward:" in line for line in log) == 4


@both
def test_synchronize_waits_at_both_ends(run, monkeypatch):
    waits = []
    monkeypatch.setattr(type(deepspeed.get_accelerator()), "synchronize", lambda self, index=None: waits.append(1))
    grads(run)
    assert not waits
    checkpointing.configure(None, synchronize=True)
    model, x, hidden = step(run)
    assert len(waits) == 2 * 4
    hidden.sum().backward()
    assert len(waits) >= 2 * 4 * 2
