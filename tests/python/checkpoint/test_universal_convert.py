"""Conversion to universal checkpoints: what lies in the result, by every rule, from grids of ranks and from others."""

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch

import megatron_files
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.layouts.saved_universal import UniversalState
from megatron_files import INFO, WORDS, slice_of, state_of, whole_parameters
from places import PEERS
from processes import run_python, succeeded
from refusals import refused

KINDS = ("fp32", "exp_avg", "exp_avg_sq")


def convert(source, target, **options):
    given = {"num_extract_workers": 1, "num_merge_workers": 1, **options}
    ds_to_universal.main(SimpleNamespace(input_folder=str(source), output_folder=str(target), **given))


def file_of(folder, name, state):
    return torch.load(os.path.join(folder, "zero", name, f"{state}.pt"), weights_only=False)


@pytest.fixture
def write(tmp_path):
    """A function that writes a folder, step7, for a grid of ranks."""

    def write_grid(*grid, name="step7", **options):
        megatron_files.write(str(tmp_path / name), *grid, **options)
        return tmp_path / name

    return write_grid


@pytest.fixture
def convert_into(tmp_path):
    """A function that converts the folder step7 into one beside it."""

    def convert_step7(name, **options):
        convert(tmp_path / "step7", tmp_path / name, **options)
        return tmp_path / name

    return convert_step7


def all_parameters():
    return {**whole_parameters(0), **whole_parameters(1)}


def wanted_whole(name, whole, kind):
    return state_of(name, whole, kind)[: WORDS if name == "words.weight" else None]


@pytest.mark.parametrize(
    "grid, stage", [((2, 2, 2), 1), ((1, 2, 3), 1), ((2, 1, 1), 1), ((1, 2, 3), 3), ((1, 1, 2), 3)], ids=str
)
def test_every_rule_puts_slices_together(grid, stage, tmp_path, write, convert_into):
    write(*grid, stage=stage)
    folder = convert_into("universal")
    assert (tmp_path / "latest_universal").read_text() == "universal" and not (folder / "tmp").exists()
    assert set(os.listdir(os.path.join(folder, "zero"))) == {*all_parameters(), "optimizer_state.pt"}
    for name, whole in all_parameters().items():
        for kind in KINDS:
            found = file_of(folder, name, kind)
            atol = 1e-6 if "scale" in name else 0
            torch.testing.assert_close(found["param"], wanted_whole(name, whole, kind), rtol=10 * atol, atol=atol)
            assert set(found) - {"param"} == wanted_hints(name), (name, kind)
        assert torch.load(os.path.join(folder, "zero", name, "step.pt"), weights_only=False) == 7
    assert file_of(folder, "layers.0.dense.weight", "fp32")["cat_dim"] == 1
    assert file_of(folder, "layers.0.qkv.bias", "fp32")["cat_dim"] == 0
    sub = file_of(folder, "layers.0.qkv.weight", "fp32")["sub_param_shape"]
    assert sub.shape == (megatron_files.SIZES, megatron_files.HIDDEN) and sub.partition_dim == 0
    common = torch.load(os.path.join(folder, "zero", "optimizer_state.pt"), weights_only=False)
    assert common["param_groups"] == [{"lr": 0.01, "params": [0]}] and common["zero_stage"] == stage
    copied = sorted(name for name in os.listdir(folder) if name.endswith("_states.pt"))
    assert copied == sorted(name for name in os.listdir(tmp_path / "step7") if name.endswith("model_states.pt"))


def wanted_hints(name):
    if "norm" in name or "scale" in name:
        return set()
    if "gate_up" in name:
        return {"cat_dim", "param_n_sub_params"}
    if name.endswith("qkv.weight"):
        return {"cat_dim", "sub_param_shape"}
    return {"cat_dim", "vocab_tensor"} if "words" in name else {"cat_dim"}


@pytest.mark.parametrize("count", [1, 2])
def test_they_are_cut_again_for_other_tensor_parallel_ranks(count, tmp_path):
    megatron_files.write(str(tmp_path / "step7"), 2, 2, 2)
    convert(tmp_path / "step7", tmp_path / "universal")
    for rank in range(count):
        named = {name: whole for name, whole in all_parameters().items() if "scale" not in name}
        local = {name: slice_of(name, whole, rank, count) for name, whole in named.items()}
        shapes = {name: value.shape for name, value in local.items()}
        saved = UniversalState(str(tmp_path / "universal"), rank, count, group_names=[[*shapes]], shapes=shapes)
        for name, value in local.items():
            for kind in KINDS:
                ((offset, numel, reader),) = saved.pieces(name, kind)
                assert (offset, numel) == (0, value.numel())
                wanted = state_of(name, value, kind)
                if name == "words.weight" and rank == count - 1:
                    wanted = wanted.clone()
                    wanted[wanted.shape[0] - 2 :] = 0  # words that do not exist
                assert torch.equal(reader.read_range(0, numel), wanted.reshape(-1)), (name, kind)
                assert torch.equal(reader.read_range(3, 1), wanted.reshape(-1)[3:4])
            assert saved.step(name) == 7


def test_a_shape_that_does_not_fit_is_said(tmp_path):
    megatron_files.write(str(tmp_path / "step7"), 1, 1, 1)
    convert(tmp_path / "step7", tmp_path / "universal")
    name = "layers.0.dense.weight"
    saved = UniversalState(str(tmp_path / "universal"), shapes={name: torch.Size([8, 4])})
    refused(ValueError, r"dense.weight.*\(4, 8\).*\(8, 4\)", saved.pieces(name, "fp32")[0][2].read_range, 0, 1)


def test_widths_of_sub_parameters_that_differ(tmp_path):
    """Three heads of key and value on two ranks: the first has two of them."""
    widths = [[4, 2], [2, 1]]
    whole = torch.arange(27.0).reshape(9, 3)
    info = {
        keys.PARAMETER_WITH_SUB_PARAMS: [{"patterns": ["w"], "shape": ((6, 3), 3), "partition_dim": 0}],
        keys.SUB_PARAM_SHARD_WIDTHS: {"w": widths},
    }
    slices = [torch.cat([whole[0:4], whole[6:8]]), torch.cat([whole[4:6], whole[8:9]])]
    for rank, value in enumerate(slices):
        for half, part in enumerate(value.reshape(-1).split(5)):
            ds_to_universal.write_shard(str(tmp_path / "tmp"), "w", rank, "fp32", half, part)
    shapes = [value.shape for value in slices]
    left = ds_to_universal.merge_tp_slices(info, str(tmp_path / "zero"), str(tmp_path / "tmp"), 2, ("w", shapes))
    assert left == set()
    assert torch.equal(torch.load(tmp_path / "zero" / "w" / "fp32.pt", weights_only=False)["param"], whole)


def same_files(one, other):
    """The number of files, all of which are the same in ``other``."""
    paths = [path for path in one.rglob("*") if path.is_file()]
    assert [path for path in paths if path.read_bytes() != (other / path.relative_to(one)).read_bytes()] == []
    return len(paths)


@pytest.mark.slow
def test_workers_do_the_same(tmp_path):
    megatron_files.write(str(tmp_path / "step7"), 1, 2, 2)
    workers = {"num_extract_workers": 2, "num_merge_workers": 2}
    convert(tmp_path / "step7", tmp_path / "universal", **workers, keep_temp_folder=True)
    convert(tmp_path / "step7", tmp_path / "alone")
    assert same_files(tmp_path / "alone" / "zero", tmp_path / "universal" / "zero") == 4 * len(all_parameters()) + 1
    shards = os.listdir(tmp_path / "universal" / "tmp" / "layers.0.dense.weight" / "1")
    assert {"fp32.00", "exp_avg.00", "exp_avg_sq.00", "step.00"} <= set(shards)
    info = {**INFO, keys.TP_REPLICATED_PARAMETER_PATTERNS: [*INFO[keys.TP_REPLICATED_PARAMETER_PATTERNS], ".*bias"]}
    megatron_files.write(str(tmp_path / "wrong"), 1, 2, 2, info=info)
    (tmp_path / "latest_universal").unlink()
    words, folders = "bias.*different values", (tmp_path / "wrong", tmp_path / "universal")
    refused(ValueError, words, convert, *folders, num_merge_workers=2)  # as a worker has found
    assert not (tmp_path / "latest_universal").exists()


@pytest.mark.slow
def test_the_command_line(tmp_path):
    megatron_files.write(str(tmp_path / "step7"), 1, 2, 2)
    command = [
        sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(tmp_path / "step7"),
        "--output_folder", str(tmp_path / "universal"), "--num_extract_workers", "2", "--keep_temp_folder",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    succeeded(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120))
    convert(tmp_path / "step7", tmp_path / "alone")
    assert same_files(tmp_path / "alone" / "zero", tmp_path / "universal" / "zero")
    assert (tmp_path / "universal" / "tmp").exists() and not (tmp_path / "alone" / "tmp").exists()
    assert refused(SystemExit, "", ds_to_universal.parse_arguments, ["--help"]).code == 0


MEMORY = """
import resource, sys
from types import SimpleNamespace
from deepspeed.checkpoint.ds_to_universal import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
main(SimpleNamespace(input_folder=sys.argv[1], output_folder=sys.argv[2], num_extract_workers=1, num_merge_workers=1))
print("grown by", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_memory_is_that_of_a_parameter(tmp_path):
    """Sixteen parameters of 4 MB with two states, 192 MB in all, grow the process by a quarter of that at most."""
    params = {f"p{i}": torch.full((1 << 20,), float(i)) for i in range(16)}
    os.makedirs(tmp_path / "step7")
    model = {"module": {}, "param_shapes": [{name: value.shape for name, value in params.items()}]}
    torch.save(model, tmp_path / "step7" / "mp_rank_00_model_states.pt")
    state = {"optimizer_state_dict": megatron_files.flat(params, 0, 1, 1)}
    torch.save(state, tmp_path / "step7" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    done = run_python(MEMORY, tmp_path / "step7", tmp_path / "universal")
    assert done.returncode == 0 and int(done.stdout.rsplit("grown by", 1)[1]) < 48, (done.stdout, done.stderr)
    assert torch.equal(file_of(tmp_path / "universal", "p3", "exp_avg")["param"], params["p3"] * 0.5)


def test_patterns_that_match_nothing(write, convert_into):
    write(1, 2, 1, info={**INFO, keys.PARAMETER_TO_AVERAGE_PATTERNS: ["layers.*scale", "no_such"]})
    refused(ValueError, "no_such.*no_strict", convert_into, "universal")
    refused(ValueError, "no_such", convert_into, "universal", strict=True)
    convert_into("universal", strict=False)
    convert_into("again", no_strict=True)


def test_missing_information(write, convert_into, tmp_path):
    write(1, 2, 1, info=None)
    refused(ValueError, "universal_checkpoint_info.*inject_missing_state", convert_into, "universal")
    found = file_of(convert_into("universal", inject_missing_state=True), "layers.0.qkv.bias", "fp32")["param"]
    assert torch.equal(found, whole_parameters(0)["layers.0.qkv.bias"])
    megatron_files.write(str(tmp_path / "alone"), 1, 1, 2, info=None)
    convert(tmp_path / "alone", tmp_path / "universal2")  # data parallel ranks have nothing to say


def test_information_in_the_optimizer_file(write, convert_into):
    path = write(1, 2, 1, info=None) / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(path, weights_only=False)
    state["optimizer_state_dict"][keys.UNIVERSAL_CHECKPOINT_INFO] = INFO
    torch.save(state, path)
    assert file_of(convert_into("universal"), "layers.0.dense.weight", "fp32")["cat_dim"] == 1


def test_experts_of_other_ranks_are_refused(write, convert_into):
    path = write(1, 1, 1) / "mp_rank_00_model_states.pt"
    saved = torch.load(path, weights_only=False)
    torch.save({**saved, "ds_autoep_layers": [{"module_path": "layers.0.experts"}]}, path)
    refused(ValueError, "layers.0.experts", convert_into, "universal")


def test_parameters_of_several_stages_need_a_pattern(write, convert_into):
    write(2, 1, 1, info={k: v for k, v in INFO.items() if k != keys.PIPELINE_REPLICATED_PARAMETER_PATTERNS})
    refused(ValueError, "words.weight.*pipeline_replicated_parameter_patterns", convert_into, "universal")


def test_stage_0_of_another_implementation_is_refused_with_its_reason(tmp_path):
    source = os.path.join(PEERS, "stage0-bf16-2ranks", "global_step4")
    refused(ValueError, "without ZeRO.*load_checkpoint reads them", convert, source, tmp_path / "universal")


def test_what_cannot_be_converted(tmp_path):
    megatron_files.write(str(tmp_path / "step7"), 1, 1, 2)
    refused(ValueError, "both", convert, tmp_path / "step7", tmp_path / "step7")
    refused(FileNotFoundError, "nowhere", convert, tmp_path / "nowhere", tmp_path / "universal")
    convert(tmp_path / "step7", tmp_path / "universal")
    refused(ValueError, "universal checkpoint already", convert, tmp_path / "universal", tmp_path / "again")
    unsupported = {keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS: ["qkv"]}
    refused(ValueError, "qkv", ds_to_universal._validate_autotp_conversion_support, unsupported)
    ds_to_universal._validate_autotp_conversion_support({})
    os.unlink(tmp_path / "step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    refused(FileNotFoundError, "zero_pp_rank_1", convert, tmp_path / "step7", tmp_path / "more")
    os.unlink(tmp_path / "step7" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    refused(ValueError, "no optimizer states", convert, tmp_path / "step7", tmp_path / "more")


@pytest.mark.sample("values")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_files_of_another_implementation(stage, dtype, tmp_path):
    """Masters as in expected.npz; moments, too, where it has them (stage 3; the others are compared in tests/dist)."""
    source = os.path.join(PEERS, f"stage{stage}-{dtype}-2ranks")
    convert(os.path.join(source, "global_step4"), tmp_path / "universal")
    compared = 0
    for key, value in numpy.load(os.path.join(source, "expected.npz")).items():
        kind, name = key.split(".", 1)
        if kind not in KINDS or name in ("f.weight", "c.weight", "count"):  # frozen; another name of b.weight; a buffer
            continue
        assert torch.equal(file_of(tmp_path / "universal", name, kind)["param"], torch.from_numpy(value)), key
        compared += 1
    assert compared == (24 if stage == 3 else 8)
    assert (tmp_path / "universal" / "zero" / "f.weight" / "fp32.pt").exists() == (stage == 3)
    common = torch.load(tmp_path / "universal" / "zero" / "optimizer_state.pt", weights_only=False)
    assert [group["weight_decay"] for group in common["param_groups"]] == [0.1, 0.0] and common["zero_stage"] == stage


# ---- single steps ----------------------------------------------------------------------------------------------------
def test_shards_of_stage_3_one_rank_at_a_time(tmp_path):
    megatron_files.write(str(tmp_path / "step7"), 1, 2, 2, stage=3)
    files = [
        [str(tmp_path / "step7" / f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt") for dp in range(2)]
        for tp in range(2)
    ]
    assert len(ds_to_universal._get_zero3_model_state_files(str(tmp_path / "step7"))) == 4
    saved = [tmp_path / "step7" / f"zero_pp_rank_0_mp_rank_{tp:02d}_model_states.pt" for tp in range(2)]
    shapes = [torch.load(path, weights_only=False)["param_shapes"] for path in saved]
    for place in itertools.product(range(2), range(2)):
        ds_to_universal.extract_zero_shards_stage3(
            files, shapes, 2, str(tmp_path / "tmp"), place, exclude_param_names={"words.weight"}
        )
    assert not (tmp_path / "tmp" / "words.weight").exists()
    grouped = ds_to_universal._group_per_tp_shapes(shapes, pp_degree=1, tp_degree=2)
    for name in sorted(all_parameters().keys() - {"words.weight"}):
        base = str(tmp_path / "tmp" / name)
        slices = ds_to_universal._merge_zero_shards(base, "fp32", 2, grouped[name])
        assert all(torch.equal(found, slice_of(name, all_parameters()[name], tp, 2)) for tp, found in enumerate(slices))
        assert ds_to_universal._merge_zero_shards(base, "step", 2) == [7, 7]
        assert ds_to_universal._merge_zero_shards(base, "exp_avg", 2)[1].dim() == 1
    refused(ValueError, "missing", ds_to_universal._merge_zero_shards, base, "fp32", 2, torch.Size([999]))
    given = ([{"w": torch.Size([1])}, {}], 1, 2)
    refused(ValueError, r"tensor-parallel ranks \[1\]", ds_to_universal._group_per_tp_shapes, *given)
