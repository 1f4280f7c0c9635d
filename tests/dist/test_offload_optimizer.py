"""Where masters, gradients and optimizer states rest changes no bit of training: ``offload_optimizer``."""

import os
import pathlib
import resource
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.engine import checks
from deepspeed.host.drives import drive_of
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import get_state_devices
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from engine_models import after_steps, batch, loss_of, make_net, net_engine, train_engine
from harness import on_ranks, run_ranks
from models import seeded
from refusals import refused
from runs import by_rank_0, engine_of, equal_bits, everything, identical, last_of, load_into, take_step
from test_checkpoint_universal import to_universal

DTYPES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}  # fp16: tests/cpp/zero/placements_test.cpp


def make_engine(world, stage, offload=None, accumulate=1, optimizer=None, model=None, zero=(), **more):
    section = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 20, **dict(zero)}
    if offload is not None:
        section["offload_optimizer"] = offload
    if isinstance(optimizer, str):
        more["optimizer"], optimizer = {"type": optimizer, "params": {"lr": 3e-3}}, None
    more = {"zero_allow_untested_optimizer": False, **more}
    return net_engine(world, stage, accumulate, model, client=optimizer, zero=section, **more)


def on(folder, where):
    """A section ``offload_optimizer``, or None."""
    if where == "none":
        return None
    if where == "nvme":
        return {"device": "nvme", "nvme_path": folder, "pipeline_read": True}
    if where == "mixed":
        return {"device": "nvme", "nvme_path": folder, "ratio": 0.5, "fast_init": True}
    return {"device": "cpu", "pin_memory": False, **({"ratio": 0.3} if where == "ratio 0.3" else {})}


def files_below(folder):
    return sorted(os.path.join(base, name) for base, _, names in os.walk(folder) for name in names)


# ---- equality -----------------------------------------------------------------------------------------------------
@pytest.mark.any_device
@pytest.mark.sample("values", 6)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", ["AdamW", "Lion", "Lamb", "Muon"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("where", ["cpu", "nvme", "ratio 0.3", "mixed"])
@on_ranks()
def test_equals_training_without_offload(rank, world, where, stage, dtype, accumulate, optimizer, clip, folder):
    def trained(offload):
        more = {**DTYPES[dtype], "gradient_clipping": clip}
        engine = make_engine(world, stage, offload, accumulate, optimizer, **more)
        return engine, train_engine(engine, 4, rank, world)[0]

    equal_bits(trained, None, on(folder, where))
    deepspeed.comm.barrier()
    assert not files_below(folder), "removed with the engine"


# ---- keys ---------------------------------------------------------------------------------------------------------
@on_ranks(2)
def test_keys_and_classes(rank, world, folder):
    engine = make_engine(world, 2, {"device": "cpu"}, optimizer="Adam")
    assert engine.zero_use_cpu_optimizer() and engine.zero_cpu_offload() and not engine.zero_nvme_offload_optimizer()
    assert engine.zero_offload_optimizer().device == "cpu" and engine.zero_partial_offload() == 1.0
    assert type(engine.basic_optimizer) is DeepSpeedCPUAdam and engine.basic_optimizer.adam_w_mode
    engine = make_engine(world, 1, optimizer="Adagrad", zero={"cpu_offload": True})
    assert engine.zero_cpu_offload() and type(engine.basic_optimizer) is DeepSpeedCPUAdagrad
    engine = make_engine(world, 3, on(folder, "nvme"), optimizer="Lion")
    assert engine.zero_nvme_offload_optimizer() and engine.zero_use_cpu_optimizer() and not engine.zero_cpu_offload()
    assert type(engine.basic_optimizer) is DeepSpeedCPULion
    files = files_below(os.path.join(folder, "zero_stage_3", "optimizer", f"rank{rank}"))
    assert len(files) >= 2 and all(name.endswith(".tensor.swp") for name in files)
    engine.destroy()
    assert type(make_engine(world, 2, {"device": "none"}, optimizer="Adam").basic_optimizer) is FusedAdam


@on_ranks(2)
def test_optimizers_of_clients(rank, world, folder):
    def initialize(make, offload, **more):
        model = make_net()
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        return make_engine(world, 2, offload, model=model, optimizer=optimizer, **more)

    for make in (torch.optim.AdamW, FusedAdam):
        refused(ZeRORuntimeException, "zero_force_ds_cpu_optimizer", initialize, make, {"device": "cpu"})
    assert type(initialize(DeepSpeedCPUAdam, {"device": "cpu"}).basic_optimizer) is DeepSpeedCPUAdam
    more = {"zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": True}}
    engines = [initialize(torch.optim.AdamW, offload, **more) for offload in (None, {"device": "cpu"})]
    assert identical(*(everything(after_steps(engine, 3, rank, world)) for engine in engines))


# ---- values of parameters -----------------------------------------------------------------------------------------
@pytest.mark.any_device
@pytest.mark.parametrize("where, stage", [("cpu", 2), ("nvme", 1), ("nvme", 3), ("mixed", 2)])
@on_ranks(2)
def test_values_are_read_and_set_where_they_rest(rank, world, where, stage, folder):
    def trained(offload):
        engine = after_steps(make_engine(world, stage, offload, bf16={"enabled": True}), 1, rank, world)
        params = [p for p in engine.module.parameters() if p.requires_grad]
        for index, param in enumerate(params):
            safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.5 + index)
            state = safe_get_full_optimizer_state(param, "exp_avg")
            safe_set_full_optimizer_state(param, state + 1, "exp_avg")
            if stage == 3:
                local = safe_get_local_optimizer_state(param, "exp_avg_sq")
                if local is not None and local.numel():
                    safe_set_local_optimizer_state(param, local * 2, "exp_avg_sq")
        engine.backward(loss_of(engine(batch(5)[0]), batch(5)[1]))
        inner = engine.basic_optimizer
        saved = inner.state_dict()  # of the pieces that this rank owns
        inner.load_state_dict(
            {**saved, "state": {i: {**s, "exp_avg": s["exp_avg"] + 1} for i, s in saved["state"].items()}}
        )
        grads = [safe_get_full_grad(param) for param in params]
        engine.step()
        return engine, grads

    equal_bits(trained, None, on(folder, where))


# ---- checkpoints --------------------------------------------------------------------------------------------------
@pytest.mark.any_device
@pytest.mark.sample("values")
@pytest.mark.parametrize("save_format", ["torch", "safetensors", "async"])
@pytest.mark.parametrize(
    "before, after",
    [
        ((3, "nvme"), (3, "none")),
        ((2, "nvme"), (2, "cpu")),
        ((1, "cpu"), (3, "nvme")),
        ((3, "ratio 0.3"), (1, "mixed")),
    ],
)
@on_ranks(2)
def test_checkpoints_of_any_placement_into_any_other(rank, world, before, after, save_format, folder):
    """Training that goes on from a checkpoint of another placement and stage."""
    checkpoint = {"async": True} if save_format == "async" else {"writer": {"format": save_format}}
    more = {"bf16": {"enabled": True}, "checkpoint": checkpoint}
    (stage, where), (next_stage, next_where) = before, after
    swap = os.path.join(folder, "swap")
    os.makedirs(swap, exist_ok=True)
    plain = after_steps(make_engine(world, stage, **more), 4, rank, world)
    first = after_steps(make_engine(world, stage, on(swap, where), **more), 2, rank, world)
    first.save_checkpoint(folder, tag="t")
    train_engine(first, 1, rank, world, start=2)
    first.save_checkpoint(folder, tag="t")  # over it
    if save_format == "async":
        train_engine(first, 1, rank, world, start=3)
        first.checkpoint_engine.wait()
    second = load_into(make_engine(world, next_stage, on(swap, next_where), **more), folder, tag="t")
    train_engine(second, 1, rank, world, start=3)
    again = after_steps(
        load_into(make_engine(world, next_stage, None, **more), folder, tag="t"), 1, rank, world, start=3
    )
    assert identical(everything(second), everything(again))
    gap = max(float((a - b).abs().max()) for a, b in zip(everything(second), everything(plain)))
    assert gap < 1e-4 or stage == next_stage and gap == 0, gap


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_universal_checkpoints_load_into_files(rank, world, stage, folder):
    """Into files, as into memory."""
    more = {"bf16": {"enabled": True}}
    after_steps(make_engine(world, stage, **more), 2, rank, world).save_checkpoint(folder, tag="t")
    by_rank_0(rank, to_universal, folder)
    more["checkpoint"] = {"load_universal": True}
    engines = (load_into(make_engine(world, stage, where, **more), folder) for where in (None, on(folder, "nvme")))
    assert identical(*(last_of(engine, everything) for engine in engines))


@on_ranks(2)
def test_a_folder_that_is_missing_is_made_and_its_drive_named(rank, world, folder):
    path = os.path.join(folder, "not/there/yet")
    said = []
    with mock.patch.object(checks, "log_dist", lambda text, ranks=None: said.append(text)):
        engine = make_engine(world, 3, on(path, "nvme"))
    device, kind, place = drive_of(path)
    line = f"offload_optimizer: files rest in {path}, on the drive {device} ({kind}, mounted at {place})."
    assert sum(line in text for text in said) == 1, said
    stage = os.path.join(path, "zero_stage_3")
    assert os.stat(stage).st_mode & 0o777 == 0o700
    # Only the files of this rank: another rank removes its own as soon as its engine is destroyed.
    files = files_below(os.path.join(stage, "optimizer", f"rank{rank}"))
    assert files and all(os.stat(file).st_mode & 0o777 == 0o600 for file in files)
    engine.destroy()


# ---- bad input ----------------------------------------------------------------------------------------------------
@on_ranks(1)
def test_what_cannot_work_is_refused_with_numbers(rank, world, folder):
    file = os.path.join(folder, "file")
    pathlib.Path(file).touch()
    offload = {"device": "nvme", "nvme_path": file}
    refused(NotADirectoryError, "nvme_path.*is not a folder", make_engine, world, 3, offload)
    if os.geteuid() != 0:  # who may write everywhere
        os.mkdir(os.path.join(folder, "locked"), 0o555)
        refused(
            PermissionError,
            "nvme_path.*cannot be written to",
            make_engine,
            world,
            3,
            {"device": "nvme", "nvme_path": os.path.join(folder, "locked")},
        )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # no room for a file
    try:
        refused(OSError, "tensor.swp failed: File too large.*ulimit -f", make_engine, world, 3, on(folder, "nvme"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files_below(folder) == [file]
    refused(
        ValueError,
        "buffer_count = 3 is too small: 'adam' keeps 2 states.*Set it to 4",
        make_engine,
        world,
        3,
        {**on(folder, "nvme"), "buffer_count": 3},
    )
    refused(ValueError, "stage", make_engine, world, 0, {"device": "cpu"})


def body_blocked(rank, world, folder, zero):
    """On rank 1 a file stands where its folder of files would be."""
    error = refused((OSError, RuntimeError), None, make_engine, world, zero["stage"], zero=zero)
    return type(error).__name__, str(error)


@pytest.mark.parametrize(
    "zero, blocked",
    [
        ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, "zero_stage_2/optimizer/rank1"),
        ({"stage": 3, "offload_param": {"device": "nvme", "max_in_cpu": 0}}, "zero_stage_3/float32params/rank1"),
    ],
)
def test_files_that_one_rank_cannot_make_are_an_error_of_all(tmp_path, zero, blocked):
    path = tmp_path / blocked
    path.parent.mkdir(parents=True)
    path.touch()
    zero = {key: {**value, "nvme_path": str(tmp_path)} if key != "stage" else value for key, value in zero.items()}
    found = run_ranks(2, body_blocked, str(tmp_path), zero, init=True)
    assert all(str(path) in text for _, text in found), found
    assert found[1][0] != "RuntimeError" and "could not go on" not in found[1][1], found
    assert "data-parallel rank 1 could not go on" in found[0][1], found


# ---- states that wait in files while nobody trains ----------------------------------------------------------------
@pytest.mark.any_device
@pytest.mark.parametrize("stage, where", [(1, None), (2, "cpu"), (3, None), (2, "ratio 0.3")])
@on_ranks(2)
def test_states_wait_in_files(rank, world, stage, where, folder):
    def trained(away):
        offload = (
            {"device": "none", "nvme_path": folder} if where is None else {**on(folder, where), "nvme_path": folder}
        )
        engine = make_engine(world, stage, offload, bf16={"enabled": True})
        # At stage 3 the slices lie in shared memory here, which has a fixed size.
        kinds = [kind for kind in OffloadStateTypeEnum if stage < 3 or kind.name != "lp_params"]
        for steps in (0, 2):  # before the first step, too
            train_engine(engine, steps, rank, world)
            if away:
                engine.offload_states(include=kinds, device=OffloadDeviceEnum.nvme, non_blocking=steps == 0)
                assert files_below(folder)
                assert get_state_devices(engine, OffloadStateTypeEnum.hp_params) == {torch.device("meta")}
                with pytest.raises(RuntimeError, match="engine.step.*reload_states"):
                    engine.step()
                engine.reload_states()
                places = {None: {engine.device}, "cpu": {torch.device("cpu")}}
                wanted = places.get(where, {engine.device, torch.device("cpu")})
                assert get_state_devices(engine, OffloadStateTypeEnum.hp_params) == wanted
        return after_steps(engine, 2, rank, world, start=2), None

    equal_bits(trained, False, True)
    deepspeed.comm.barrier()
    assert not files_below(folder)


# ---- memory instead of places -------------------------------------------------------------------------------------
@pytest.mark.any_device
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_memory_decides_where_states_rest(rank, world, stage, folder):
    found = []
    for device, host in ((None, None), (1000, 1200), (0, 0)):
        gib = {"device_gb": device and device / 2**30, "host_gb": host and host / 2**30} if host is not None else {}
        zero = {"placement": {"auto": True, **gib}} if device is not None else {}
        engine = after_steps(
            make_engine(world, stage, {"nvme_path": folder}, bf16={"enabled": True}, zero=zero), 3, rank, world
        )
        tiers = engine.offload_report()["tiers"]
        if device is not None:
            assert tiers["file"]["resting_bytes"] > 0 and (tiers["host"]["resting_bytes"] > 0) == (host > 0)
        found.append(last_of(engine, everything))
    refused(
        ValueError,
        "placement: .* of this rank need .* bytes",
        make_engine,
        world,
        stage,
        zero={"placement": {"auto": True, "host_gb": 0}},
    )
    refused(
        ValueError, "both say where", make_engine, world, stage, {"device": "cpu"}, zero={"placement": {"auto": True}}
    )
    assert identical(found[0], found[1]) and identical(found[0], found[2])


# ---- what is told -------------------------------------------------------------------------------------------------
@on_ranks(2)
def test_report_and_plan(rank, world, folder):
    engine = make_engine(world, 2, on(folder, "nvme"))
    engine.monitor = mock.Mock(enabled=True)
    train_engine(engine, 1, rank, world)
    engine.offload_report(reset=True)
    train_engine(engine, 2, rank, world)
    found = engine.offload_report()
    plan = deepspeed.offload_plan(engine.module, engine.config, world_size=world)
    file = found["tiers"]["file"]
    assert found["steps"] == 2 and found["seconds"] > 0
    assert file["resting_bytes"] > 0 and file["read_bytes"] > 0 and file["written_bytes"] > 0
    assert 0 <= file["waited_ms"] <= found["seconds"] * 1e3
    assert found["tiers"]["host"]["resting_bytes"] == 0, "what rests in files is nowhere else"
    # Masters, gradients and two states, padded to 64 elements for each parameter.
    planned = plan["tiers"]["file"]["peak_bytes"]
    assert planned <= file["resting_bytes"] <= planned + 16 * 64 * len(list(engine.module.parameters()))
    assert plan["tiers"]["file"]["fits"] and plan["tiers"]["host"]["fits"]
    events = [event for call in engine.monitor.write_events.call_args_list for event in call.args[0]]
    waits = [value for name, value, _ in events if name == "Train/Offload/waited_ms_file"]
    assert len(waits) == (3 if rank == 0 else 0) and all(value >= 0 for value in waits)
    plain = after_steps(make_engine(world, 2), 1, rank, world)
    tiers = plain.offload_report()["tiers"]
    assert tiers["file"]["resting_bytes"] == tiers["host"]["resting_bytes"] == 0
    assert tiers["device"]["resting_bytes"] > 0


@on_ranks(1)
def test_the_plan_is_what_a_run_needs(rank, world, folder):
    """The plan of the host and of files, and what a run has needed."""
    for stage, offload, more in (
        (2, {"device": "cpu"}, {"bf16": {"enabled": True}}),
        (2, {"device": "nvme", "nvme_path": folder}, {"bf16": {"enabled": True}}),
        (1, {"device": "nvme", "nvme_path": folder}, {}),
    ):
        zero = {"stage": stage, "offload_optimizer": offload}
        made = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero, **more}
        model = torch.nn.Sequential(*[torch.nn.Linear(640, 640) for _ in range(8)])
        plan = deepspeed.offload_plan(model, made, world_size=world)
        assert plan["step_seconds"] > 0 and plan["tiers"]["host"]["fits"]
        engine = engine_of(model, made)
        for _ in range(2):
            x = torch.ones(1, 640, dtype=next(model.parameters()).dtype)
            take_step(engine, engine(x).float().square().mean())
        tiers = engine.offload_report()["tiers"]
        for tier in ("host", "file"):
            planned, seen = plan["tiers"][tier]["peak_bytes"], tiers[tier]["peak_bytes"]
            assert planned * 0.9 <= seen <= planned * 1.1, (stage, offload["device"], tier, planned, seen)
        moved = [tiers[tier]["share_of_rate"] for tier in tiers if tiers[tier]["resting_bytes"] and tier != "device"]
        assert moved and all(share > 0 for share in moved)
        engine.destroy()


def test_a_published_constructor_takes_the_section():
    results = []
    for section in (None, {"device": "cpu"}, DeepSpeedZeroConfig(stage=2, cpu_offload=True).offload_optimizer):
        model = seeded(torch.nn.Linear, 4, 4)
        names = {param: name for name, param in model.named_parameters()}
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer = DeepSpeedZeroOptimizer(inner, names, None, {}, offload_optimizer_config=section)
        for _ in range(3):
            take_step(optimizer, model(torch.ones(2, 4)).square().sum())
        results.append(model.weight.detach().clone())
        assert (optimizer.core.storage.usage()["host"] > 0) == (section is not None)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
