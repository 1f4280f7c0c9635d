"""Checkpoints that another implementation wrote load at any number of ranks, at any stage and in any precision."""

import os

import numpy
import pytest
import torch

import deepspeed
import peer_model
from deepspeed import _compat
from harness import run_ranks

GROUPS = [
    {"a.weight": (13, 7), "b.weight": (13, 13), "o.weight": (3, 13)},
    {"a.bias": (13,), "f.bias": (13,), "n.weight": (13,), "n.bias": (13,), "o.bias": (3,)},
]
KINDS = ("fp32", "exp_avg", "exp_avg_sq")


def flats(stage, dtype, group):
    """kind -> the parameters of a group end to end, put together from the files by hand. Not for stage 3."""
    folder = os.path.join(peer_model.folder(stage, dtype), "global_step4")
    model = _compat.load(os.path.join(folder, "mp_rank_00_model_states.pt"))
    if stage == 0 and dtype == "fp32":
        states = [model["optimizer"]["state"][i] for i in model["optimizer"]["param_groups"][group]["params"]]
        found = {kind: torch.cat([state[kind].reshape(-1) for state in states]) for kind in KINDS[1:]}
        return {"fp32": torch.cat([model["module"][name].reshape(-1) for name in GROUPS[group]]), **found}
    if stage == 0:
        wrapped = model["optimizer"]
        return {"fp32": wrapped["fp32_groups_flat"][group], **wrapped["optimizer_state_dict"]["state"][group]}
    prefix = "bf16_" if dtype == "bf16" else ""
    shards = [
        _compat.load(os.path.join(folder, f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
        for rank in range(2)
    ]
    shards = [shard["optimizer_state_dict"] for shard in shards]
    inner = [shard["base_optimizer_state"]["state"][group] for shard in shards]
    found = {kind: torch.cat([state[kind] for state in inner]) for kind in KINDS[1:]}
    return {"fp32": torch.cat([shard["single_partition_of_fp32_groups"][group] for shard in shards]), **found}


def expectation(stage, dtype):
    """(kind, name) -> whole tensor: "lp", and KINDS for what is trained."""
    found = {
        tuple(key.split(".", 1)): torch.from_numpy(value)
        for key, value in numpy.load(f"{peer_model.folder(stage, dtype)}/expected.npz").items()
    }
    for group, shapes in enumerate(GROUPS if stage < 3 else ()):
        flat, offset = flats(stage, dtype, group), 0
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            for kind in KINDS:
                value = flat[kind][offset : offset + numel].reshape(shape)
                assert torch.equal(found.setdefault((kind, name), value), value)
            offset += numel
    return found


def check(engine, stage, dtype, expected, where):
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            value = param.detach().float().clone()
        wanted = expected[("fp32" if param.requires_grad else "lp", name)]
        assert torch.equal(value, wanted.to(param.dtype).float()), (where, name)
        if param.requires_grad:
            assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(param), wanted), (where, name)
            for kind in KINDS[1:]:
                state = deepspeed.utils.safe_get_full_optimizer_state(param, kind)
                assert torch.equal(state, expected[(kind, name)]), (where, name, kind)
    # Without ZeRO and in bf16 theirs count the step that makes the states, too.
    assert engine.stepping.core.steps().tolist() == [5 if (stage, dtype) == (0, "bf16") else 4] * 8, where
    assert torch.equal(engine.module.count, torch.arange(3.0))


def body_load(rank, world, kinds, targets):
    """Every checkpoint into every target: (stage, precision), with the losses of the next step."""
    found = {}
    for stage, dtype in kinds:
        seen, expected = peer_model.what(stage, dtype), expectation(stage, dtype)
        for to_stage, to_dtype in targets:
            where = (stage, dtype, to_stage, to_dtype, world)
            made = {**seen["config"], "zero_optimization": {"stage": to_stage}, "bf16": {"enabled": to_dtype == "bf16"}}
            engine = peer_model.make_engine(made, seed=5)
            path, client_state = engine.load_checkpoint(peer_model.folder(stage, dtype))
            assert os.path.exists(path), where
            assert client_state["epoch"] == 2 and client_state["note"] == "kept"
            assert engine.get_lr() == seen["lr"] and engine.lr_scheduler.last_batch_iteration == 3, where
            assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (4, 16, 0)
            assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
            check(engine, stage, dtype, expected, where)
            found[where] = float(peer_model.loss(engine, 4, rank).detach())
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_they_load_at_any_number_of_ranks_and_stage(world):
    targets = [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")]
    found = run_ranks(world, body_load, peer_model.KINDS, targets)[0]
    assert len(found) == len(peer_model.KINDS) * len(targets)
    for (stage, dtype, _, to_dtype, _), value in found.items():
        wanted = peer_model.what(stage, dtype)["next_loss_rank0"]
        tolerance = 1e-6 if dtype == to_dtype == "fp32" else 2e-2  # bf16 has eight bits
        assert abs(value - wanted) <= tolerance * abs(wanted), (stage, dtype, to_dtype, value, wanted)


def body_go_on(rank, world, stage, dtype):
    seen = peer_model.what(stage, dtype)
    engine = peer_model.make_engine(seen["config"], seed=5)
    engine.load_checkpoint(peer_model.folder(stage, dtype))
    return peer_model.train(engine, 3, rank, first=4)


def test_training_goes_on():
    for stage, dtype in [(0, "fp32"), (2, "fp32"), (3, "fp32")]:
        first = run_ranks(2, body_go_on, stage, dtype)
        assert first[0][0] == pytest.approx(peer_model.what(stage, dtype)["next_loss_rank0"], rel=1e-6)
        # The stages train alike, whichever files they came from.
        assert first[0] == pytest.approx(run_ranks(2, body_go_on, 1, "fp32")[0], rel=1e-5)
