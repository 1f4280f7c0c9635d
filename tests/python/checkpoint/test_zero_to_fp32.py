"""fp32 weights out of checkpoints: whose they are does not matter, and memory does not grow with the model."""

import glob
import json
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch

from deepspeed.checkpoint.convert import export
from deepspeed.formats import weight_files
from deepspeed.formats.lazy_tensor import LazyTensor
from deepspeed.formats.safetensors_file import read_safetensors
from deepspeed.formats.torch_archive import RefusedClass, load
from deepspeed.utils import zero_to_fp32, zero_to_torch
from deepspeed.utils.zero_to_fp32 import (
    GatheredTensor,
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    to_torch_tensor,
)
from places import PEERS
from processes import run_after_torch, succeeded
from refusals import refused
from zero_folders import weights_of, write_checkpoint

SHAPES = [{"a.weight": (13, 7), "b.weight": (13, 13)}, {"a.bias": (13,), "n.weight": (1,), "scale": ()}]
FROZEN = {
    "f.weight": torch.arange(35.0).view(5, 7).bfloat16(),
    "f.ids": torch.tensor([2**40 + 1, -3, 5]),  # no floating point: it stays as it is
    "f.mask": torch.tensor([True, False]),
    "f.empty": torch.zeros(0, 3, dtype=torch.int32),
}
BUFFERS = {"count": torch.tensor(3), "mean": torch.ones(2, dtype=torch.bfloat16)}
SHARED = {"c.weight": "b.weight"}


def checkpoint(folder, stage, ranks, **options):
    groups = weights_of(SHAPES)
    write_checkpoint(folder, groups, stage, ranks, frozen=FROZEN, buffers=BUFFERS, shared=SHARED, **options)
    trained = {name: value for group in groups for name, value in group.items()}
    frozen = {**FROZEN, "f.weight": FROZEN["f.weight"].float()}
    return {**BUFFERS, "mean": torch.ones(2), **frozen, **trained, "c.weight": trained["b.weight"]}


def same(found, expected):
    return list(found) == list(expected) and all(
        found[name].dtype == expected[name].dtype
        and found[name].shape == expected[name].shape
        and torch.equal(found[name], expected[name])
        for name in expected
    )


def read_back(folder):
    """The state dict in a folder of .bin or .safetensors files, and the index if there is one."""
    found, index = {}, None
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            index = json.loads(path.read_text())
        else:
            found.update(read_file(path))
    return found, index


def read_file(path):
    if str(path).endswith(".bin"):
        return torch.load(path)
    return {name: value.read() for name, value in read_safetensors(path)[0].items()}


@pytest.mark.parametrize("path", sorted(glob.glob(f"{PEERS}/stage[123]*")), ids=os.path.basename)
def test_weights_of_another_implementation(path):
    found = get_fp32_state_dict_from_zero_checkpoint(path)
    with np.load(os.path.join(path, "expected.npz")) as stored:
        expected = {name[5:]: stored[name] for name in stored if name.startswith("fp32.")}
        frozen = torch.from_numpy(stored["lp.f.weight"]).float()
    assert expected and set(expected) <= set(found)
    assert same({name: found[name] for name in expected}, {n: torch.from_numpy(v) for n, v in expected.items()})
    assert torch.equal(found["f.weight"], frozen)  # at stage 1 too, where the other implementation leaves it out
    if "c.weight" in found:
        assert found["c.weight"] is found["b.weight"]
    without = get_fp32_state_dict_from_zero_checkpoint(path, exclude_frozen_parameters=True)
    assert set(found) - set(without) == {"f.weight"}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_of_any_stage_and_number_of_ranks(stage, ranks, tmp_path):
    expected = checkpoint(tmp_path, stage, ranks)
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert same(found, expected) and found["c.weight"] is found["b.weight"]
    lazy = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="step", lazy_mode=True)
    assert not any(torch.is_tensor(value) for value in lazy.values())
    assert torch.equal(lazy["a.weight"].contiguous(), expected["a.weight"]) and same(to_torch_tensor(lazy), expected)
    empty = to_torch_tensor(lazy, return_empty_tensor=True)
    assert {n: (v.shape, v.dtype) for n, v in empty.items()} == {n: (v.shape, v.dtype) for n, v in expected.items()}


@pytest.mark.parametrize("safe", [False, True], ids=["bin", "safetensors"])
@pytest.mark.parametrize("size", ["5GB", None, "700B", "0.5KiB", 1])
def test_files_and_index(size, safe, tmp_path):
    expected = checkpoint(tmp_path, 2, 3)
    out = tmp_path / "out"
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(out), size, safe)
    found, index = read_back(out)
    assert same({name: found[name] for name in expected}, expected)
    names = sorted(os.listdir(out))
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    if size in ("5GB", None):
        assert names == [f"{stem}.{ending}"] and index is None
        return
    assert names[0] == f"{stem}-00001-of-{len(names) - 1:05d}.{ending}" and names[-1] == f"{stem}.{ending}.index.json"
    assert set(index["weight_map"]) == set(expected) and set(index["weight_map"].values()) == set(names[:-1])
    held = expected if safe else {n: v for n, v in expected.items() if n != "c.weight"}
    assert index["metadata"]["total_size"] == sum(v.numel() * v.element_size() for v in held.values())
    assert all(name in read_file(out / file) for name, file in index["weight_map"].items())
    limit = weight_files.parse_size(size)
    for file in names[:-1]:
        inside = {n for n, where in index["weight_map"].items() if where == file and n in held}
        assert len(inside) == 1 or sum(held[n].numel() * held[n].element_size() for n in inside) <= limit
    if not safe:
        both = torch.load(out / index["weight_map"]["b.weight"])
        assert both["c.weight"] is both["b.weight"]


@pytest.mark.parametrize(
    "text, size", [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2 GiB", 2**31), ("1.5kb", 1500), (7, 7), ("7", 7)]
)
def test_sizes(text, size):
    assert weight_files.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "five", "-5GB", "5GBit", "0", True, "0.1"])
def test_no_sizes(text, tmp_path):
    checkpoint(tmp_path, 1, 1)
    given = (str(tmp_path), str(tmp_path / "out"), text)
    refused(ValueError, "max_shard_size", convert_zero_checkpoint_to_fp32_state_dict, *given)
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_said(tmp_path):
    refused(ValueError, "latest", get_fp32_state_dict_from_zero_checkpoint, str(tmp_path))
    checkpoint(tmp_path, 2, 2)
    refused(FileNotFoundError, "another", get_fp32_state_dict_from_zero_checkpoint, str(tmp_path), tag="another")
    second = tmp_path / "step" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    second.rename(tmp_path / "kept")
    refused(ValueError, "Expected 2 .* found 1 files", get_fp32_state_dict_from_zero_checkpoint, str(tmp_path))
    torch.save({"optimizer_state_dict": {}}, second)
    refused(ValueError, "not a zero checkpoint.*zero_stage", get_fp32_state_dict_from_zero_checkpoint, str(tmp_path))
    os.replace(tmp_path / "kept", second)
    torch.save({"module": {}}, tmp_path / "step" / "mp_rank_00_model_states.pt")
    refused(ValueError, "not a model state checkpoint", get_fp32_state_dict_from_zero_checkpoint, str(tmp_path))
    os.remove(tmp_path / "step" / "mp_rank_00_model_states.pt")
    refused(FileNotFoundError, "model_states", get_fp32_state_dict_from_zero_checkpoint, str(tmp_path))


@pytest.mark.parametrize("path", sorted(glob.glob(f"{PEERS}/stage0*")), ids=os.path.basename)
def test_a_checkpoint_without_zero_says_so(path):
    refused(FileNotFoundError, "not a ZeRO checkpoint.*zero_stage", get_fp32_state_dict_from_zero_checkpoint, path)


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_that_do_not_add_up(stage, tmp_path):
    write_checkpoint(tmp_path, weights_of(SHAPES), stage, 2)
    names = sorted(glob.glob(f"{tmp_path}/step/*model_states.pt"))
    for size, words in (((130, 9), "too few"), ((13, 1), "something is wrong")):
        for name in names:
            state = torch.load(name)
            state["param_shapes"][0]["b.weight"] = torch.Size(size)
            torch.save(state, name)
        refused(ValueError, words, get_fp32_state_dict_from_zero_checkpoint, str(tmp_path))


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    checkpoint(tmp_path, 2, 1)
    path = tmp_path / "step" / "mp_rank_00_model_states.pt"
    state = torch.load(path)
    state["client"] = subprocess.CompletedProcess([], 0)
    torch.save(state, path)
    refused(RefusedClass, "subprocess.CompletedProcess", get_fp32_state_dict_from_zero_checkpoint, str(tmp_path))


def test_a_model_takes_the_weights(tmp_path):
    model = torch.nn.Linear(7, 13)
    groups = [{"weight": torch.randn(13, 7)}, {"bias": torch.randn(13)}]
    write_checkpoint(tmp_path, groups, 3, 2)
    assert load_state_dict_from_zero_checkpoint(model, str(tmp_path)) is model
    assert torch.equal(model.weight, groups[0]["weight"]) and torch.equal(model.bias, groups[1]["bias"])


def test_the_parsers_give_tensors(tmp_path):
    checkpoint(tmp_path, 3, 2)
    folder = str(tmp_path / "step")
    stage, ranks, flats = zero_to_fp32.parse_optim_states(zero_to_fp32.get_optim_files(folder), folder)
    assert (stage, ranks, len(flats), len(flats[0])) == (3, 2, 2, 2)
    assert all(torch.is_tensor(flat) for rank in flats for flat in rank)
    states = zero_to_fp32.parse_model_states(zero_to_fp32.get_model_state_files(folder))
    assert states[0].shared_params == [["c.weight", "b.weight"]]
    assert torch.equal(states[0].buffers["mean"], BUFFERS["mean"])
    assert states[1].frozen_param_fragments["f.weight"].numel() == 18
    assert zero_to_fp32.get_model_state_file(folder, 3) == f"{folder}/zero_pp_rank_0_mp_rank_00_model_states.pt"
    refused(FileNotFoundError, "", zero_to_fp32.get_model_state_file, folder, 2)
    refused(FileNotFoundError, "", zero_to_fp32.get_model_state_file, f"{folder}/none", 3)


def test_files_come_in_the_order_of_their_ranks(tmp_path):
    for rank in (10, 9, 2, 1, 0):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    found = [os.path.basename(path).split("_")[3] for path in zero_to_fp32.get_optim_files(str(tmp_path))]
    assert found == ["0", "1", "2", "9", "10"]


def test_a_gathered_tensor_joins_the_slices_of_ranks():
    flats = [[torch.arange(0.0, 5), torch.arange(5.0, 9)], [torch.arange(10.0, 15), torch.arange(15.0, 19)]]
    weight = GatheredTensor(flats, [0, 5, 9], 3, 4, torch.Size([7, 1]))
    assert weight.contiguous().reshape(-1).tolist() == [3, 4, 5, 6, 13, 14, 15]
    assert zero_to_fp32.zero3_partitioned_param_info(7, 2) == (4, 1)
    assert zero_to_fp32.zero3_partitioned_param_info(8, 2) == (4, 0)


def test_partitioned_experts_are_refused(tmp_path):
    checkpoint(tmp_path, 3, 1)
    path = tmp_path / "step" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({**torch.load(path), "ds_autoep_layers": [{"name": "moe"}]}, path)
    refused(NotImplementedError, "AutoEP", get_fp32_state_dict_from_zero_checkpoint, str(tmp_path))


# ---- the script ------------------------------------------------------------------------------------------------------
# Hides DeepSpeed, which may be installed where the tests run.
ALONE = """
import runpy, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "deepspeed":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(folder, *arguments, fails=False):
    """Runs the script of a folder by a Python that does not see DeepSpeed: what it says."""
    done = run_after_torch(ALONE, os.path.join(folder, "zero_to_fp32.py"), *arguments, PYTHONPATH="")
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr


@pytest.mark.sample("values")
@pytest.mark.parametrize("safe", [False, True], ids=["bin", "safetensors"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_script_runs_with_torch_alone(stage, safe, tmp_path):
    expected = checkpoint(tmp_path, stage, 2)
    path = export.write_script(str(tmp_path))
    assert path == str(tmp_path / "zero_to_fp32.py") and os.access(path, os.X_OK)
    run_script(tmp_path, tmp_path, tmp_path / "out", *(["--safe_serialization"] if safe else []))
    found = read_back(tmp_path / "out")[0]
    assert same({name: found[name] for name in expected}, expected)
    more = ["--max_shard_size", "500B", "-t", "step", "--exclude_frozen_parameters", "-d"]
    run_script(tmp_path, tmp_path, tmp_path / "parts", *more)
    found, index = read_back(tmp_path / "parts")
    assert set(expected) - set(found) == set(FROZEN) and index is not None


@pytest.mark.parametrize("path", sorted(glob.glob(f"{PEERS}/stage[123]-bf16*")), ids=os.path.basename)
def test_the_script_reads_files_of_another_implementation(path, tmp_path):
    export.write_script(str(tmp_path))
    run_script(tmp_path, path, tmp_path / "out")
    assert same(read_back(tmp_path / "out")[0], get_fp32_state_dict_from_zero_checkpoint(path))


def test_the_script_refuses_and_fails_as_the_module_does(tmp_path):
    export.write_script(str(tmp_path))
    said = run_script(tmp_path, tmp_path, tmp_path / "out", fails=True)
    assert "ValueError" in said and "latest" in said
    checkpoint(tmp_path, 2, 1)
    path = tmp_path / "step" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path), "client": subprocess.CompletedProcess([], 0)}, path)
    said = run_script(tmp_path, tmp_path, tmp_path / "out", fails=True)
    assert "RefusedClass" in said and "subprocess.CompletedProcess" in said


def test_a_script_that_cannot_be_made_executable_is_only_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "chmod", mock.Mock(side_effect=PermissionError(1, "Operation not permitted")))
    said = []
    monkeypatch.setattr(export.logger, "warning", said.append)
    assert os.path.exists(export.write_script(str(tmp_path)))
    assert "cannot be made executable" in said[0]


def test_modules_with_the_same_name_in_them_are_not_joined():
    modules = {"first": '"""."""\ndef _helper():\n    pass\n', "second": '"""."""\n_helper = 3\n'}
    refused(ValueError, "first and second both have a _helper", export.bundle, modules)


# ---- memory ----------------------------------------------------------------------------------------------------------
MEASURE = """
import sys, runpy
import torch
def high():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024
before = high()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("PEAK", before, high())
"""


OTHER_CASE = pytest.mark.every("0.7 GB of files for a case like its neighbour")


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, safe",
    [(3, True), *(pytest.param(*case, marks=OTHER_CASE) for case in [(2, False), (2, True), (3, False)])],
    ids=["3-safetensors", "2-bin", "2-safetensors", "3-bin"],
)
def test_memory_does_not_grow_with_the_model(stage, safe, tmp_path):
    """360 MB of weights, the largest of them 280 MB: less than 256 MB above what ``import torch`` takes."""
    groups = [{"large": torch.ones(70 << 20), **{f"w{i}": torch.full((10 << 20,), float(i)) for i in range(2)}}]
    write_checkpoint(tmp_path, groups, stage, 2)
    del groups
    script = export.write_script(str(tmp_path))
    command = [sys.executable, "-I", "-c", MEASURE, script, str(tmp_path), str(tmp_path / "out")]
    out = succeeded(subprocess.run(command + ["--safe_serialization"] * safe, capture_output=True, text=True))
    before, peak = map(int, out.stdout.split("PEAK")[1].split())
    assert peak - before < 256, f"{peak - before} MB above {before} MB"
    (written,) = os.listdir(tmp_path / "out")
    assert os.path.getsize(tmp_path / "out" / written) > 360 << 20


# ---- what is written -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("write", [weight_files.write_torch, weight_files.write_safetensors])
def test_a_full_disk_leaves_what_was_there(write, tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_text("before")

    class Failing(weight_files.StoredWeight):
        def chunks(self):
            yield next(super().chunks())
            raise OSError(28, "No space left on device")

    weights = {"x": Failing([(torch.ones(3), 0, 3)], (3,), torch.float32)}
    refused(OSError, f"cannot write {path}: No space left", weight_files.write_whole, str(path), write, weights)
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["x"]


def test_a_structure_keeps_its_ties_and_its_other_values(tmp_path):
    tied, buffer = torch.randn(3, 4), torch.arange(3)
    value = {"a": tied, "b": tied, "rest": [1, "x", {"c": buffer.t()}], "t": torch.randn(4, 3).t()}
    weight_files.write_torch(str(tmp_path / "x"), value)
    for found in (torch.load(tmp_path / "x"), load(tmp_path / "x")):
        assert found["a"] is found["b"] and torch.equal(found["a"], tied)
        assert found["rest"][:2] == [1, "x"] and torch.equal(found["rest"][2]["c"], buffer)
        assert torch.equal(found["t"], value["t"])


def test_every_record_begins_at_a_multiple_of_64(tmp_path):
    weight_files.write_torch(str(tmp_path / "x"), {str(n): torch.ones(n) for n in range(1, 20)})
    found = load(tmp_path / "x", lazy=True)
    assert all(isinstance(value, LazyTensor) and value.memory.source.offset % 64 == 0 for value in found.values())


@pytest.mark.every("66,000 tensors")
def test_more_tensors_than_a_short_directory_holds(tmp_path):
    weight_files.write_torch(str(tmp_path / "x"), {str(n): torch.tensor([n]) for n in range(66000)})
    found = torch.load(tmp_path / "x")
    assert len(found) == 66000 and found["65999"].item() == 65999


@pytest.mark.every("4 GB of disk")
def test_more_than_four_gigabytes(tmp_path):
    """Read back by range, and by Python's zipfile, which knows zip64 from elsewhere."""
    import zipfile  # noqa: PLC0415

    large = torch.zeros(1, dtype=torch.uint8).expand((1 << 32) + 5)
    pieces = [(torch.zeros(1 << 26, dtype=torch.uint8), 0, 1 << 26)] * 64 + [(torch.arange(5, dtype=torch.uint8), 0, 5)]
    weights = {"large": weight_files.StoredWeight(pieces, large.shape, torch.uint8), "small": torch.arange(3.0)}
    weight_files.write_torch(str(tmp_path / "x"), weights)
    found = load(tmp_path / "x", lazy=True)
    assert found["large"].numel() == large.numel()
    assert found["large"].read_range((1 << 32) - 1, 6).tolist() == [0, 0, 1, 2, 3, 4]
    assert torch.equal(found["small"].read(), torch.arange(3.0))
    with zipfile.ZipFile(tmp_path / "x") as archive:
        assert archive.getinfo("archive/data/0").file_size == large.numel()
        assert archive.read("archive/data/1") == torch.arange(3.0).numpy().tobytes()


@pytest.mark.parametrize("name, dtype", [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_weights_in_a_chosen_dtype(name, dtype, tmp_path, capsys):
    expected = checkpoint(tmp_path, 3, 2)
    out = tmp_path / "out"
    assert zero_to_torch.main([str(tmp_path), str(out), "--dtype", name, "--safe_serialization"]) == 0
    found, _ = read_back(out)
    for key, value in expected.items():
        wanted = value.to(dtype) if value.is_floating_point() else value
        assert found[key].dtype == wanted.dtype and torch.equal(found[key], wanted), key
    assert f"Saved {name} state dict" in capsys.readouterr().out
    assert zero_to_torch.main([str(tmp_path / "none"), str(out)]) == 1 and "none" in capsys.readouterr().err
    refused(
        ValueError, "dtype is torch.int8", convert_zero_checkpoint_to_state_dict, str(tmp_path), str(out), torch.int8
    )
