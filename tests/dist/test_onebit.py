"""Optimizers whose ranks exchange signs, by type and as classes, in engines of several processes."""

from types import SimpleNamespace

import pytest
import torch

from deepspeed.checkpoint.ds_to_universal import main as convert
from deepspeed.runtime.fp16.onebit.adam import OnebitAdam
from deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam
from harness import on_ranks, run_ranks
from logs import logged
from models import seeded
from onebit_models import KINDS, make, section, start, train
from refusals import refused
from runs import engine_of, identical, load_into, moments, settings, together, weights, with_fp16

KIND = pytest.mark.parametrize("kind", sorted(KINDS))
ERRORS = ("worker_error", "server_error")


def alike(engine):
    """Whether all ranks have the same weights."""
    found = together(weights(engine))
    return all(identical(found[0], one) for one in found)


@on_ranks(2)
def test_one_bit_adam_is_adam_and_then_sends_a_sixteenth(rank, world):
    """The first result of the issue."""
    net = seeded(torch.nn.Linear, 256, 256)
    params = {"freeze_step": 10, "comm_backend_name": "nccl", "lr": 1e-3}
    one_bit = {"type": "OneBitAdam", "params": params}
    engine = engine_of(net, settings(0, rows=4, dtype="bf16", optimizer=one_bit, gradient_clipping=1.0))
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "bias_correction": False}}
    other = engine_of(
        seeded(torch.nn.Linear, 256, 256), settings(0, rows=4, dtype="bf16", optimizer=adam, gradient_clipping=1.0)
    )

    def step(one, number):
        drawn = torch.Generator().manual_seed(10 * number + rank)
        one.core.reset_traffic()
        one.backward(one(torch.randn(4, 256, generator=drawn).bfloat16()).float().square().mean())
        one.step()
        return one.core.traffic()["bytes"]

    for number in range(10):
        assert engine.enable_backward_allreduce is True and engine.basic_optimizer.adam_freeze_key is False
        full = step(engine, number)
        step(other, number)
        assert identical(weights(engine), weights(other)), f"step {number} is not Adam's"
    assert engine.enable_backward_allreduce is False and engine.basic_optimizer.adam_freeze_key is True
    for number in range(10, 14):
        sent = step(engine, number)
        step(other, number)
        numel = 256 * 257
        flags = full - 2 * numel  # of an all-reduce of halves over two ranks
        assert sent - flags < 2 * numel / 16 * 1.01, (sent, full)
        assert alike(engine)
    assert not identical(weights(engine), weights(other))


@pytest.mark.sample("values")
@KIND
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@on_ranks(2)
def test_every_dtype_and_accumulation(rank, world, kind, dtype):
    with with_fp16():
        engine = start(kind, dtype, gradient_accumulation_steps=2, gradient_clipping=1.0)
    train(engine, rank, 3)
    variances = [values[2] for values in moments(engine).values()]
    losses = train(engine, rank, 7, first=3)  # of 0/1 Adam local steps 1, 3 and 7 are syncs
    assert all(loss == loss for loss in losses), losses
    assert all(torch.equal(a, b[2]) for a, b in zip(variances, moments(engine).values()))
    assert alike(engine)
    assert weights(engine)["unused"].float().tolist() == [1.0] * 3


@KIND
@on_ranks(3)
def test_states_have_the_published_keys(rank, world, kind):
    engine = start(kind)
    optimizer = engine.basic_optimizer
    assert not optimizer._frozen
    train(engine, rank, 5)
    state = optimizer.state[engine.module[0].weight]
    assert {"step", "exp_avg", "exp_avg_sq", *ERRORS} <= state.keys(), state.keys()
    assert state["worker_error"].shape == engine.module[0].weight.shape and state["server_error"].numel() == 64
    assert state["worker_error"].abs().max() > 0
    assert all(name not in kept for kept in optimizer.state_dict()["state"].values() for name in ERRORS)
    assert optimizer._frozen
    if kind == "OneBitLamb":
        assert optimizer.lamb_freeze_key is True
        ratios = optimizer.get_lamb_coeffs()
        assert len(ratios) == 8 and all(0 < ratio < 40 for ratio in ratios)


def make_classes(net):
    mask = torch.tensor([[1.0] * 6] * 3 + [[0.0] * 6])
    group = [{"params": [net.weight], "exp_avg_mask": mask}, {"params": [net.bias]}]
    return {
        OnebitAdam: lambda: OnebitAdam(group, deepspeed=None, lr=0.01, freeze_step=2),
        OnebitLamb: lambda: OnebitLamb(group, deepspeed=None, lr=0.01, freeze_step=2),
        ZeroOneAdam: lambda: ZeroOneAdam(group, deepspeed=None, lr=0.01, var_freeze_step=2),
    }


@pytest.mark.parametrize("cls", [OnebitAdam, OnebitLamb, ZeroOneAdam])
@on_ranks(2)
def test_classes_with_a_mask(rank, world, cls, tmp_path):
    """A masked row, whose gradients are zero, keeps a momentum of zero; a checkpoint has no mask."""
    net = seeded(torch.nn.Linear, 6, 4)
    engine = engine_of(net, settings(0, rows=2, optimizer=None), client=make_classes(net)[cls]())

    def step(number):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + rank))
        engine.backward(engine(x)[:, :3].square().mean())
        engine.step()

    for number in range(5):
        step(number)
    momentum = engine.basic_optimizer.state[net.weight]["exp_avg"]
    assert momentum[3].abs().max() == 0 and momentum[:3].abs().min() > 0
    engine.save_checkpoint(str(tmp_path))
    engine.basic_optimizer.param_groups[0]["exp_avg_mask"] = mask = torch.ones(4, 6)
    engine.load_checkpoint(str(tmp_path))
    assert engine.basic_optimizer.param_groups[0]["exp_avg_mask"] is mask
    step(5)
    assert engine.basic_optimizer.state[net.weight]["exp_avg"][3].abs().max() > 0
    engine.basic_optimizer.param_groups[0]["exp_avg_mask"] = torch.ones(4, 5)
    refused(ValueError, r'exp_avg_mask of parameter "weight" has the shape \[4, 5\]', step, 6)


def saved(rank, world, kind, dtype, folder, empty=True):
    with with_fp16():
        engine = start(kind, dtype, empty=empty)
    train(engine, rank, 8)
    engine.save_checkpoint(folder)
    apart, own = engine._compressed._exchanges.apart, weights(engine)
    train(engine, rank, 1, first=8)
    return {name: [one.tolist() for one in values] for name, values in moments(engine).items()}, apart, own


def loaded(rank, world, kind, dtype, folder, empty=True):
    with with_fp16():
        engine = start(kind, dtype, seed=5, empty=empty)
    load_into(engine, folder)
    found = {name: [one.tolist() for one in values] for name, values in moments(engine).items()}
    assert engine.basic_optimizer._frozen
    assert engine.enable_backward_allreduce is False and alike(engine)
    counters = engine.core.strategy_counters()
    train(engine, rank, 6, first=8)
    return found, counters


@pytest.mark.sample
@KIND
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_checkpoints_resume(tmp_path, kind, dtype, world):
    before = run_ranks(2, saved, kind, dtype, str(tmp_path))
    after = run_ranks(world, loaded, kind, dtype, str(tmp_path))
    assert all(one[0] == after[0][0] for one in after)
    if kind == "OneBitLamb":
        assert any(value != 1 for value in after[0][1]["scaling_coeff"])
    assert before[0][1] is (kind == "ZeroOneAdam"), "step 8 of 0/1 Adam lies between two syncs"


def loaded_universal(rank, world, kind, dtype, folder):
    engine = start(kind, dtype, seed=5, empty=False, checkpoint={"load_universal": True})
    load_into(engine, folder)
    found = {name: [one.tolist() for one in values] for name, values in moments(engine).items()}
    assert engine.basic_optimizer._frozen and alike(engine)
    if kind == "OneBitLamb":
        assert any(value != 1 for value in engine.core.strategy_counters()["scaling_coeff"])
    train(engine, rank, 3, first=8)
    return found


@pytest.mark.sample("values")
@KIND
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_universal_checkpoints_resume(tmp_path, kind, dtype):
    run_ranks(2, saved, kind, dtype, str(tmp_path), False)
    expected = run_ranks(2, loaded, kind, dtype, str(tmp_path), False)[0][0]
    tag = (tmp_path / "latest").read_text().strip()
    convert(
        SimpleNamespace(
            input_folder=str(tmp_path / tag), output_folder=str(tmp_path / f"{tag}_universal"), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
        )
    )  # fmt: skip
    assert run_ranks(3, loaded_universal, kind, dtype, str(tmp_path)) == [expected] * 3


def common(rank, world, folder):
    """Local steps 1 and 3 are syncs (steps 4 and 6); step 5 lies between them."""
    engine = start("ZeroOneAdam")
    train(engine, rank, 4)
    synced = weights(engine)
    train(engine, rank, 1, first=4)
    own = weights(engine)
    assert engine._compressed._exchanges.apart and not alike(engine)
    engine.save_checkpoint(folder)
    assert identical(weights(engine), own), "a save has changed the weights"
    other = start("ZeroOneAdam", seed=3)
    load_into(other, folder)
    assert identical(weights(other), synced)
    for state in other.basic_optimizer.state.values():
        assert not any(name in state for name in ERRORS)
    train(engine, rank, 1, first=5)
    assert alike(engine)


def test_a_save_between_syncs_has_the_common_weights(tmp_path):
    run_ranks(2, common, str(tmp_path))


@on_ranks(2)
def test_bad_input_is_refused_before_training(rank, world):
    for kind in KINDS:
        refused(ValueError, "ZeRO\\+\\+", engine_of, make(), settings(1, optimizer=section(kind)))
        unknown = section(kind, comm_backend_name="gloo")
        refused(Exception, "comm_backend_name", engine_of, make(), settings(0, optimizer=unknown))
        without = section(kind, comm_backend_name="mpi")
        with_no_mpi = pytest.MonkeyPatch()
        with_no_mpi.setitem(__import__("sys").modules, "mpi4py", None)
        refused(RuntimeError, "mpi4py, which is not installed", engine_of, make(), settings(0, optimizer=without))
        with_no_mpi.undo()
    net = torch.nn.Linear(3, 3)
    for cls in (OnebitAdam, OnebitLamb, ZeroOneAdam):
        refused(ValueError, "comm_backend_name", cls, net.parameters(), comm_backend_name="ucx")
        refused(RuntimeError, "AMSGrad", cls, net.parameters(), amsgrad=True)
        refused(ValueError, "gradient_clipping", cls, net.parameters(), max_grad_norm=1.0)
        frozen = {"var_freeze_step": 0} if cls is ZeroOneAdam else {"freeze_step": 0}
        refused(RuntimeError, "makes step 1 in an engine", cls(net.parameters(), **frozen).step)
    refused(ValueError, "eps", OnebitAdam, net.parameters(), eps_inside_sqrt=True)
    refused(ValueError, "local_step_clipper", ZeroOneAdam, net.parameters(), local_step_clipper=0)
    refused(ValueError, "factor_min", OnebitLamb, net.parameters(), factor_min=5.0)


@on_ranks(2)
def test_a_nan_on_one_rank_skips_the_step_on_all(rank, world):
    engine = start("OneBitAdam")
    train(engine, rank, 5)
    state = engine.basic_optimizer.state[engine.module[0].weight]
    before = [weights(engine), {name: value.clone() for name, value in state.items()}]
    loss = engine(torch.full((4, 12), float("nan") if rank else 1.0)).sum()
    engine.backward(loss)
    engine.step()
    assert engine.skipped_steps == 1 and not torch.isfinite(torch.tensor(engine.get_global_grad_norm()))
    assert identical(before, [weights(engine), dict(state)])
    train(engine, rank, 2, first=6)
    assert alike(engine) and all(torch.isfinite(one).all() for one in weights(engine).values())




@on_ranks(2)
def test_a_freeze_that_decides_itself(rank, world, tmp_path):
    """With beta2 = 0.8 the norm of the variance is compared with that of 5 updates before."""
    engine = start("OneBitAdam", params={"freeze_step": "auto", "betas": [0.9, 0.8], "lr": 1e-4})
    norms, steps = [], 0
    while not engine.basic_optimizer.adam_freeze_key and steps < 200:
        train(engine, rank, 1, first=steps % 3)
        steps += 1
        norms.append(sum(values[2].double().sum().item() for values in moments(engine).values()))
    steady = [n for n in range(6, len(norms) + 1) if abs(norms[n - 1] - norms[n - 6]) < 0.04 * norms[n - 1]]
    assert steady == [steps], (steady, steps)
    engine.save_checkpoint(str(tmp_path))
    other = start("OneBitAdam", seed=1, params={"freeze_step": "auto", "betas": [0.9, 0.8]})
    load_into(other, str(tmp_path))
    assert other.basic_optimizer.adam_freeze_key
    train(other, rank, 2)
    assert alike(other)


@on_ranks(2)
def test_one_warning_of_rows_without_variance(rank, world):
    net = seeded(torch.nn.Linear, 6, 4)
    engine = engine_of(net, settings(0, rows=2, optimizer=section("OneBitAdam")))
    with logged() as lines:
        for number in range(6):
            x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + rank))
            engine.backward(engine(x)[:, :3].square().mean())
            engine.step()
    found = [line for line in lines if "exp_avg_mask" in line]
    assert len(found) == 1 and "rows of weight is zero" in found[0], lines
