"""The values that load_checkpoint loads and those that it leaves, at every stage; values that do not fit are named."""

import os
from unittest import mock

import pytest
import torch

import deepspeed
import peer_model
from deepspeed import comm as dist
from deepspeed.checkpoint.layouts import saved_state, storage
from deepspeed.utils import safe_get_full_optimizer_state
from harness import on_ranks, run_ranks
from models import seeded
from refusals import refused
from runs import engine_of, load_into, settings, together, weights
from runs import identical as equal
from runs import moments as moments_of


def config(stage, dtype="bf16", **more):
    return {**peer_model.what(1, dtype)["config"], "zero_optimization": {"stage": stage, **more}}


def masters(engine):
    return {name: master for name, (master, *_) in moments_of(engine, ()).items()}


def trained(stage, rank, folder=None, steps=3, **kwargs):
    engine = peer_model.make_engine(config(stage))
    peer_model.train(engine, steps, rank)
    if folder is not None:
        engine.save_checkpoint(folder, **kwargs)
    return engine


def fresh(stage):
    return peer_model.make_engine(config(stage), seed=9)


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_what_is_loaded_and_what_is_left(rank, world, stage, folder):
    engine = trained(stage, rank, folder, client_state={"epoch": 7})
    lp, fp32 = weights(engine), masters(engine)
    assert engine._get_optimizer_ckpt_name(folder, "t", 3) == os.path.join(
        folder, "t", "expp_rank_3_mp_rank_00_optim_states.pt"
    )
    assert (engine._get_zero_param_shapes() is None) == (stage == 0)

    # Without optimizer states: weights and masters, nothing else of the optimizer; counters and schedule do come.
    other = fresh(stage)
    other._get_optimizer_ckpt_name = None
    _, client_state = other.load_checkpoint(folder, load_optimizer_states=False)
    assert equal(weights(other), lp)
    if stage > 0:
        assert equal(masters(other), fp32)
    assert other.core.steps().tolist() == [0] * 8 and other.global_steps == 3
    assert other.lr_scheduler.last_batch_iteration == 2
    assert client_state["epoch"] == 7 and "lr_scheduler" not in client_state and "optimizer" in client_state

    # Without the schedule: it is handed back.
    other = fresh(stage)
    _, client_state = other.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert other.lr_scheduler.last_batch_iteration == -1 or other.lr_scheduler.last_batch_iteration == 0
    assert client_state["lr_scheduler"] == {"last_batch_iteration": 2} and "optimizer" not in client_state
    assert other.core.steps().tolist() == [3] * 8 and equal(masters(other), fp32)

    # The module alone: masters are the weights.
    other = fresh(stage)
    _, client_state = other.load_checkpoint(folder, load_module_only=True)
    assert equal(weights(other), lp) and other.global_steps == 0
    assert equal(masters(other), {name: lp[name].float() for name in fp32})
    assert set(client_state) > {"optimizer", "lr_scheduler", "global_steps", "dp_world_size", "epoch"}
    assert "module" not in client_state

    # custom_load_fn gets whole parameters and the whole module.
    def keep_bias(src, dst):
        assert src["a.weight"].shape == dst.a.weight.shape == (13, 7)
        assert src["c.weight"].shape == (13, 13) and src["f.weight"].shape == (13, 13)
        with torch.no_grad():
            dst.a.weight.copy_(src["a.weight"] * 2)

    other = fresh(stage)
    before = weights(other)
    other.load_checkpoint(folder, load_module_only=True, custom_load_fn=keep_bias)
    now = weights(other)
    assert torch.equal(now["a.weight"].float(), lp["a.weight"].float() * 2)
    assert torch.equal(now["a.bias"], before["a.bias"])
    assert torch.equal(masters(other)["a.weight"], lp["a.weight"].float() * 2)

    # load_from_fp32_weights: false takes the weights, where there are any.
    other = load_into(peer_model.make_engine(config(stage, load_from_fp32_weights=False), seed=9), folder)
    wanted = fp32 if stage == 3 else {name: lp[name].float() for name in fp32}
    assert equal(masters(other), wanted) and other.core.steps().tolist() == [3] * 8


def make_other(stage, extra=False, width=13, groups=2, optimizer=None):
    net = seeded(peer_model.peer_net, seed=3)
    if width != 13:
        net.a = torch.nn.Linear(7, width)
    if extra:
        net.extra = torch.nn.Linear(3, 3)
    params = [p for p in net.parameters() if p.requires_grad]
    made = config(stage)
    if optimizer is not None:
        made["optimizer"] = optimizer
    parts = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() == 1]}]
    return engine_of(net, made, model_parameters=parts if groups == 2 else params)


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_frozen_weights_strictness_and_what_does_not_fit(rank, world, stage, folder):
    engine = trained(stage, rank, folder, tag="whole")
    engine.save_checkpoint(folder, tag="trained", exclude_frozen_parameters=True)
    lp = weights(engine)
    other = fresh(stage)
    before = weights(other)
    other.load_checkpoint(folder, tag="trained")
    now = weights(other)
    assert equal({k: v for k, v in now.items() if k != "f.weight"}, {k: v for k, v in lp.items() if k != "f.weight"})
    assert torch.equal(now["f.weight"], before["f.weight"])
    # Two engines in one folder: each has its tag.
    other.save_checkpoint(folder, tag="other")
    third = load_into(fresh(stage), folder, tag="whole")
    assert equal(weights(third), lp)
    third.load_checkpoint(folder)
    assert equal(weights(third), now)

    # Another model.
    larger = make_other(stage, extra=True)
    refused(
        RuntimeError,
        r"does not fit the model: missing \['extra.weight', 'extra.bias'\]",
        larger.load_checkpoint,
        folder,
        tag="whole",
    )
    larger.load_checkpoint(folder, tag="whole", load_module_strict=False, load_optimizer_states=False)
    found = weights(larger)
    assert equal({name: found[name] for name in lp}, lp)
    wider = make_other(stage, width=15)
    words = r"/whole does not fit the model: 'a.weight' was saved with shape \(13, 7\), the model has \(15, 7\).*Build"
    refused(RuntimeError, words, wider.load_checkpoint, folder, tag="whole")
    sgd = make_other(stage, optimizer={"type": "Adagrad", "params": {"lr": 0.1}})
    refused(
        ValueError,
        "has the states exp_avg, exp_avg_sq .* keeps .*another optimizer",
        sgd.load_checkpoint,
        folder,
        tag="whole",
    )
    one_group = make_other(stage, groups=1)
    refused(
        ValueError, "2 parameter groups, this run's optimizer has 1", one_group.load_checkpoint, folder, tag="whole"
    )


def exchanges():
    """Number of times that ranks have exchanged partitions, out of what is remembered of this rank's collectives."""
    return sum(flight["tag"] == "a partition of a checkpoint" for flight in dist.flight_record())


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2, init=True)
def test_shards_in_memory_and_how_many_collectives_make_them(rank, world, stage):
    engine = trained(stage, rank)
    fp32 = masters(engine)
    engine.core.reset_traffic()
    before = exchanges()
    mine = engine.optimizer.state_dict()
    # One exchange for each group and kind: two groups; masters and two moments. Stage 3 needs none. No other calls.
    assert exchanges() - before == engine.core.traffic()["calls"] == (6 if stage < 3 else 0)
    shards = together(mine)
    moments = {
        n: safe_get_full_optimizer_state(p, "exp_avg") for n, p in engine.module.named_parameters() if p.requires_grad
    }
    other = fresh(stage)
    other.optimizer.load_state_dict(shards, load_optimizer_states=True, load_from_fp32_weights=True)
    assert equal(masters(other), fp32) and other.core.steps().tolist() == [3] * 8
    for name, param in other.module.named_parameters():
        if param.requires_grad:
            assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), moments[name])
    if stage == 3:  # a rank's own slices are enough for it
        third = fresh(stage)
        third.optimizer.load_state_dict([mine], load_from_fp32_weights=True)
        assert equal(masters(third), fp32)
    broken = [{**shard} for shard in shards]
    key = "single_partition_of_fp32_groups" if stage < 3 else "fp32_flat_groups"
    for shard in broken:
        shard[key] = [flat[: flat.numel() // 2] for flat in shard[key]]
    refused(ValueError, "elements", other.optimizer.load_state_dict, broken, load_from_fp32_weights=True)


def body_elastic(rank, world, folder):
    engine = peer_model.make_engine(config(2, elastic_checkpoint=True))
    if world == 2:
        peer_model.train(engine, 3, rank)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return masters(engine), moments(engine), engine.core.steps().tolist(), engine.get_lr()


def moments(engine):
    return {name: second for name, (_, second) in moments_of(engine, ["exp_avg_sq"]).items()}


def test_the_elastic_form(tmp_path):
    fp32, states, steps, lr = run_ranks(2, body_elastic, str(tmp_path))[0]
    saved = torch.load(tmp_path / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", weights_only=False)
    saved = saved["optimizer_state_dict"]
    assert [state["exp_avg"].numel() for state in saved["base_optimizer_state"]] == [149, 27]
    assert saved["base_optimizer_state_step"] == 3
    for found in run_ranks(3, body_elastic, str(tmp_path)):
        assert equal(found[0], fp32) and equal(found[1], states) and found[2:] == (steps, lr)


def body_ranges(rank, world, folder):
    """Elements that were read, and those that this rank owns: masters, two moments, and the frozen weight."""
    if world == 2:
        for stage in (2, 3):
            trained(stage, rank, os.path.join(folder, str(stage))).destroy()
        return None
    found = []
    for saved, loaded in [(2, 3), (3, 1), (3, 3)]:
        engine = fresh(loaded)
        real = saved_state.Range.fill  # asked first, for each range
        with mock.patch.object(saved_state.Range, "fill", autospec=True, side_effect=real) as fill:
            engine.load_checkpoint(os.path.join(folder, str(saved)))
        owned = sum(numel for _, _, numel in engine.core.pieces())
        frozen = 57 if loaded == 3 else 169  # of 13 x 13: slices for three ranks
        found.append((sum(call.args[1].numel() for call in fill.call_args_list), 3 * owned + frozen))
    return found


def test_ranks_read_what_they_own_and_no_more(tmp_path):
    run_ranks(2, body_ranges, str(tmp_path))
    for rank, found in enumerate(run_ranks(3, body_ranges, str(tmp_path))):
        for read, wanted in found:
            assert wanted - 2 <= read <= wanted, rank  # the last rank's slice is shorter


def test_missing_shards_are_named(tmp_path):
    run_ranks(2, body_save, str(tmp_path))
    os.unlink(tmp_path / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    for manifest in (tmp_path / "global_step3").glob("*.json"):
        os.unlink(manifest)
    refused(
        FileNotFoundError,
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        run_ranks,
        1,
        body_load,
        str(tmp_path),
        True,
    )
    run_ranks(1, body_load, str(tmp_path), False)
    # Where only one rank misses something, the others do not wait for it.
    assert sorted(run_ranks(4, body_fails, str(tmp_path))) == ["FileNotFoundError"] * 4


def body_fails(rank, world, folder):
    """Ranks 2 and 3 find no file; the others hear of it."""
    real = storage.read

    def read(path, *args, **kwargs):
        if "rank_1_mp" in path:
            if rank < 2:
                path = path.replace("rank_1_mp", "rank_0_mp")
            else:
                raise FileNotFoundError(2, f"there is no {path}")
        return real(path, *args, **kwargs)

    with mock.patch.object(storage, "read", read):
        raised = refused(OSError, "rank_1_mp_rank_00_optim_states.pt", fresh(1).load_checkpoint, folder)
    return type(raised).__name__


def body_save(rank, world, folder):
    trained(2, rank, folder)


def body_load(rank, world, folder, states):
    fresh(1).load_checkpoint(folder, load_module_only=not states)


def body_fp16(rank, world, folder, stage):
    made = {**peer_model.what(1, "fp32")["config"], "zero_optimization": {"stage": stage}}
    made["fp16"] = {"enabled": True, "initial_scale_power": 8}
    engine = peer_model.make_engine(made)
    peer_model.train(engine, 2, rank)
    engine.save_checkpoint(folder, tag=str(stage))


@pytest.mark.skipif(not deepspeed.get_accelerator().is_fp16_supported(), reason="no fp16 on this device")
def test_keys_of_fp16(tmp_path):
    for stage in range(4):
        run_ranks(2, body_fp16, str(tmp_path), stage)
        names = [name for name in os.listdir(tmp_path / str(stage)) if name.endswith(".pt")]
        model = next(name for name in sorted(names) if "model_states" in name)
        saved = torch.load(tmp_path / str(stage) / model, weights_only=False)
        if stage == 0:
            assert set(saved["optimizer"]) == {
                "dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window",
                "cur_hysteresis", "optimizer_state_dict", "fp32_groups_flat", "clip_grad",
            }  # fmt: skip
            continue
        assert {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)} <= set(names)
        state = torch.load(tmp_path / str(stage) / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)[
            "optimizer_state_dict"
        ]
        assert state["dynamic_loss_scale"] is True and state["loss_scaler"].cur_scale == 256.0
        kind = type(state["loss_scaler"])
        assert f"{kind.__module__}.{kind.__name__}" == "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
        assert saved["module"]["a.weight"].dtype == torch.float16


@on_ranks(1, init=True)
def test_client_sd_is_client_state(rank, world, folder):
    engine = engine_of(torch.nn.Linear(2, 1), settings(1))
    engine.save_checkpoint(folder, 7, client_sd={"step": 7})
    assert engine.load_checkpoint(folder, 7)[1]["step"] == 7
    with pytest.raises(TypeError, match="client_state"):
        engine.save_checkpoint(folder, 8, {"step": 8}, client_sd={"step": 9})
