"""A checkpoint saved at any number of ranks, stage and precision loads at any other: bitwise the same state."""

import functools
import os
from unittest import mock

import pytest
import torch

from claims import batches_of, draw_from
from deepspeed.data.loader import WORKERS
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from engine_models import after_embedding, loss_of, make_net
from harness import run_ranks
from models import beside
from programs import TOKENS
from runs import SMALL_PARTS, engine_of, sgd, take_step, weights
from runs import identical as same
from sampling import every_case, sample
from test_checkpoint import PRECISIONS, run

PRECISION = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16" if "fp16" in PRECISIONS else "bf16"}
SIZE = 24  # samples in a step: 1, 2, 3, 4 and 8 ranks divide it


def forward_odd(net, tokens, extra=False):
    hidden = net.embed(beside(net.embed.weight, tokens))
    net.embed.weight.sum()
    hidden = hidden + hidden @ net.turned.t() @ net.turned * 0.1
    return after_embedding(net, hidden, extra) + net.left_out.detach() * 0 + net.nothing.sum()


def odd_net(seed):
    """With a parameter of no elements, one that does not lie row by row, and one that nobody trains or freezes."""
    net = make_net(seed=seed)
    net.run = forward_odd
    net.nothing = torch.nn.Parameter(torch.zeros(0))
    net.turned = torch.nn.Parameter(torch.randn(12, 6).t())
    net.left_out = torch.nn.Parameter(torch.randn(5))
    return net


def make_engine(world, stage, precision, seed=0, optimizer=None, training_data=None, accumulate=1, **zero):
    net = odd_net(seed)
    trained = [p for n, p in net.named_parameters() if p.requires_grad and n != "left_out"]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]
    made = {
        "train_batch_size": SIZE,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.5,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 3e-3}},
        "zero_optimization": {"stage": stage, **SMALL_PARTS, **zero},
        **PRECISIONS[PRECISION[precision]],
    }
    if callable(optimizer):
        return engine_of(net, made, optimizer(groups), training_data=training_data)
    made["optimizer"] = {"type": optimizer or "AdamW", "params": {"lr": 3e-3}}
    return engine_of(net, made, model_parameters=groups, training_data=training_data)


def step(engine, number, rank, world, train=True):
    """One step on this rank's part of the samples of step ``number``; the mean loss of all ranks."""
    generator = torch.Generator().manual_seed(77 + number)
    tokens = torch.randint(0, 17, (SIZE, 6), generator=generator)
    targets = torch.randint(0, 5, (SIZE, 6), generator=generator)
    part = slice(rank * SIZE // world, (rank + 1) * SIZE // world)
    loss = loss_of(engine(tokens[part], extra=number % 3 != 1), targets[part])
    if train:
        take_step(engine, loss)
    mean = loss.detach().cpu().double() / world
    if world > 1:
        torch.distributed.all_reduce(mean)
    return float(mean)


def whole(engine):
    """Everything that must be the same: whole tensors by parameter, steps, hyperparameters, scale, counters."""
    found = {(name, "lp"): value.contiguous() for name, value in weights(engine).items()}
    for name, param in engine.module.named_parameters():
        if not hasattr(param, "_ds_link"):
            continue
        found[name, "fp32"] = safe_get_full_fp32_param(param).contiguous()
        for kind in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "max_exp_avg_sq"):
            value = safe_get_full_optimizer_state(param, kind)
            if value is not None and value.numel():
                found[name, kind] = value.contiguous()
    if engine.stepping.fused:
        found["steps"] = engine.core.steps().clone()
    found["groups"] = [
        {k: v for k, v in group.items() if k in ("lr", "betas", "weight_decay")}
        for group in engine.optimizer.param_groups
    ]
    found["schedule"] = engine.lr_scheduler.state_dict()
    found["counters"] = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    found["buffer"] = engine.module.count.clone()
    scaler = engine.stepping.scaler
    if scaler is not None and scaler.dynamic:
        found["scale"] = (scaler.cur_scale, scaler.cur_iter)
    return found


def body_save(rank, world, folder, kinds):
    found = {}
    for stage, precision in kinds:
        engine = make_engine(world, stage, precision)
        for number in range(4):
            step(engine, number, rank, world)
        engine.save_checkpoint(os.path.join(folder, f"{stage}{precision}"), client_state={"epoch": 3})
        state = whole(engine)
        found[stage, precision] = (state, step(engine, 4, rank, world), step(engine, 5, rank, world, train=False))
    return found if rank == 0 else None


def body_load(rank, world, folder, pairs):
    found = []
    for (stage, precision), (to_stage, to_precision) in pairs:
        engine = make_engine(world, to_stage, to_precision, seed=9, reduce_bucket_size=500, sub_group_size=10**9)
        path, client_state = engine.load_checkpoint(os.path.join(folder, f"{stage}{precision}"))
        assert os.path.exists(path) and client_state["epoch"] == 3
        found.append((whole(engine), step(engine, 4, rank, world), step(engine, 5, rank, world, train=False)))
    return found if rank == 0 else None


def differences(saved, found, widths):
    """Names of what is not bitwise the same; weights are compared in the precision that has the fewer bits."""
    wrong = [key for key in saved.keys() - found.keys() if key != "scale"]
    for key, value in found.items():
        if key not in saved:  # a parameter without a gradient so far may have no state, or zeros
            wrong += [key] if key != "scale" and value.count_nonzero() else []
        elif key[-1] == "lp":
            wanted = saved.get((key[0], "fp32"), saved[key])
            wrong += [] if torch.equal(value, wanted.to(value.dtype)) else [key]
        elif key == "scale":
            wrong += [key] if widths == ("fp16", "fp16") and value != saved[key] else []
        elif not same(saved[key], value):
            wrong.append(key)
    return wrong


SAVED = [(0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "fp16"), (2, "bf16"), (2, "fp32"), (3, "fp32"), (3, "fp16")]
LOADED = [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32"), (0, "fp16"), (1, "fp32"), (2, "fp32"), (3, "bf16")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run_ranks(4, body_save, folder, SAVED)[0]


@pytest.mark.any_device("list")
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_four_ranks_to_any_number_and_any_stage_to_any(world, saved):
    folder, states = saved
    pairs = [(a, b) for a in SAVED for b in LOADED if a[0] < 0 or (a[1] == b[1] or b[0] != a[0])]
    if world == 8:
        pairs = [(a, b) for place, a in enumerate(SAVED) for b in LOADED[place % 4 :: 4]][::2]
    elif world > 1:
        pairs = pairs[world % 2 :: 2]
    if not every_case():
        pairs = [pairs[index] for index in sample(pairs, "values", 8 if world < 8 else 0, seed=world)]
    for (source, target), (state, next_loss, later_loss) in zip(pairs, run_ranks(world, body_load, folder, pairs)[0]):
        expected, wanted_next, wanted_later = states[source]
        assert not differences(expected, state, (source[1], target[1])), (source, target, world)
        tolerance = 1e-6 if source[1] == target[1] == "fp32" else 3e-2
        assert next_loss == pytest.approx(wanted_next, rel=tolerance), (source, target, world)
        assert later_loss == pytest.approx(wanted_later, rel=10 * tolerance), (source, target, world)


# ---- optimizers ----------------------------------------------------------------------------------------------------
OPTIMIZERS = {
    "SGD of torch": sgd,
    "AdamW of torch": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "Lion": "Lion",
    "Adagrad": "Adagrad",
    "Lamb": "Lamb",
    "Muon": "Muon",
}


def body_optimizers(rank, world, folder, stages, load, precision):
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        engine = make_engine(world, stages[name], precision, seed=9 if load else 0, optimizer=optimizer)
        if load:
            engine.load_checkpoint(os.path.join(folder, name))
        else:
            for number in range(3):
                step(engine, number, rank, world)
            engine.save_checkpoint(os.path.join(folder, name))
        found[name] = (whole(engine), step(engine, 3, rank, world), step(engine, 4, rank, world, train=False))
    return found if rank == 0 else None


@pytest.mark.any_device("list")
@pytest.mark.parametrize("world, turn", [(1, 1), (3, 2), (2, 3), (2, 0)])
def test_every_optimizer(world, turn, tmp_path):
    stages = {name: place % 4 for place, name in enumerate(OPTIMIZERS, world)}
    others = {name: (stage + turn) % 4 for name, stage in stages.items()}
    saved = run_ranks(2, body_optimizers, str(tmp_path), stages, False, "fp32")[0]
    found = run_ranks(world, body_optimizers, str(tmp_path), others, True, "fp32")[0]
    for name in OPTIMIZERS:
        assert not differences(saved[name][0], found[name][0], ()), (name, stages[name], others[name])
        assert found[name][1:] == pytest.approx(saved[name][1:], rel=1e-5), name


# ---- the same topology ---------------------------------------------------------------------------------------------
def body_straight(rank, world, folder, kinds, steps, resumed):
    found = []
    for stage, precision in kinds:
        workers = WORKERS if stage == 0 else 0  # an epoch has two batches: to fork them is most of the time
        with mock.patch("deepspeed.data.loader.WORKERS", workers):
            engine = make_engine(world, stage, precision, seed=5 if resumed else 0, training_data=TOKENS, accumulate=2)
        assert engine.training_dataloader.num_local_io_workers == workers
        where = os.path.join(folder, f"{stage}{precision}")
        draw_from(99 if resumed else 7 + rank)
        if resumed:
            engine.load_checkpoint(where)
        batches = batches_of(engine)
        if not resumed:
            run(engine, batches, steps)
            engine.save_checkpoint(where)
        found.append((run(engine, batches, steps)[0], whole(engine)))
    return found


@pytest.mark.any_device("list")
def test_ten_steps_are_five_and_new_processes_and_five(tmp_path):
    kinds = [(stage, precision) for stage in range(4) for precision in sorted(PRECISIONS)]
    if not every_case():
        kinds = [kinds[index] for index in sample(kinds, "values")]
    straight = run_ranks(2, body_straight, str(tmp_path), kinds, 5, False)
    resumed = run_ranks(2, body_straight, str(tmp_path), kinds, 5, True, fresh=True)
    for rank in range(2):
        for kind, (losses, state), (losses_again, state_again) in zip(kinds, straight[rank], resumed[rank]):
            assert losses == losses_again, kind
            assert not [key for key in state if not same(state[key], state_again[key])], (kind, rank)
