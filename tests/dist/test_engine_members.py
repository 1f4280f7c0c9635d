"""The engine's attributes and methods that callers use, and the ways to hand it a config and data."""

import argparse
import base64
import inspect
import json
import logging
import pathlib
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.monitor.monitor import Monitor, MonitorMaster
from engine_models import batch, config, loss_of, loss_on, make_net, train_engine
from harness import on_ranks
from logs import logged
from models import Parts
from mpu import two_by_two
from refusals import refused
from runs import engine_of, take_step, together


def test_signatures():
    from deepspeed.engine.engine import DeepSpeedEngine

    def parameters(function):
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values() if p.name != "self"]

    none = [
        (name, None) for name in ("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler")
    ]
    tail = [
        (name, None) for name in ("mpu", "dist_init_required", "collate_fn", "config", "mesh_param", "config_params")
    ]
    assert parameters(deepspeed.initialize) == none + [("distributed_port", 29500)] + tail
    flags = [("retain_graph", False), ("scale_wrt_gas", True), ("gradient", None)]
    assert parameters(DeepSpeedEngine.backward)[1:] == flags
    assert parameters(DeepSpeedEngine.step) == [("lr_kwargs", None)]
    assert [name for name, _ in parameters(DeepSpeedEngine.save_checkpoint)] == [
        "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters",
    ]  # fmt: skip
    assert [name for name, _ in parameters(DeepSpeedEngine.load_checkpoint)] == [
        "load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states",
        "load_module_only", "custom_load_fn",
    ]  # fmt: skip
    from deepspeed.runtime.engine import DeepSpeedEngine as old_path

    assert old_path is deepspeed.DeepSpeedEngine is DeepSpeedEngine
    assert issubclass(DeepSpeedEngine, torch.nn.Module)


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_members(rank, world):
    made = config(world, 2, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, steps_per_print=3)
    model = make_net()
    model.marker = "mine"
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config=made)
    from deepspeed.ops.adam import FusedAdam

    assert isinstance(optimizer, FusedAdam) and optimizer is engine.optimizer is engine.basic_optimizer
    assert loader is None and scheduler is engine.lr_scheduler
    assert engine.module is model and engine.marker == "mine"
    assert engine.config is made and engine.config.get("train_batch_size") == 8
    assert engine.device == torch.device("cpu") and engine.local_rank == rank == engine.global_rank
    assert (engine.world_size, engine.dp_world_size, engine.mp_world_size) == (world, world, 1)
    assert engine.get_batch_info() == (8, 8 // world // 2, 2)
    assert engine.train_batch_size() == 8 and engine.gradient_accumulation_steps() == 2
    assert (
        engine.gradient_clipping() == 0.5 and engine.steps_per_print() == 3 and engine.wall_clock_breakdown() is False
    )
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled()
    assert engine.zero_optimization_stage() == 0 and not engine.zero_optimization()
    assert engine.optimizer_name() == "adamw" and engine.scheduler_name() == "WarmupLR"
    assert engine.get_global_grad_norm() is None and not engine.was_step_applied()
    assert engine.training and not engine.eval().training and not model.training
    assert engine.train() is engine and model.training
    tokens, targets = batch(0)
    with torch.no_grad():
        engine(tokens)
    counts = []
    for micro in range(4):
        assert engine.is_gradient_accumulation_boundary() == (micro % 2 == 1)
        raw = loss_of(engine(tokens[:2]), targets[:2])
        assert float(engine.backward(raw)) == pytest.approx(float(raw) / 2)
        engine.step()
        assert engine.was_step_applied() == (micro % 2 == 1)
        counts.append((engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps))
    assert counts == [(1, 0, 0, 0), (2, 1, 8, 0), (3, 1, 8, 0), (4, 2, 16, 0)]
    assert engine.get_global_grad_norm() > 0 and engine.get_lr() == [optimizer.param_groups[0]["lr"]]
    assert engine.get_mom() == [(0.9, 0.95)] or engine.get_mom() == [[0.9, 0.95]]
    assert all(p.grad is None for p in model.parameters())
    engine.set_train_batch_size(16)
    assert engine.gradient_accumulation_steps() == 4 and engine.train_batch_size() == 16
    engine.set_train_micro_batch_size(1)
    assert engine.train_batch_size() == 4 * world
    read_by_core = engine._config.native.values()
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [read_by_core[key] for key in sizes] == [4 * world, 1, 4]
    engine.backward(loss_of(engine(tokens[:2]), targets[:2]))
    assert model.out.weight.grad is not None
    engine.zero_grad()
    assert model.out.weight.grad is None
    gathered = engine.all_gather_scalar(torch.tensor([float(rank)]), engine.data_parallel_group)
    assert [float(t) for t in gathered] == list(range(world))
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine.destroy()
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    loss_of(model(tokens), targets).backward()
    assert model.out.weight.grad is not None
    engine.destroy()  # does nothing
    calls = (lambda: engine.backward(loss_of(engine(tokens), targets)), engine.step,
             lambda: engine.save_checkpoint("never"), lambda: engine.load_checkpoint("never"))  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match=r"engine\.destroy\(\) has ended this engine"):
            call()


class Recorder(Monitor):
    def __init__(self):
        self.enabled, self.events = True, []

    def write_events(self, event_list):
        self.events += event_list


@pytest.mark.parametrize("world, stage", [(1, 0), (2, 3)])
@on_ranks()
def test_more_members(rank, world, stage):
    made = config(world, 2, zero_optimization={"stage": stage})
    model = make_net()
    engine = engine_of(model, made)
    assert isinstance(engine.monitor, MonitorMaster) and engine.monitor.enabled is False
    engine.monitor.write_events([("nowhere", 1.0, 0)])
    engine.monitor = recorder = Recorder()
    assert engine.has_moe_layers is False and engine.inside_no_sync_ctxt is False
    assert engine.enable_backward_allreduce is True and engine.losses is None and engine.gas_boundary_ctr == 0
    assert {name: param for param, name in engine.param_names.items()}.keys() == dict(model.named_parameters()).keys()
    assert engine.param_names[model.out.bias] == "out.bias"
    tokens, targets = batch(0)
    losses = []
    for micro in range(4):
        raw = loss_of(engine(tokens[micro : micro + 2]), targets[micro : micro + 2])
        losses.append(float(raw))
        engine.backward(raw)
        assert float(engine.losses) == pytest.approx(sum(losses[micro // 2 * 2 :]) / 2)
        assert not engine.losses.requires_grad
        engine.step()
        assert (engine.losses is None) == (micro % 2 == 1) and engine.gas_boundary_ctr == (micro + 1) // 2
    with engine.no_sync():
        assert engine.inside_no_sync_ctxt is True
    assert engine.inside_no_sync_ctxt is False
    rate, norm = engine.get_lr()[0], engine.get_global_grad_norm()
    wanted = []
    for step in range(2):
        wanted.append(("Train/Samples/train_loss", pytest.approx(sum(losses[2 * step : 2 * step + 2]) / 2)))
        wanted.append(("Train/Samples/lr", rate))
        wanted.append(("Train/Samples/grad_norm", pytest.approx(float(norm)) if step else mock.ANY))
    wanted = [(*event, 8 * (number // 3 + 1)) for number, event in enumerate(wanted)]
    assert recorder.events == (wanted if rank == 0 else [])


@on_ranks(2)
def test_backward_without_its_reduction(rank, world):
    engine = engine_of(make_net(), config(world))
    found = []
    for by_hand in (False, True):
        engine.enable_backward_allreduce = not by_hand
        engine.backward(loss_on(engine, 0, rank=rank, world=world))
        local = engine.module.out.bias.grad.clone()
        engine.allreduce_gradients()
        found.append((local, engine.module.out.bias.grad.clone()))
        engine.zero_grad()
    (early, reduced), (local, late) = found
    assert torch.equal(early, reduced) and torch.allclose(late, reduced) and not torch.allclose(local, late)
    first, second = together(reduced.tolist())
    assert first == second


@on_ranks(2)
def test_local_rank_and_device_rank_of_the_arguments(rank, world):
    args = argparse.Namespace(local_rank=-1)
    deepspeed.initialize(args=args, model=make_net(), config=config(world))
    assert args.local_rank == rank
    selected = []
    with mock.patch.object(deepspeed.get_accelerator(), "set_device", selected.append):
        args = argparse.Namespace(device_rank=rank + 3)
        engine = engine_of(make_net(), config(world), args=args)
    assert selected[-1] == rank + 3 and engine.local_rank == rank and not hasattr(args, "local_rank")
    for wrong, words in ((rank + 1, f"but the environment has LOCAL_RANK={rank}"), ("0", "must be a number")):
        refused(
            AssertionError,
            words,
            deepspeed.initialize,
            args=argparse.Namespace(local_rank=wrong),
            model=make_net(),
            config=config(world),
        )


@on_ranks(1)
def test_log_level_sets_the_level_of_the_logger(rank, world):
    levels, before = [], deepspeed.logger.level
    try:
        for more in ({}, {"log_level": "error"}, {}, {"log_level": "DEBUG"}):
            deepspeed.initialize(model=make_net(), config=config(world, **more))
            levels.append(deepspeed.logger.level)
    finally:
        deepspeed.logger.setLevel(before)
    assert levels == [logging.INFO, logging.ERROR, logging.ERROR, logging.DEBUG]


@on_ranks(1)
def test_config_forms_train_alike(rank, world, folder):
    made = config(world)
    path = f"{folder}/ds.json"
    pathlib.Path(path).write_text(
        "// users have comments\n" + json.dumps(made).replace('"gradient_clipping"', '\n"gradient_clipping"')
    )
    forms = [
        {"config": made},
        {"config": path},
        {"config": base64.urlsafe_b64encode(json.dumps(made).encode()).decode()},
        {"config_params": made},
        {"args": argparse.Namespace(deepspeed_config=path, local_rank=rank)},
    ]
    results = []
    for form in forms:
        model = make_net()
        engine = deepspeed.initialize(model=model, model_parameters=(p for p in model.parameters()), **form)[0]
        results.append(train_engine(engine, 3, rank, world)[0])
    assert len(results) == 5 and all(r == results[0] for r in results)


@on_ranks(2)
def test_training_data_is_cut_into_parts(rank, world):
    numbers = [torch.tensor([float(number)]) for number in range(13)]
    _, _, loader, _ = deepspeed.initialize(model=make_net(), training_data=numbers, config=config(world))
    (first, batches), (second, _) = together([int(v) for part in loader for v in part], len(loader))
    assert batches == 2
    assert set(first) | set(second) == set(range(13))
    assert len(set(first) & set(second)) <= 1  # 13 samples do not divide by 2: one is repeated


def test_add_config_arguments():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert args.deepspeed and args.deepspeed_config == "x.json"
    assert parser.parse_args([]).deepspeed is False


@on_ranks(1)
def test_optimizer_state_round_trip(rank, world):
    """``optimizer.state_dict`` and ``load_state_dict`` of the returned optimizer reach the engine's buffers."""
    models = [make_net(), make_net()]
    engines = [engine_of(m, config(1)) for m in models]
    train_engine(engines[0], 3, 0, 1)
    models[1].load_state_dict(models[0].state_dict())
    engines[1].optimizer.load_state_dict(engines[0].optimizer.state_dict())
    for engine in engines:
        train_engine(engine, 3, 0, 1, start=3)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))


@on_ranks(1)
def test_log_names_the_version_and_the_settings(rank, world):
    with logged() as lines:
        deepspeed.initialize(model=make_net(), config=config(1))
    assert any("DeepSpeed info" in line for line in lines)
    assert any("gradient_clipping = 0.5" in line for line in lines)


@on_ranks(4, init=True)
def test_mpu_groups_are_used(rank, world):
    """One weight is split over the model-parallel ranks, one is a replica: the norm counts each element once."""
    mpu = two_by_two(rank)

    def part_of_model():
        net = Parts(
            lambda net, x: (net.split.sum() * x + net.replica.sum() * 2 * x).sum(),
            split=torch.nn.Parameter(torch.ones(4)),
            replica=torch.nn.Parameter(torch.ones(3)),
        )
        net.split.model_parallel = True
        return net

    made = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
    }
    engine = engine_of(part_of_model(), made, mpu=mpu)
    assert engine.train_batch_size() == 2 and engine.dp_world_size == 2 and engine.mp_world_size == 2
    x = torch.tensor([1.0 if mpu.get_data_parallel_rank() == 0 else 3.0])
    take_step(engine, engine(x))
    # gradients: mean over data parallel is 2 for split, 4 for replica
    assert engine.get_global_grad_norm() == pytest.approx((8 * 2.0**2 + 3 * 4.0**2) ** 0.5)
    assert engine.module.split.tolist() == pytest.approx([0.8] * 4)
