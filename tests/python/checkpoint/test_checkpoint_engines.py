"""Checkpoint engines, what files note about grids of ranks, and experts of several ranks."""

import os
import pickle
import re
import zlib
from types import SimpleNamespace

import pytest
import torch

from deepspeed.checkpoint import autoep_universal, ds_to_universal
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.autoep_universal import make_folding_metadata, validate_folding_metadata
from deepspeed.checkpoint.engines import ENGINES
from deepspeed.registry import UnknownNameError
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import _checkpoint_parallel_metadata
from refusals import refused


def test_the_torch_engine(tmp_path):
    engine = ENGINES.get("torch")()
    assert isinstance(engine, TorchCheckpointEngine) and isinstance(engine, CheckpointEngine)
    info = CheckpointCommitInfo(tag="t", save_dir=str(tmp_path), save_latest=True)
    engine.create(info)
    engine.makedirs(str(tmp_path / "a" / "t"))
    engine.makedirs(str(tmp_path / "a" / "t"), exist_ok=True)
    refused(FileExistsError, "", engine.makedirs, str(tmp_path / "a" / "t"))
    path = str(tmp_path / "a" / "t" / "x.pt")
    engine.save({"x": torch.arange(3), "more": SimpleNamespace(y=1)}, path)
    assert os.listdir(tmp_path / "a" / "t") == ["x.pt"]
    found = engine.load(path, map_location="cpu")
    assert found["x"].tolist() == [0, 1, 2] and found["more"].y == 1
    engine.create("t")
    assert engine.commit("t") is True
    assert not engine.is_decoupled() and engine.is_data_parallel_writer(0) and not engine.is_data_parallel_writer(1)
    engine.set_commit_info(info)
    assert engine.get_commit_info() is info
    engine.cleanup()
    assert engine.get_commit_info() is None
    refused(UnknownNameError, "checkpoint engine.*torch", ENGINES.get, "torches")


class RunsCode:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def keep(storage, location):
    return storage


@pytest.mark.parametrize("name", ["torch", "python", "fast", "mock"])
@pytest.mark.parametrize("where", [None, "cpu", {"cpu": "cpu"}, {"cuda:0": "cpu"}, keep])
def test_no_engine_runs_what_a_file_asks_for(name, where, tmp_path):
    path = str(tmp_path / "x.pt")
    engine = ENGINES.get(name)(SimpleNamespace(writer=None, checkpoint_serialization=True))
    torch.save({"x": RunsCode(tmp_path / "ran")}, path)
    refused(pickle.UnpicklingError, "RunsCode|open|builtins", engine.load, path, map_location=where)
    torch.save({"x": torch.arange(3)}, path)
    assert engine.load(path, map_location=where)["x"].tolist() == [0, 1, 2] and not (tmp_path / "ran").exists()


def without_addresses(content):
    """The bytes of a file of ``torch.save`` without the addresses, in decimal digits, by which a stream that is no
    archive names storages: pickled strings, whose lengths are 4 bytes in front of them."""
    return re.sub(rb"X.\0\0\0\d{8,}", b"address", content, flags=re.DOTALL)


@pytest.mark.parametrize("kind", ["torch", "python"])
@pytest.mark.parametrize("archive", [True, False])
def test_files_of_the_torch_engine_are_those_of_torch_save(kind, archive, tmp_path):
    engine = ENGINES.get(kind)(SimpleNamespace(writer=None, checkpoint_serialization=archive))
    value = {"x": torch.arange(1000.0), "more": [1, "a"]}
    record = engine.write_file("x.pt", value, str(tmp_path / "x.pt"))
    with open(tmp_path / "plain", "wb") as file:
        torch.save(value, file, _use_new_zipfile_serialization=archive)
    content = (tmp_path / "x.pt").read_bytes()
    expected = (tmp_path / "plain").read_bytes()
    assert content == expected if archive else without_addresses(content) == without_addresses(expected)
    assert record == {"name": "x.pt", "bytes": len(content), "crc32": zlib.crc32(content), "tensors": []}
    given = ("y.pt", value, str(tmp_path / "none" / "y.pt"))
    refused(OSError, "cannot write the checkpoint file .*none.*Check space", engine.write_file, *given)


def test_a_failed_save_of_the_torch_engine_leaves_the_file_before_it(tmp_path):
    engine, path = TorchCheckpointEngine(), str(tmp_path / "x.pt")
    engine.save({"x": 1}, path)
    refused((pickle.PicklingError, AttributeError, TypeError), "", engine.save, {"x": lambda: 2}, path)
    assert engine.load(path) == {"x": 1} and os.listdir(tmp_path) == ["x.pt"]
    refused(OSError, "cannot write .*none.*Check space", engine.save, {"x": 1}, str(tmp_path / "none" / "x.pt"))


def test_an_engine_must_do_its_work():
    refused(TypeError, "abstract", CheckpointEngine)


@pytest.mark.parametrize(
    "says, wanted",
    [
        (None, (1, 1)),
        ({"tensor_model_parallel": 4, "pipeline_model_parallel": 2}, (2, 4)),
        ({"model_parallel": 3, "pipe_parallel": 5}, (5, 3)),
    ],
)
def test_what_a_model_file_notes_of_the_grid(says, wanted):
    mpu = says and SimpleNamespace(**{f"get_{kind}_world_size": lambda size=size: size for kind, size in says.items()})
    found = _checkpoint_parallel_metadata(mpu)
    assert (found[keys.CHECKPOINT_PP_DEGREE], found[keys.CHECKPOINT_TP_DEGREE]) == wanted and len(found) == 2


def folding(**more):
    given = {"tp_size": 2, "tp_rank": 1, "ep_size": 4, "ep_rank": 3, "zero_partition_group": [0, 4],
             "zero_partition_rank": 1, "zero_partition_count": 2, "family": "expert", **more}  # fmt: skip
    return make_folding_metadata(**given)


def test_folding_metadata():
    made = folding(param_families={"w": "expert"})
    validate_folding_metadata(made, tp_size=2, ep_size=4, tp_rank=1, zero_partition_group=(0, 4), family="expert",
                              param_families={"w": "expert"}, etp_rank=0)  # fmt: skip
    for words, facts, run in (
        ("tp_size is 2, this run has 1.*ep_rank is 3, this run has 0", made, {"tp_size": 1, "ep_rank": 0}),
        ("etp_size is missing", {k: v for k, v in made.items() if k != "etp_size"}, {"tp_size": 2}),
        ("folding", None, {"tp_size": 2}),
    ):
        refused(ValueError, words, validate_folding_metadata, facts, ep_size=4, **run)


LAYER = {"moe_layer_id": 0, "module_path": "moe.experts", "num_experts": 4, "ep_size": 2, "expert_params": ["w1"]}


def test_what_model_files_say_of_experts(tmp_path):
    sliced = {**LAYER, "checkpoint_format": "zero3_partitioned", "checkpoint_format_version": 1}
    assert ds_to_universal._uses_zero3_partitioned_autoep_metadata([sliced])
    assert not ds_to_universal._uses_zero3_partitioned_autoep_metadata({"moe": LAYER})
    assert not ds_to_universal._uses_zero3_partitioned_autoep_metadata(None)
    other = {**LAYER, "module_path": "next"}
    assert ds_to_universal._aggregate_autoep_zero12_metadata([[LAYER], [LAYER, other], None]) == [LAYER, other]
    unlike = [[LAYER], [{**LAYER, "num_experts": 8}]]
    refused(ValueError, "moe.experts differently", ds_to_universal._aggregate_autoep_zero12_metadata, unlike)
    files = []
    for rank, model in enumerate(({"ds_autoep_layers": [LAYER]}, {"autoep_layers": [other]}, {})):
        files.append(str(tmp_path / f"{rank}.pt"))
        torch.save(model, files[-1])
    assert ds_to_universal._autoep_expert_param_names_by_rank(files) == [{"moe.experts.w1"}, {"next.w1"}, set()]


def test_files_of_experts_become_one_parameter(tmp_path):
    for expert in range(4):
        state = {"moe.experts.w1": torch.full((2, 3), float(expert)).bfloat16()}
        torch.save(state, tmp_path / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt")
    given = (str(tmp_path), str(tmp_path / "out"), [LAYER])
    autoep_universal.consolidate_autoep_expert_files(*given)
    found = torch.load(tmp_path / "out" / "zero" / "moe.experts.w1" / "fp32.pt", weights_only=False)
    assert found["param"].shape == (4, 2, 3) and found["param"].dtype == torch.float32
    assert found["param"][:, 0, 0].tolist() == [0, 1, 2, 3]
    assert found[keys.EP_IS_EXPERT_PARAM] is True and found[keys.EP_NUM_EXPERTS] == 4
    os.unlink(tmp_path / "layer_0_expert_2_mp_rank_00_model_states.pt")
    words, call = r"\[2\] of MoE layer 0", autoep_universal.consolidate_autoep_expert_files
    refused(FileNotFoundError, words, call, *given)


@pytest.mark.parametrize("data_first", [False, True])
def test_shards_of_experts_become_one_parameter(data_first, tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    for dp in range(4):  # two expert-parallel ranks, each on two data-parallel ranks
        expert_rank, copy = (dp // 2, dp % 2) if data_first else (dp % 2, dp // 2)
        shard = whole[expert_rank * 2 : expert_rank * 2 + 2].reshape(-1)[copy * 6 : (copy + 1) * 6]
        for state, value in (("fp32", shard), ("exp_avg", shard * 2), ("step", 3)):
            path = autoep_universal._zero12_fragment_path(str(tmp_path / "tmp"), "w", state, dp)
            assert path.endswith(os.path.join("w", "0", f"{state}.{dp:02d}"))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save(value, path)
    info = {"w": {"ep_size": 2, "num_experts": 4}}
    arguments = (str(tmp_path / "tmp"), str(tmp_path / "out"), info, {"w": (2, 6)}, 4, 1, data_first)
    autoep_universal.consolidate_autoep_zero12_expert_states(*arguments)
    folder = tmp_path / "out" / "zero" / "w"
    assert torch.equal(torch.load(folder / "fp32.pt", weights_only=False)["param"], whole)
    assert torch.equal(torch.load(folder / "exp_avg.pt", weights_only=False)["param"], whole * 2)
    assert torch.load(folder / "step.pt", weights_only=False) == 3
    os.unlink(autoep_universal._zero12_fragment_path(str(tmp_path / "tmp"), "w", "fp32", 3))
    refused(ValueError, "shards are missing", autoep_universal.consolidate_autoep_zero12_expert_states, *arguments)
