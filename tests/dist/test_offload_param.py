"""Parameters that rest on the host or on a drive between their uses: ``zero_optimization.offload_param``."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import deepspeed
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from engine_models import after_steps, make_net, net_engine, train_engine
from harness import on_ranks, run_ranks
from models import Parts, beside, seeded, waves
from refusals import refused
from runs import dtype_of, equal_bits, identical, last_of, load_into, take_step, together, value_of, with_fp16


def make(world, offload=None, model=None, accumulate=1, zero=(), optimizer=True, **more):
    section = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 20, **dict(zero)}
    if offload is not None:
        section["offload_param"] = offload
    if not optimizer:
        more["optimizer"] = None
    return net_engine(world, 3, accumulate, model, zero=section, **more)


def nvme(folder, **more):
    return {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0, **more}


def files_of(folder, rank, dtype="float32"):
    found = pathlib.Path(folder) / "zero_stage_3" / f"{dtype}params" / f"rank{rank}"
    return sorted(path.name for path in found.iterdir()) if found.is_dir() else []


# ---- training -----------------------------------------------------------------------------------------------------
@pytest.mark.any_device
@pytest.mark.parametrize("world, bf16, accumulate", [(1, True, 1), (1, False, 2), (2, True, 2), (2, False, 1)])
@on_ranks(init=True)
def test_training_is_equal_to_the_bit(rank, world, bf16, accumulate, folder):
    def trained(offload):
        engine = make(world, offload, accumulate=accumulate, bf16={"enabled": bf16}, gradient_clipping=0.1)
        train_engine(engine, 3 * accumulate, rank, world)
        if offload is not None and offload["device"] == "nvme":
            names = files_of(folder, rank, "bfloat16" if bf16 else "float32")
            wanted = sorted(f"{p.ds_id}_param.tensor.swp" for p in engine.module.parameters())
            assert names == wanted if offload["max_in_cpu"] == 0 else set(names) < set(wanted), names
        return engine, None

    equal_bits(trained, None, {"device": "cpu"}, nvme(folder), nvme(folder, max_in_cpu=500))


def body_init_fails(rank, world, folder):
    """On rank 1 the folder cannot be made; then a file stands where its files would be; then all is well."""
    said = []
    for name in ("file/missing", "blocked", "whole"):
        own = os.path.join(folder, name if (name, rank) != ("file/missing", 0) else ".")
        section = {"stage": 3, "offload_param": nvme(own)}
        try:
            with deepspeed.zero.Init(
                remote_device="nvme", config_dict_or_path={"zero_optimization": section}, dtype=torch.float32
            ):
                model = make_net()
            said.append((None, str(len(files_of(own, rank)) == len(list(model.parameters())))))
        except (OSError, RuntimeError) as error:
            said.append((type(error).__name__, str(error)))
        model = None
    return said


def test_slices_that_one_rank_cannot_put_away_are_an_error_of_all(tmp_path):
    blocked = tmp_path / "blocked/zero_stage_3/float32params/rank1"
    blocked.parent.mkdir(parents=True)
    blocked.touch()
    (tmp_path / "file").touch()
    found = run_ranks(2, body_init_fails, str(tmp_path), init=True)
    for case, path in enumerate([tmp_path / "file/missing", blocked]):
        assert all(str(path) in said[case][1] for said in found), found
        told = "zero.Init: data-parallel rank 1 could not go on: " + found[1][case][1]
        assert found[0][case] == ("RuntimeError", told)
        assert found[1][case][0] != "RuntimeError"
    assert [said[2] for said in found] == [(None, "True")] * 2


def forward_wide_net(net, x):
    x = beside(net.weights[0], x)
    for weight in net.weights:
        x = torch.tanh(x.float() @ weight.float())
    return x


def wide_net():
    """Parameters in 16 bits that are computed with in fp32: torch 1.13 has no matrix products of fp16 on a CPU."""
    generator = torch.Generator().manual_seed(0)
    return Parts(
        forward_wide_net,
        weights=torch.nn.ParameterList(
            [torch.nn.Parameter(torch.randn(12, 12, generator=generator) / 4) for _ in range(5)]
        ),
    )


@pytest.mark.any_device
@pytest.mark.parametrize("world", [1, 2])
@on_ranks(init=True)
def test_fp16_is_equal_to_the_bit(rank, world, folder):
    def trained(offload):
        fp16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
        with with_fp16():
            engine = make(world, offload, model=wide_net(), fp16=fp16, gradient_clipping=0.1)
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + rank)
            take_step(engine, engine(torch.randn(4, 12, generator=generator)).square().mean() * 4)
        assert 0 < engine.skipped_steps < 6, "the first loss scale is too large, and comes down"
        assert dtype_of(engine) == torch.float16
        return engine, (engine.skipped_steps, engine.optimizer.cur_scale)

    equal_bits(trained, None, {"device": "cpu"}, nvme(folder), nvme(folder, max_in_cpu=200))


# ---- zero.Init, and what is asked of parameters -------------------------------------------------------------------
@pytest.mark.any_device
@pytest.mark.parametrize("world, remote", [(1, "nvme"), (2, "cpu"), (2, "nvme")])
@on_ranks(init=True)
def test_parameters_go_where_they_rest_as_they_are_made(rank, world, remote, folder):
    torch.manual_seed(3)
    section = {"stage": 3, "offload_param": nvme(folder) if remote == "nvme" else {"device": "cpu"}}
    with deepspeed.zero.Init(
        remote_device=remote, config_dict_or_path={"zero_optimization": section}, dtype=torch.float32
    ):
        model = make_net()
    assert all(p.ds_handle.offloaded for p in model.parameters())
    if remote == "nvme":
        assert len(files_of(folder, rank)) == len(list(model.parameters()))
        first = next(model.parameters())
        path = pathlib.Path(folder) / f"zero_stage_3/float32params/rank{rank}/{first.ds_id}_param.tensor.swp"
        assert path.stat().st_size == first.ds_tensor.numel() * 4
        stored = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
        assert torch.equal(stored, first.ds_tensor.cpu())
        changed = torch.full_like(first.ds_tensor, 0.25)
        first.ds_tensor.data = changed
        assert torch.equal(torch.Tensor(first.ds_tensor), changed)
        first.ds_tensor.data = stored
    before = [p.ds_handle.shard.clone() for p in model.parameters()]
    engine = make(world, section["offload_param"], model=model)
    assert identical(before, [p.ds_handle.shard for p in model.parameters()])
    if remote == "nvme":
        assert files_of(folder, rank) == sorted(f"{p.ds_id}_param.tensor.swp" for p in model.parameters())
    train_engine(engine, 2, rank, world)
    param = next(model.parameters())
    with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
        if rank == 0:
            param.data.fill_(0.5)
    master = safe_get_full_fp32_param(param)
    assert master.shape == param.ds_shape and bool((master == 0.5).all())
    safe_set_full_fp32_param(param, torch.full(tuple(param.ds_shape), 0.75))
    assert bool((value_of(param) == 0.75).all())
    train_engine(engine, 1, rank, world, start=2)


@pytest.mark.any_device
@on_ranks(2, init=True)
def test_inference_without_an_optimizer(rank, world, folder):
    # A model of weights that are larger than the pages to which copies of files are rounded.
    model = seeded(lambda: torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]))
    x = waves(3, 64)
    with torch.no_grad():
        expected = model(x)
    engine = make(world, nvme(folder), model=model, optimizer=False)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(engine(x.to(engine.device)).cpu(), expected)
    assert engine.core.storage.usage()["device"] < sum(p.ds_numel for p in model.parameters()) * 4


# ---- checkpoints --------------------------------------------------------------------------------------------------
@pytest.mark.any_device
@on_ranks(2, init=True)
def test_checkpoints_are_those_of_a_run_without(rank, world, folder):
    saved = []
    for number, offload in enumerate((None, nvme(folder))):
        engine = after_steps(make(world, offload, bf16={"enabled": True}), 2, rank, world)
        engine.save_checkpoint(f"{folder}/saved{number}", tag="t")
        saved.append(last_of(after_steps(engine, 2, rank, world, start=2)))
    assert identical(*saved)
    names = [sorted(p.name for p in pathlib.Path(f"{folder}/saved{n}/t").iterdir()) for n in (0, 1)]
    assert names[0] == names[1]
    whole = [get_fp32_state_dict_from_zero_checkpoint(f"{folder}/saved{n}", tag="t") for n in (0, 1)]
    assert identical(*whole)
    for number, offload in enumerate((nvme(folder), {"device": "cpu"})):  # each from the other's
        engine = load_into(make(world, offload, bf16={"enabled": True}), f"{folder}/saved{number}", tag="t")
        assert identical(saved[0], last_of(after_steps(engine, 2, rank, world, start=2))), number


# ---- files --------------------------------------------------------------------------------------------------------
_SCRIPT = """
    import sys, time
    import torch
    import deepspeed
    model = torch.nn.Linear(64, 64)
    drive = {"device": "nvme", "nvme_path": sys.argv[1]}
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {
              "stage": 3, "offload_param": {**drive, "max_in_cpu": 0}, "offload_optimizer": drive}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()
    print("ready", flush=True)
    if len(sys.argv) > 2:
        time.sleep(600)
"""


def _start(folder, *more):
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    env.update(LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_SCRIPT), str(folder), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        text=True,
    )


def _ready(process):
    said = []
    for line in process.stdout:
        said.append(line)
        if line == "ready\n":
            return
    raise AssertionError("".join(said))


def _files_below(folder):
    return sorted(str(path) for path in pathlib.Path(folder).rglob("*") if path.is_file())


def body_next(rank, world, folder, section):
    """Another run in the same folder: what it says."""
    zero = {section: nvme(folder) if section == "offload_param" else {"device": "nvme", "nvme_path": folder}}
    return str(refused(RuntimeError, None, make, world, zero=zero))


@pytest.mark.slow
def test_files_end_with_their_run_and_those_of_a_living_one_are_its_own(tmp_path):
    stays, ends = _start(tmp_path, "stay"), None
    try:
        _ready(stays)
        left = _files_below(tmp_path)
        assert len(files_of(tmp_path, 0)) == 2 and len(left) > 4
        assert f"is in use: process {stays.pid}" in run_ranks(1, body_next, str(tmp_path), "offload_param")[0]
        assert f"is in use: process {stays.pid}" in run_ranks(1, body_next, str(tmp_path), "offload_optimizer")[0]
        assert _files_below(tmp_path) == left, "those of a living run stay"
        stays.send_signal(signal.SIGKILL)
        stays.wait()
        assert _files_below(tmp_path) == left
        ends = _start(tmp_path)
        out = ends.communicate(timeout=100)[0]
        assert ends.returncode == 0, out
        assert not _files_below(tmp_path), "what a killed run has left is removed, and a run that ends leaves nothing"
    finally:
        for process in (stays, ends):
            if process is not None:
                process.kill()
                process.communicate()


# ---- faults -------------------------------------------------------------------------------------------------------
@on_ranks(2, init=True)
def test_a_file_that_is_cut_is_an_error_of_all_ranks(rank, world, folder):
    """A file that is gone: tests/cpp/zero/param_offload_test.cpp."""
    engine = after_steps(make(world, nvme(folder)), 1, rank, world)
    torch.distributed.barrier()
    if rank == 1:
        for path in (pathlib.Path(folder) / "zero_stage_3/float32params/rank1").iterdir():
            os.truncate(path, 3)
    began = time.monotonic()
    error = refused((OSError, RuntimeError), None, train_engine, engine, 2, rank, world, start=1)
    results = together(type(error).__name__, str(error), time.monotonic() - began)
    assert all("float32params/rank1/" in text for _, text, _ in results), results
    assert "data-parallel rank 1 could not go on" in results[0][1]
    assert results[1][0] == "OSError", results[1]
    assert max(took for _, _, took in results) < 5


# ---- bad input ----------------------------------------------------------------------------------------------------
@on_ranks(1, init=True)
def test_bad_input_is_named_with_what_would_work(rank, world, folder):
    def error(kind, offload):
        return str(refused(kind, None, make, world, offload))

    pathlib.Path(f"{folder}/file").touch()
    said = error(OSError, nvme(f"{folder}/file"))
    assert "zero_optimization.offload_param.nvme_path" in said and "is not a folder" in said
    said = error(ValueError, nvme(folder, buffer_size=10))
    assert "buffer_size is 10 elements" in said and "set it to at least" in said
    size = int(said.split("set it to at least ")[1].split()[0])
    make(world, nvme(folder, buffer_size=size)).destroy()
    assert "buffer_count is 0" in error(ValueError, nvme(folder, buffer_count=0))
    refused(
        ValueError,
        "nvme_path",
        deepspeed.zero.Init,
        remote_device="nvme",
        config_dict_or_path={"zero_optimization": {"stage": 3}},
    )
    refused(
        ValueError,
        "remote_device is None, 'none', 'cpu' or 'nvme', not 'disk'",
        deepspeed.zero.Init,
        remote_device="disk",
    )
