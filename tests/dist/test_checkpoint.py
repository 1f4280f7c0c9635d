"""Saving and resuming: the run goes on bit by bit, the files have the names and keys others read."""

import copy
import json
import os

import pytest
import torch

import claims
import deepspeed
from claims import batches_of, draw_from
from engine_models import make_net, net_engine, saving_engine
from harness import on_ranks, run_ranks
from programs import DRAWN, TOKENS, WARMUP
from refusals import refused
from runs import DTYPES, by_rank_0, load_into, weights
from runs import identical as same

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}}
PRECISIONS = {name: DTYPES[name] for name in ("fp32", "bf16")}
if deepspeed.get_accelerator().is_fp16_supported():
    PRECISIONS["fp16"] = FP16


def make_engine(world, precision, seed=0, optimizer=None, accumulate=2):
    more = {"size": 4 * accumulate, "scheduler": WARMUP, **precision}
    zero = {"reduce_bucket_size": 300}
    return net_engine(world, 0, accumulate, seed=seed, client=optimizer, zero=zero, data=TOKENS, **more)


def run(engine, batches, steps):
    return claims.run(engine, None, DRAWN, range(steps), batches)


def trained(engine, steps, seed=None):
    """The engine, after steps from its first batch on."""
    if seed is not None:
        draw_from(seed)
    run(engine, batches_of(engine), steps)
    return engine


MODEL_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version",
}  # fmt: skip


def body_files(rank, world, folder, precision):
    engine = trained(make_engine(world, precision), 2)
    assert engine.save_checkpoint(folder, client_state={"note": "kept"}) is True
    assert engine.save_checkpoint(folder, tag="no_latest", save_latest=False, exclude_frozen_parameters=True) is True
    assert engine.save_16bit_model(folder) is True
    path, state = engine.load_checkpoint(folder, tag="global_step2", load_module_only=True)
    return sorted(state)


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_file_names_and_keys(precision, tmp_path):
    first, second = run_ranks(2, body_files, str(tmp_path), PRECISIONS[precision])
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert set(os.listdir(tmp_path / "global_step2")) == {
        "checkpoint_manifest.json",
        "mp_rank_00_model_states.pt",
        "run_rank_00000_state.pt",
        "run_rank_00001_state.pt",
    }
    saved = torch.load(tmp_path / "global_step2" / "mp_rank_00_model_states.pt", weights_only=False)
    assert set(saved) == MODEL_KEYS | {"note"}
    assert saved["buffer_names"] == ["count"] and saved["dp_world_size"] == 2 and saved["global_steps"] == 2
    assert saved["ds_config"]["train_batch_size"] == 8
    optimizer = saved["optimizer"]
    trained = sum(p.numel() for p in make_net().parameters() if p.requires_grad)
    if precision == "fp32":
        assert set(optimizer) == {"state", "param_groups"}
    else:
        assert {"optimizer_state_dict", "fp32_groups_flat", "clip_grad"} <= set(optimizer)
        assert [g.numel() for g in optimizer["fp32_groups_flat"]] == [trained]
        assert optimizer["optimizer_state_dict"]["state"][0]["exp_avg"].numel() == trained
    if precision == "fp16":
        assert {
            "dynamic_loss_scale",
            "cur_scale",
            "cur_iter",
            "last_overflow_iter",
            "scale_factor",
            "scale_window",
        } <= set(optimizer)
    biggest = max(t.numel() for t in saved["module"].values())
    for tensor in saved["module"].values():  # no view of a big buffer went into the file
        assert tensor.storage().size() <= biggest
    frozen = torch.load(tmp_path / "no_latest" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert "frozen.weight" not in frozen and "frozen.bias" in frozen
    assert same(dict(torch.load(tmp_path / "pytorch_model.bin", weights_only=False)), dict(saved["module"]))
    expected = MODEL_KEYS | {"note"}
    assert set(first) == expected - {"module"} and first == second


def cut_in_half(path):
    os.truncate(path, os.path.getsize(path) // 2)


def body_spoiled(rank, world, folder, spoil):
    engine = trained(make_engine(world, {}), 1)
    engine.save_checkpoint(folder, tag="t")
    by_rank_0(rank, spoil, os.path.join(folder, "t", "mp_rank_00_model_states.pt"))
    engine.load_checkpoint(folder)


@pytest.mark.parametrize(
    "spoil, error, words",
    [
        (cut_in_half, RuntimeError, "mp_rank_00_model_states.pt is damaged"),
        (os.unlink, FileNotFoundError, "mp_rank_00_model_states.pt"),
    ],
)
def test_bad_files_are_named(spoil, error, words, tmp_path):
    refused(error, words, run_ranks, 2, body_spoiled, str(tmp_path), spoil)


def body_call(rank, world, function, folder, options):
    return getattr(make_engine(world, {}), function)(folder, **options)


RESERVED = {"client_state": {"checkpoint_parallel_dimensions": 1}}


@pytest.mark.parametrize(
    "function, folder, options, error, words",
    [
        ("load_checkpoint", "{}", {"tag": "absent"}, FileNotFoundError, "no checkpoint .*absent"),
        ("save_checkpoint", "", {}, ValueError, "save_dir"),
        ("save_checkpoint", "{}", RESERVED, KeyError, "checkpoint_parallel_dimensions"),
    ],
)
def test_bad_calls_are_named(function, folder, options, error, words, tmp_path):
    refused(error, words, run_ranks, 2, body_call, function, folder.format(tmp_path), options)


def test_nothing_to_load_is_no_error(tmp_path):
    assert run_ranks(1, body_call, "load_checkpoint", str(tmp_path), {}) == [(None, None)]


def body_save(rank, world, folder):
    engine = trained(make_engine(world, {}), 1)
    engine.save_checkpoint(folder)
    return weights(engine)


def body_other_world(rank, world, folder, only_module):
    return weights(load_into(make_engine(world, {}, seed=8), folder, load_module_only=only_module))


@pytest.mark.any_device
def test_another_world_size(tmp_path):
    saved = run_ranks(2, body_save, str(tmp_path))[0]
    for only_module in (False, True):
        assert same(run_ranks(1, body_other_world, str(tmp_path), only_module)[0], saved)


@on_ranks(1)
def test_a_loaded_client_state_may_be_saved_again(rank, world, folder):
    engine = trained(make_engine(world, {}), 1)
    own = [("global_samples", 77), ("global_steps", 0), ("module", "resnet"), ("lr_scheduler", {}), ("optimizer", None)]
    for key, value in own:
        refused(KeyError, f"'{key}'.*Rename yours", engine.save_checkpoint, folder, client_state={key: value})
    counters = {"note": "kept", "global_steps": engine.global_steps, "global_samples": engine.global_samples}
    engine.save_checkpoint(folder, tag="plain", client_state=counters)
    _, state = engine.load_checkpoint(folder, tag="plain")
    run(engine, batches_of(engine), 2)
    state["note"] = "new"
    steps, samples = engine.global_steps, engine.global_samples
    plain = {key: value for key, value in state.items() if isinstance(value, (int, float, str, dict))}
    copies = state, copy.deepcopy(state), json.loads(json.dumps(plain, default=str)), {**state, "global_samples": 1}
    for number, given in enumerate(copies):
        engine.save_checkpoint(folder, tag=f"again{number}", client_state=given)
        _, again = engine.load_checkpoint(folder, tag=f"again{number}")
        assert again["note"] == "new" and again["global_samples"] == samples  # old values do not replace new ones
        assert (engine.global_steps, engine.global_samples) == (steps, samples) and samples > 0


def body_tags(rank, world, folder, mode):
    saving_engine(world, 0, tag_validation=mode).save_checkpoint(folder, tag=f"tag{rank}")


def test_ranks_must_agree_on_the_tag(tmp_path):
    refused(AssertionError, "same tag on every rank", run_ranks, 2, body_tags, str(tmp_path), "Fail")
    run_ranks(2, body_tags, str(tmp_path), "Ignore")
