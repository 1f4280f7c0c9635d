"""The native format: a run goes on bit by bit at every stage, in every precision and at any number of ranks, and its
files are safetensors and JSON only."""

import argparse
import glob
import json
import os

import pytest
import torch

import deepspeed
from claims import batches_of, comparable
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.convert import export
from deepspeed.checkpoint.layouts.open_saved import open_saved
from deepspeed.checkpoint.layouts.saved_native import NotPlain
from deepspeed.checkpoint.read import cli
from deepspeed.checkpoint.write import file_writer, verify
from deepspeed.formats.safetensors_file import read_safetensors
from engine_models import config, make_net, net_engine
from harness import RankError, on_ranks, run_ranks
from models import Parts
from mpu import two_by_two
from refusals import refused
from runs import engine_of, load_into, moments, take_step, together, weights
from runs import identical as same
from test_checkpoint import PRECISIONS, run, trained
from test_checkpoint_writers import Someones
from test_zero_checkpoint import make_engine

NATIVE = {"checkpoint": {"writer": {"format": "safetensors"}}}
TORCH = {}


# ---- any stage and number of ranks -----------------------------------------------------------------------------------
def forward_strided(net, x):
    net.seen += 1
    hidden = torch.tanh(net.conv(x)).mean((2, 3))
    return net.frozen(net.tied(net.first(hidden))).float().square().mean()


def strided():
    """A parameter whose memory is not in the order of rows, a frozen one, tied ones, buffers."""
    net = Parts(
        forward_strided,
        conv=torch.nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last),
        first=torch.nn.Linear(8, 8),
        tied=torch.nn.Linear(8, 8, bias=False),
        frozen=torch.nn.Linear(8, 5).requires_grad_(False),
        seen=torch.zeros(2),
    )
    net.tied.weight = net.first.weight
    return net


def strided_engine(world, stage, seed, more, optimizer=None):
    torch.manual_seed(seed)
    made = config(world, 1, size=12, zero_optimization={
        "stage": stage, "reduce_bucket_size": 100, "stage3_param_persistence_threshold": 0}, **more)  # fmt: skip
    return engine_of(strided(), made, optimizer)


def everything(engine):
    found = weights(engine)
    for name, tensors in moments(engine).items():
        found.update({f"{kind} of {name}": one for kind, one in zip(("master", "exp_avg", "exp_avg_sq"), tensors)})
    found.update({name: buffer.clone() for name, buffer in engine.module.named_buffers()})
    return found, engine.global_steps, engine.get_lr(), engine.loaded_checkpoint_dp_world_size


def body_save_strided(rank, world, folder, stage, more):
    engine = strided_engine(world, stage, 0, {**more, **NATIVE})
    for step in range(3):
        torch.manual_seed(step)
        take_step(engine, engine(torch.randn(12, 3, 4, 4).to(engine.module.conv.bias.dtype)[: 12 // world]))
    engine.save_checkpoint(folder, client_state={"world": world})
    return everything(engine)


def body_load_strided(rank, world, folder, stage, more):
    engine = strided_engine(world, stage, 9, {**more, **TORCH})
    _, client_state = engine.load_checkpoint(folder)
    assert client_state["world"] == 4
    return everything(engine)


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (0, "bf16"), (2, "fp32"), (3, "bf16")])
def test_loads_at_any_number_of_ranks_and_stage(stage, precision, tmp_path):
    more = PRECISIONS[precision]
    (saved, steps, lr, _), *_ = run_ranks(4, body_save_strided, str(tmp_path), stage, more)
    cut = [
        json.loads((tmp_path / "global_step3" / f"rank_0000{rank}.json").read_text())["strides"] for rank in range(4)
    ]
    assert any(cut) == (stage == 2), "only pieces of parameters in another order of memory need their strides"
    for world, other in ((1, (stage + 1) % 4), (2, stage), (3, 3 - stage)):
        for found, *others in run_ranks(world, body_load_strided, str(tmp_path), other, more):
            assert same(saved, found), [name for name in saved if not same(saved[name], found[name])]
            assert others == [steps, lr, 4]


def body_other_optimizer(rank, world, folder):
    def adamw(params):
        return torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)

    engines = [strided_engine(world, 2, 9, PRECISIONS["bf16"], optimizer) for optimizer in (None, adamw)]
    ours, theirs = (everything(load_into(engine, folder))[0] for engine in engines)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_an_optimizer_of_torch_takes_what_ours_has_saved(tmp_path):
    run_ranks(4, body_save_strided, str(tmp_path), 1, PRECISIONS["bf16"])
    run_ranks(2, body_other_optimizer, str(tmp_path))


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_both_formats_hold_the_same(rank, world, stage, folder):
    engine = trained(make_engine(world, stage, {**PRECISIONS["bf16"], **NATIVE}), 2, seed=1)
    engine.save_checkpoint(folder, tag="native")
    other = load_into(make_engine(world, stage, PRECISIONS["bf16"], seed=3), folder, tag="native")
    other.save_checkpoint(folder, tag="torch")
    other.save_checkpoint(folder, tag="native")  # takes the place of the other format's files
    last = make_engine(world, stage, {**PRECISIONS["bf16"], **NATIVE}, seed=4)
    last.load_checkpoint(folder, tag="torch")
    assert same(comparable(engine.optimizer.state_dict()), comparable(last.optimizer.state_dict()))
    assert same(weights(engine), weights(last))
    native = os.path.join(folder, "native")
    assert not [name for name in os.listdir(native) if name.endswith((".safetensors", "checkpoint.json"))]
    assert verify.verify_folder(native) == []


# ---- flags of load_checkpoint, client_state --------------------------------------------------------------------------
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_flags_of_load_checkpoint(rank, world, stage, folder):
    engine = trained(make_engine(world, stage, {**PRECISIONS["bf16"], **NATIVE}), 2)
    engine.save_checkpoint(folder, tag="all")
    engine.save_checkpoint(folder, tag="small", exclude_frozen_parameters=True)
    saved = weights(engine)

    bare = make_engine(world, stage, {**PRECISIONS["bf16"], **NATIVE}, seed=3)
    frozen = weights(bare)["frozen.weight"]
    path, _ = bare.load_checkpoint(folder, tag="small", load_optimizer_states=False, load_lr_scheduler_states=False)
    assert path.endswith("checkpoint.json") and bare.global_steps == 2
    found = weights(bare)
    assert torch.equal(found.pop("frozen.weight"), frozen)
    assert same(found, {name: value for name, value in saved.items() if name != "frozen.weight"})

    seen = {}
    only = load_into(
        make_engine(world, stage, {**PRECISIONS["bf16"], **NATIVE}, seed=3), folder, tag="all", load_module_only=True
    )
    assert only.global_steps == 0 and same(weights(only), saved)
    only.load_checkpoint(folder, tag="all", custom_load_fn=lambda src, dst: seen.update(src))
    assert same({name: seen[name].to(value.dtype) for name, value in saved.items()}, saved)
    assert torch.equal(seen["count"], engine.module.count) and torch.equal(seen["tied.weight"], seen["first.weight"])

    wrong = make_net()
    wrong.more = torch.nn.Linear(2, 2)
    other = net_engine(world, model=wrong, **NATIVE)
    refused(
        RuntimeError,
        r"missing \['more.weight', 'more.bias'\]",
        other.load_checkpoint,
        folder,
        tag="all",
        load_module_only=True,
    )
    other.load_checkpoint(folder, tag="all", load_module_only=True, load_module_strict=False)


class Mine:
    pass


@on_ranks(2)
def test_what_only_a_pickle_could_hold_stops_all_ranks_before_anything_is_written(rank, world, folder):
    engine = make_engine(world, 1, NATIVE)
    engine.save_checkpoint(folder, tag="a")
    state = {"ok": (1, {"x"})} if rank else {"ok": 1, "mine": [0, Mine()]}
    refused(
        NotPlain,
        r"rank 0: client_state\.mine\.1 is a .*Mine.*writer",
        engine.save_checkpoint,
        folder,
        tag="b",
        client_state=state,
    )
    sparse = {"t": torch.ones(2).to_sparse()} if rank == 0 else {}
    refused(
        NotPlain,
        r"rank 0: client_state\.t is a tensor of .*sparse",
        engine.save_checkpoint,
        folder,
        tag="b",
        client_state=sparse,
    )
    engine.save_checkpoint(folder, tag="c", client_state={"ok": (1, {"x"}), "n": {3: None}})
    assert engine.load_checkpoint(folder)[1]["ok"] == (1, {"x"})
    assert sorted(os.listdir(folder)) == ["a", "c", "latest"]


# ---- files -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_frozen_weights_are_stored_once(rank, world, stage, tmp_path, folder):
    engine = make_engine(world, stage, {**PRECISIONS["bf16"], **NATIVE})
    batches, names = batches_of(engine), []
    for tag in ("a", "b", "c", "d", "e"):
        run(engine, batches, 1)
        if tag == "c":  # a change that no version counter shows
            with deepspeed.zero.GatheredParameters([engine.module.frozen.weight], modifier_rank=0):
                engine.module.frozen.weight.data.add_(1)
        engine.save_checkpoint(folder, tag=tag)
        torch.distributed.barrier()
        if rank == 0 and tag == "d":  # a damaged file must not be linked: here, in a process that has not seen it whole
            for path in tmp_path.glob("d/frozen_*"):
                damaged = bytearray(path.read_bytes())
                damaged[-1] ^= 1
                path.write_bytes(damaged)
        torch.distributed.barrier()
        names.append({os.path.basename(p): os.stat(p).st_ino for p in glob.glob(f"{folder}/{tag}/frozen_*")})
        if tag == "d":
            engine._checkpoints.memo.get("frozen files", {"sound": set()})["sound"].clear()
    (a, b, c, d, e), frozen = together(names, weights(engine)["frozen.weight"])[0]
    assert len(a) == (2 if stage == 3 else 1)
    assert a == b and not set(a.values()) & set(c.values()) and not set(a) & set(c)
    assert c == d and set(e) == set(d) and not set(e.values()) & set(d.values())
    for tag in "abe":
        assert verify.verify_folder(str(tmp_path / tag)) == [], tag
        assert set(a if tag in "ab" else e) < set(verify.read(str(tmp_path / tag))["files"])
    bad = verify.verify_folder(str(tmp_path / "d"))
    assert bad and all(problem.tensor.startswith("module/frozen.weight") for problem in bad)
    saved = open_saved(str(tmp_path / "e"))
    value = torch.cat([piece.read_range(0, numel) for _, numel, piece in saved.pieces("frozen.weight", "weight")])
    assert torch.equal(value.view(frozen.shape), frozen)


@on_ranks(2)
def test_retention_leaves_the_last_one_whole(rank, world, folder):
    made = {"checkpoint": {"writer": {"format": "safetensors"}, "keep_last": 1}}
    engine = make_engine(world, 1, made)
    for tag in ("a", "b", "c"):
        engine.save_checkpoint(folder, tag=tag)
    fresh = load_into(make_engine(world, 1, made, seed=8), folder)
    assert same(weights(engine), weights(fresh))
    entries = cli.checkpoints_of(folder)
    assert [(entry.tag, entry.state) for entry in entries] == [("c", "complete")]
    assert verify.verify_folder(entries[0].folder) == []


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_what_is_in_the_files(rank, world, stage, tmp_path, folder):
    engine = trained(make_engine(world, stage, {**PRECISIONS["bf16"], **NATIVE}), 1)
    engine.save_checkpoint(folder, tag="t", client_state={"table": torch.arange(4)})
    first = together({name: first for name, (_, first, _) in moments(engine).items()})[0]
    names = {name for name in os.listdir(tmp_path / "t") if not name.startswith("frozen_")}
    assert names == {
        "checkpoint.json", "checkpoint_manifest.json", "rank_00000.json", "rank_00000.safetensors", "rank_00001.json",
        "rank_00001.safetensors",
    }  # fmt: skip
    about = json.loads((tmp_path / "t" / "checkpoint.json").read_text())
    assert about["format"] == "deepspeed-native" and about["zero_stage"] == stage and about["ranks"] == [0, 1]
    assert about["parameters"]["first.weight"] == {"shape": [12, 12], "dtype": "bfloat16", "trained": True, "step": 1}
    assert about["parameters"]["frozen.weight"]["trained"] is False
    assert about["tied"] == {"tied.weight": "first.weight"}
    assert about["groups"][0]["names"] == list(first)
    held = [read_safetensors(tmp_path / "t" / f"rank_0000{rank}.safetensors")[0] for rank in range(2)]
    both = {name for name in held[0].keys() & held[1].keys() if not name.startswith("values/run.")}
    assert both == ({"module/count"} if stage == 3 else set())
    assert "module/count" in held[0] and "values/client_state.table" in held[0]
    sizes = [sum(t.nbytes for name, t in files.items() if name.startswith("fp32/")) for files in held]
    assert sum(sizes) == 4 * sum(value.numel() for value in first.values())
    assert max(sizes) < 0.62 * sum(sizes)  # the ranks share the writing
    for name, value in first.items():
        flat, found = value.reshape(-1), 0
        for key, tensor in {**held[0], **held[1]}.items():
            if key == f"exp_avg/{name}":
                assert torch.equal(tensor.read(), value)
                found += value.numel()
            elif key.startswith(f"exp_avg/{name}@"):
                begin = int(key.rpartition("@")[2])
                assert torch.equal(tensor.read(), flat[begin : begin + tensor.numel()])
                found += tensor.numel()
        assert found == value.numel()


# ---- tools -----------------------------------------------------------------------------------------------------------
def body_tools(rank, world, folder, stage):
    engine = trained(make_engine(world, stage, {**PRECISIONS["bf16"], **NATIVE}), 2, seed=3 + rank)
    engine.save_checkpoint(folder)
    masters = {name: master for name, (master, *_) in moments(engine).items()}
    return {**weights(engine), **masters}, engine.module.count.clone()


def body_universal(rank, world, folder, stage):
    engine = make_engine(world, stage, {**PRECISIONS["bf16"], "checkpoint": {"load_universal": True}}, seed=5)
    engine.load_checkpoint(folder)
    native = load_into(make_engine(world, stage, PRECISIONS["bf16"], seed=6), folder.replace("universal", "runs"))
    assert same(comparable(engine.optimizer.state_dict()), comparable(native.optimizer.state_dict()))
    return same(weights(engine), weights(native))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_tools_read_it(stage, tmp_path, capsys):
    runs, universal = str(tmp_path / "runs"), str(tmp_path / "universal")
    masters, count = run_ranks(2, body_tools, runs, stage)[0]
    assert cli.main(["verify", runs]) == 0 and cli.main(["ls", runs]) == 0
    assert "complete" in capsys.readouterr().out
    assert cli.main(["diff", runs, runs]) == 0

    assert cli.main(["export", runs, str(tmp_path / "out"), "--max_shard_size", "2KB"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(make_net().state_dict()) and len(set(index.values())) > 1
    found = {}
    for file in set(index.values()):
        found.update({name: t.read() for name, t in read_safetensors(tmp_path / "out" / file)[0].items()})
    for name, value in masters.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], value.float()), name
    assert torch.equal(found["tied.weight"], found["first.weight"]) and torch.equal(found["count"], count)

    made = export.export(
        runs, str(tmp_path / "16"), dtype="bf16", exclude_frozen_parameters=True, safe_serialization=False
    )
    saved = torch.load(made[0], weights_only=False)
    assert set(saved) == set(index) - {"frozen.weight"} and saved["count"].dtype == torch.float32
    assert all(torch.equal(saved[name], masters[name].bfloat16()) for name in masters if name in saved)

    tag = ds_to_universal.names.latest_tag(runs)
    os.makedirs(universal)
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=f"{runs}/{tag}", output_folder=f"{universal}/{tag}", num_extract_workers=1, num_merge_workers=1
        )
    )
    assert all(run_ranks(1, body_universal, universal, stage))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_written_in_the_background(rank, world, stage, folder, tmp_path):
    made = {"checkpoint": {"async": True, "writer": {"format": "safetensors"}}}
    engine = make_engine(world, stage, {**PRECISIONS["bf16"], **made})
    batches = batches_of(engine)
    for tag in ("a", "b"):
        run(engine, batches, 1)
        engine.save_checkpoint(folder, tag=tag)
        saved = weights(engine), comparable(engine.optimizer.state_dict())
        run(engine, batches, 1)
    engine.destroy()  # waits for the last save
    fresh = load_into(make_engine(world, stage, {**PRECISIONS["bf16"], **NATIVE}, seed=4), folder)
    assert same(saved, (weights(fresh), comparable(fresh.optimizer.state_dict())))
    frozen = [{os.stat(path).st_ino for path in tmp_path.glob(f"{tag}/frozen_*")} for tag in "ab"]
    assert frozen[0] == frozen[1] != set()
    assert not any(verify.verify_folder(str(tmp_path / tag)) for tag in "ab")


@on_ranks(2)
def test_an_engine_that_pickles_is_refused(rank, world, folder):
    engine = make_engine(world, 1, NATIVE)
    engine.checkpoint_engine = Someones()
    refused((ValueError, RuntimeError), "Someones.*format", engine.save_checkpoint, folder, tag="b")
    assert os.listdir(folder) == []


# ---- ranks that own the same, that own slices of the model, that die ------------------------------------------------
def body_mics(rank, world, folder):
    engine = trained(make_engine(world, 3, {**PRECISIONS["bf16"], **NATIVE}, mics_shard_size=2), 1)
    engine.save_checkpoint(folder, tag="t")
    return weights(engine)


def body_load_stage_1(rank, world, folder):
    return weights(load_into(make_engine(world, 1, {**PRECISIONS["bf16"], **NATIVE}, seed=5), folder))


def test_replicas_of_shards_share_the_writing(tmp_path):
    saved = run_ranks(4, body_mics, str(tmp_path))[0]
    files = [read_safetensors(path)[0] for path in sorted(tmp_path.glob("t/rank_*.safetensors"))]
    masters = [{key: tensor.nbytes for key, tensor in held.items() if key.startswith("fp32/")} for held in files]
    assert sum(map(len, masters)) == len({key for held in masters for key in held})
    assert all(sum(held.values()) < 0.4 * sum(sum(each.values()) for each in masters) for held in masters)
    assert same(saved, run_ranks(1, body_load_stage_1, str(tmp_path))[0])


def grid_engine(rank, seed, stage):
    deepspeed.init_distributed()
    made = config(2, zero_optimization={"stage": stage}, **NATIVE)
    return engine_of(make_net(seed=seed), made, mpu=two_by_two(rank))


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(4, init=True)
def test_model_parallel_ranks_keep_theirs(rank, world, stage, tmp_path, folder):
    engine = grid_engine(rank, 10 + rank % 2, stage)
    engine.save_checkpoint(folder, tag="t", client_state={"mine": rank % 2})
    saved = weights(engine)
    fresh = grid_engine(rank, 20, stage)
    _, client_state = fresh.load_checkpoint(folder)
    assert client_state["mine"] == rank % 2
    found = together(same(saved, weights(fresh)), saved["frozen.weight"])
    assert all(equal for equal, _ in found) and not torch.equal(found[0][1], found[1][1])
    assert {"checkpoint.json", "checkpoint_mp_rank_01.json"} < set(os.listdir(tmp_path / "t"))
    assert len(list(tmp_path.glob("t/frozen_*"))) == 2 and verify.verify_folder(str(tmp_path / "t")) == []


def body_killed(rank, world, folder, fault):
    os.environ.pop("DS_IO_FAULT", None)
    engine = make_engine(world, 2, NATIVE)
    engine.save_checkpoint(folder, tag="a")
    run(engine, batches_of(engine), 1)
    if rank == world - 1:
        file_writer.inject_fault(fault)
    engine.save_checkpoint(folder, tag="b")


def body_after(rank, world, folder):
    return load_into(make_engine(world, 2, NATIVE, seed=4), folder).global_steps


@pytest.mark.parametrize("fault", ["open:1:kill", "write:1:kill", "fsync:2:kill", "write:1:enospc"])
def test_a_rank_that_dies_or_cannot_write_leaves_the_old_one(fault, tmp_path):
    refused(
        (RankError, OSError), "No space" if "enospc" in fault else None, run_ranks, 2, body_killed, str(tmp_path), fault
    )
    assert run_ranks(2, body_after, str(tmp_path)) == [0, 0]
    assert (tmp_path / "latest").read_text() == "a" and verify.verify_folder(str(tmp_path / "a")) == []
