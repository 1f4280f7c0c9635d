"""Checkpoints that another implementation wrote load at any number of ranks, at any stage and in any precision."""

import os
import pathlib
import shutil

import numpy
import pytest
import torch

import peer_model
from deepspeed.checkpoint.layouts.open_saved import open_saved
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import on_ranks, run_ranks
from refusals import refused
from runs import load_into, moments, together, weights
from sampling import every_case, sample

GROUPS = [
    {"a.weight": (13, 7), "b.weight": (13, 13), "o.weight": (3, 13)},
    {"a.bias": (13,), "f.bias": (13,), "n.weight": (13,), "n.bias": (13,), "o.bias": (3,)},
]
KINDS = ("fp32", "exp_avg", "exp_avg_sq")


def flats(stage, dtype, group):
    """kind -> the parameters of a group end to end, put together from the files by hand. Not for stage 3."""
    folder = os.path.join(peer_model.folder(stage, dtype), "global_step4")
    model = torch.load(os.path.join(folder, "mp_rank_00_model_states.pt"), weights_only=False)
    if stage == 0 and dtype == "fp32":
        states = [model["optimizer"]["state"][i] for i in model["optimizer"]["param_groups"][group]["params"]]
        found = {kind: torch.cat([state[kind].reshape(-1) for state in states]) for kind in KINDS[1:]}
        return {"fp32": torch.cat([model["module"][name].reshape(-1) for name in GROUPS[group]]), **found}
    if stage == 0:
        wrapped = model["optimizer"]
        return {"fp32": wrapped["fp32_groups_flat"][group], **wrapped["optimizer_state_dict"]["state"][group]}
    prefix = "bf16_" if dtype == "bf16" else ""
    shards = [
        torch.load(os.path.join(folder, f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"), weights_only=False)
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
    trained = moments(engine, KINDS[1:])
    for name, value in weights(engine).items():
        wanted = expected[("fp32" if name in trained else "lp", name)]
        assert torch.equal(value, wanted.to(value.dtype)), (where, name)
    for name, tensors in trained.items():
        for kind, one in zip(KINDS, tensors, strict=True):
            assert torch.equal(one, expected[(kind, name)]), (where, name, kind)
    # Without ZeRO and in bf16 theirs count the step that makes the states, too.
    assert engine.stepping.core.steps().tolist() == [5 if (stage, dtype) == (0, "bf16") else 4] * 8, where
    assert torch.equal(engine.module.count, torch.arange(3.0))


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_they_load_at_any_number_of_ranks_and_stage(rank, world):
    """Checkpoints into targets, (stage, precision), with the losses of the next step; make test-all takes all pairs."""
    targets = [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")]
    pairs, found = [(kind, target) for kind in peer_model.KINDS for target in targets], {}
    if not every_case():
        pairs = [pairs[index] for index in sample(pairs, "values", 16, seed=world)]
    for kind in peer_model.KINDS:
        (stage, dtype), chosen = kind, [target for one, target in pairs if one == kind]
        seen, expected = peer_model.what(stage, dtype), expectation(stage, dtype)
        for to_stage, to_dtype in chosen:
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
    found = together(found)[0]
    assert len(found) == len(pairs)
    for (stage, dtype, _, to_dtype, _), value in found.items():
        wanted = peer_model.what(stage, dtype)["next_loss_rank0"]
        tolerance = 1e-6 if dtype == to_dtype == "fp32" else 2e-2  # bf16 has eight bits
        assert abs(value - wanted) <= tolerance * abs(wanted), (stage, dtype, to_dtype, value, wanted)


@on_ranks(2)
def test_training_goes_on(rank, world):
    def losses(stage):
        engine = peer_model.make_engine(peer_model.what(stage, "fp32")["config"], seed=5)
        return peer_model.train(load_into(engine, peer_model.folder(stage, "fp32")), 3, rank, first=4)

    for stage in (0, 2, 3):
        found = losses(stage)
        if rank == 0:
            assert found[0] == pytest.approx(peer_model.what(stage, "fp32")["next_loss_rank0"], rel=1e-6)
        # The stages train alike, whichever files they came from.
        assert found == pytest.approx(losses(1), rel=1e-5)


# ---- states that were on NVMe --------------------------------------------------------------------------------------
UNITS = [["a.weight", "b.weight"], ["o.weight"], list(GROUPS[1])]  # sub-groups of at least 100 elements


def swapped(folder, kept, shift=0):
    """The peer's checkpoint as its runs with optimizer states on NVMe save it, with several sub-groups: their tensors
    in files beside empty ones, but those of the sub-group ``kept``. ``shift``: added to the numbers of parameters.
    """
    tag = os.path.join(folder, "global_step4")
    shutil.copytree(peer_model.folder(3, "fp32"), folder)
    module = torch.load(os.path.join(tag, "zero_pp_rank_0_mp_rank_00_model_states.pt"), weights_only=False)["module"]
    numbers = [name for name in module if name not in ("count", "c.weight")]
    for rank in range(2):
        path = os.path.join(tag, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        whole = torch.load(path, weights_only=False)
        part = whole["optimizer_state_dict"]
        part.update(loss_scaler=None, zero_stage=3)
        whole["ds_config"]["zero_optimization"]["sub_group_size"] = 100
        inner, masters = part["optimizer_state_dict"], part["fp32_flat_groups"]
        cut = {"fp32": [*masters[0].split([131, 20]), masters[1]]}
        for kind in KINDS[1:]:
            cut[kind] = [*inner["state"][0][kind].split([131, 20]), inner["state"][1][kind]]
        part["fp32_flat_groups"] = [master.detach().clone() for master in cut["fp32"]]
        inner["state"] = {
            unit: {"step": 4, **{kind: cut[kind][unit].clone() for kind in KINDS[1:]}} for unit in range(3)
        }
        os.makedirs(os.path.join(tag, "offloaded_tensors", f"rank{rank}"))
        for unit, held in enumerate(UNITS):
            if unit == kept:
                continue
            key = f"{numbers.index(held[0]) + shift}_{numbers.index(held[-1]) + shift}"
            for kind in KINDS:
                name = key if kind == "fp32" else f"{kind}-{key}"
                data = cut[kind][unit].detach().numpy().tobytes()
                path_of_swap = pathlib.Path(tag, "offloaded_tensors", f"rank{rank}", f"{name}.tensor.swp")
                path_of_swap.write_bytes(data + bytes(-len(data) % 1024))
            part["fp32_flat_groups"][unit] = torch.empty(0)
            inner["state"][unit].update({kind: torch.empty(0) for kind in KINDS[1:]})
        torch.save(whole, path)


def body_swapped(rank, world, folder):
    seen, expected = peer_model.what(3, "fp32"), expectation(3, "fp32")
    engine = load_into(peer_model.make_engine({**seen["config"], "zero_optimization": {"stage": 2}}, seed=5), folder)
    check(engine, 3, "fp32", expected, folder)


def test_states_that_lay_on_nvme_load_from_their_copies(tmp_path):
    swapped(f"{tmp_path}/all", kept=None)
    run_ranks(2, body_swapped, f"{tmp_path}/all")
    expected = expectation(3, "fp32")
    for kept, shift in ((None, 0), (1, 40)):
        folder = f"{tmp_path}/kept{kept}"
        swapped(folder, kept, shift)
        saved = open_saved(f"{folder}/global_step4")
        for name in [name for names in GROUPS for name in names]:
            assert saved.step(name) == 4
            for kind in KINDS:
                found = torch.cat([part.read_range(0, numel) for _, numel, part in saved.pieces(name, kind)])
                assert torch.equal(found, expected[(kind, name)].reshape(-1)), (name, kind)
        for name, value in get_fp32_state_dict_from_zero_checkpoint(folder).items():
            if name not in ("count", "f.weight"):
                assert torch.equal(value, expected[("fp32", "b.weight" if name == "c.weight" else name)]), name
    rank1 = os.path.join(folder, "global_step4", "offloaded_tensors", "rank1")
    os.truncate(os.path.join(rank1, "40_42.tensor.swp"), 100)
    refused(
        ValueError,
        "40_42.tensor.swp has 100 bytes, .* 131 elements take 524: it was cut",
        get_fp32_state_dict_from_zero_checkpoint,
        folder,
    )
    os.unlink(os.path.join(rank1, "40_42.tensor.swp"))
    refused(FileNotFoundError, "rank1 has no file of the masters", get_fp32_state_dict_from_zero_checkpoint, folder)
    shutil.rmtree(rank1)
    refused(
        FileNotFoundError, "offloaded_tensors/rank1, are not there", get_fp32_state_dict_from_zero_checkpoint, folder
    )
