"""Folders of pipeline, tensor and data-parallel ranks seen as grids: names, degrees, layers, merged states."""

import os

import pytest
import torch

import megatron_files
from deepspeed.checkpoint import (
    DeepSpeedCheckpoint,
    ZeROCheckpoint,
    constants,
    get_layer_ckpt_name_for_rank,
    get_model_3d_descriptor,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
    merge_state,
    model_3d_desc,
    reshape_meg_2d_parallel,
)
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from refusals import refused


@pytest.mark.parametrize(
    "target, cells",
    [
        ((1, 1, 1), {(0, 0, 0): [0, 4, 1, 5, 2, 6, 3, 7]}),
        ((1, 2, 1), {(0, 0, 0): [0, 4, 2, 6], (0, 0, 1): [1, 5, 3, 7]}),
        ((2, 1, 1), {(0, 0, 0): [0, 4, 1, 5], (0, 1, 0): [2, 6, 3, 7]}),
        ((1, 2, 2), {(0, 0, 0): [0, 4], (0, 0, 1): [1, 5], (1, 0, 0): [2, 6], (1, 0, 1): [3, 7]}),
        ((2, 2, 2), {(0, 0, 0): [0], (0, 1, 1): [3], (1, 0, 0): [4], (1, 1, 1): [7]}),
    ],
)
def test_a_grid_becomes_a_smaller_one(target, cells):
    source, wanted = model_3d_desc(2, 2, 2), model_3d_desc(*target)
    assert source.can_reshape(wanted)[0]
    grids = source.reshape(wanted)
    assert len(grids) == wanted.dp_degree and all((grid.pp_degree, grid.tp_degree) == target[:2] for grid in grids)
    assert {(dp, pp, tp): grids[dp].get_data(pp_index=pp, tp_index=tp) for dp, pp, tp in cells} == cells
    assert sorted(rank for grid in grids for rank in grid.get_data()) == list(range(8))


def test_what_does_not_fit_is_said(capsys):
    source = model_3d_desc(2, 2, 2)
    possible, errors = source.can_reshape(model_3d_desc(4, 2, 3))
    assert not possible and "PP" in errors[0] and "DP" in errors[1] and len(errors) == 2
    refused(ValueError, "PP degree 2 cannot become 4", source.reshape, model_3d_desc(4, 1, 1))
    assert source.is_valid(1, 1, 1) == (True, [])
    assert not source.is_valid(0, 2, 0)[0] and source.world_size() == 8 and "(2, 2, 2)" in source.get_desc()
    refused(ValueError, "divisor", reshape_meg_2d_parallel, 3, 1, 2, 1)
    grid = reshape_meg_2d_parallel(2, 2, 1, 2, verbose=True)
    assert grid.get_data(0, 0) == [0, 2] and grid.get_data(tp_index=1) == [1, 3]
    assert "(0, 1) = [1, 3]" in capsys.readouterr().out


def test_states_merge():
    a = {"t": torch.ones(2), "n": [1, torch.zeros(1)], "scalar": torch.tensor(3.0), "text": "x"}
    b = {"t": torch.zeros(1), "n": [2, torch.ones(2)], "scalar": torch.tensor(4.0), "text": "y"}
    merged = merge_state(a, b)
    assert merged["t"].tolist() == [1, 1, 0] and merged["n"][1].tolist() == [0, 1, 1]
    assert merged["n"][0] == 1 and float(merged["scalar"]) == 3 and merged["text"] == "x"
    refused(ValueError, "lists of 1 and 2 items at n", merge_state, {"n": [1]}, {"n": [1, 2]})
    refused(ValueError, "cannot merge", merge_state, {"n": 1}, {"n": "1"})
    assert merge_state({"n": 1, "left": 2}, {"n": 1, "more": 3}) == {"n": 1, "left": 2, "more": 3}


def test_names():
    assert get_model_ckpt_name_for_rank("f", "03") == os.path.join("f", "mp_rank_03_model_states.pt")
    assert get_zero_ckpt_name_for_rank("f", 2, 1) == os.path.join("f", "zero_pp_rank_2_mp_rank_01_optim_states.pt")
    assert get_layer_ckpt_name_for_rank("f", "layer_03", 1) == os.path.join("f", "layer_03-model_01-model_states.pt")
    assert names.OPTIM_STATES(dp_rank=2, prefix="bf16_").startswith(constants.BF16_ZERO_FILE_PREFIX)
    assert constants.BF16_ZERO_FILE_PREFIX == "bf16_zero_pp_rank_"


NUMBERS = {
    "dp_rank": 11, "mp_rank": 3, "layer": 7, "expert": 5, "expp_rank": 2, "rank": 12, "prefix": "bf16_",
    "slices": "-model_03",
}  # fmt: skip


@pytest.mark.parametrize("kind", names.PUBLISHED, ids=lambda kind: kind.template)
def test_a_name_is_known_again_as_one_of_its_kind(kind, tmp_path):
    name = kind(**NUMBERS)
    found = kind.find(name)
    assert found and found == {key: NUMBERS[key] for key in found} and kind(**found) == name
    assert [other for other in names.PUBLISHED if other.find(name) is not None] == [kind]
    assert names.is_published_file(name) and not names.is_published_file(f"my_{name}")
    assert kind.path("f", **NUMBERS) == os.path.join("f", name)
    for other in (name, name.replace("3", "10"), name.replace("3", "9"), "notes.pt"):
        (tmp_path / other).touch()
    there = list(kind.found_in(tmp_path))
    assert "notes.pt" not in there and there == sorted(there, key=names.natural_key) and set(there) >= {name}


def test_names_that_only_others_write():
    assert names.EXPERT_STATES.find("expert_4_mp_rank_00_model_states.pt") == {"layer": None, "expert": 4, "mp_rank": 0}
    assert names.OPTIM_STATES.find("fp16_zero_pp_rank_1_mp_rank_00_optim_states.pt")["prefix"] == "fp16_"
    assert names.LAYER_STATES.find("layer_03-model_01_model_states.pt") == {"layer": 3, "slices": "-model_01"}
    assert names.RUN_STATES.find("run_rank_1_state.pt") is None  # ours have five digits


def test_clones_save_only_what_they_hold(tmp_path):
    flat = torch.zeros(10000)
    item = {"a": flat[:3], "b": [flat[3:5], "text"], "c": (torch.ones(1, requires_grad=True),), "d": [{"lr": 1}]}
    cloned = clone_tensors_for_torch_save(item)
    item["d"][0]["lr"] = 2  # lists and dicts without tensors are copies, too
    assert cloned["d"] == [{"lr": 1}]
    torch.save(cloned, tmp_path / "cloned.pt")
    assert (tmp_path / "cloned.pt").stat().st_size < 5000
    assert cloned["a"].tolist() == [0, 0, 0] and not cloned["c"][0].requires_grad and cloned["b"][1] == "text"
    flat.fill_(1)
    assert cloned["b"][0].tolist() == [0, 0]


@pytest.fixture
def folder(tmp_path):
    megatron_files.write(str(tmp_path / "step7"))
    return str(tmp_path / "step7")


def test_the_degrees_of_a_folder(folder, tmp_path):
    degrees = {folder: (2, 2, 2)}
    for grid, more in (((1, 2, 3), {}), ((1, 1, 2), {}), ((1, 2, 2), {"stage": 3})):
        megatron_files.write(str(tmp_path / f"{grid}"), *grid, layers=False, **more)
        degrees[str(tmp_path / f"{grid}")] = grid
    for path, grid in degrees.items():
        found = get_model_3d_descriptor(path)
        assert (found.pp_degree, found.tp_degree, found.dp_degree) == grid


def test_a_checkpoint_of_a_grid(folder, capsys):
    checkpoint = DeepSpeedCheckpoint(folder)
    assert (checkpoint.pp_degree, checkpoint.tp_degree, checkpoint.dp_degree) == (2, 2, 2)
    assert not (
        checkpoint.is_change_pp_degree() or checkpoint.is_change_tp_degree() or checkpoint.is_change_dp_degree()
    )
    assert checkpoint.get_embedding_layer_id() == "layer_01" and checkpoint.get_final_norm_layer_id() == "layer_06"
    assert checkpoint.get_pp_transformer_map(1) == ["layer_04", "layer_05"]
    assert checkpoint.get_iteration() == 7 and checkpoint.get_args() == {"hidden_size": 4}
    assert checkpoint.get_checkpoint_info() == {"name": "small"}
    assert checkpoint.get_checkpoint_info("universal_checkpoint_info")["original_vocab_size"] == 10
    assert [os.path.basename(path) for path in checkpoint.get_2d_parallel_files(1, 0)] == ["mp_rank_01_model_states.pt"]
    layers = checkpoint.get_transformer_state(tp_index=1, pp_index=0)
    assert [float(layer["self_attention.dense.weight"][0, 0]) for layer in layers] == [210, 310]
    for show in (
        checkpoint.show_2d_mapping, checkpoint.show_tp_embedding_map, checkpoint.show_tp_final_norm_map,
        checkpoint.show_pp_transformer_map, checkpoint.show_transformer_file_map,
    ):  # fmt: skip
        show()
    assert "layer_04" in capsys.readouterr().out
    checkpoint.validate_files()
    os.unlink(checkpoint.get_embedding_files(0)[0])
    refused(FileNotFoundError, "layer_01-model_00", checkpoint.validate_files)


def test_it_is_shown_as_of_fewer_ranks(folder):
    checkpoint = DeepSpeedCheckpoint(folder, tp_degree=1, pp_degree=1, dp_degree=1)
    assert checkpoint.is_change_tp_degree() and checkpoint.is_change_pp_degree() and checkpoint.is_change_dp_degree()
    embedding = checkpoint.get_embedding_state(0)
    assert embedding["word_embeddings.weight"].shape == (6, 2)
    assert embedding["position_embeddings.weight"].shape == (2, 2)  # every rank has it whole
    layers = checkpoint.get_transformer_state(0, 0)
    assert len(layers) == 4 and layers[0]["self_attention.dense.weight"].tolist() == [[200, 200, 210, 210]] * 2
    assert layers[0]["self_attention.query_key_value.weight"].shape == (4, 2)
    assert layers[0]["input_layernorm.weight"].tolist() == [200, 200]
    assert checkpoint.get_final_norm_state(0)["weight"].tolist() == [600, 600]
    merged = checkpoint.get_2d_parallel_state(0, 0)
    assert len(checkpoint.get_2d_parallel_files(0, 0)) == 4 and merged["global_steps"] == 7
    assert len(checkpoint.get_zero_files(0, 0, 0)) == 8
    refused(ValueError, "tp_index 1", checkpoint.get_embedding_state, 1)


def test_optimizer_states_of_a_grid(folder, capsys):
    checkpoint = ZeROCheckpoint(folder)
    assert (checkpoint.get_src_pp_degree(), checkpoint.get_src_tp_degree(), checkpoint.get_src_dp_degree()) == (2, 2, 2)
    assert checkpoint.get_src_world_size() == 8
    assert checkpoint.get_file_indices_for_rank(pp_index=1, tp_index=0, dp_index=1) == [6]
    assert checkpoint.get_files_for_rank(1, 0, 1)[0].endswith("zero_pp_rank_1_mp_rank_02_optim_states.pt")
    checkpoint.reshape(model_3d_desc(2, 2, 1))
    checkpoint.print_3d_index_map("index")
    checkpoint.print_3d_file_map()
    assert "pp 1, tp 0, dp 0: [2, 6]" in capsys.readouterr().out
    whole = {n: megatron_files.slice_of(n, v, 1, 2) for n, v in megatron_files.whole_parameters(0).items()}
    for strip in (True, False):
        state = checkpoint.get_state_for_rank(0, 1, 0, strip_tensor_paddings=strip)["optimizer_state_dict"]
        masters = torch.cat([value.reshape(-1) for value in whole.values()])
        assert torch.equal(state["single_partition_of_fp32_groups"][0], masters)
        moments = state["base_optimizer_state"]["state"][0]["exp_avg"]
        assert torch.equal(moments[: masters.numel()], masters * 0.5)
        assert moments.numel() - masters.numel() == (0 if strip else masters.numel() % 2)
        assert state["partition_count"] == [1]
        if strip:  # mappings count in shards without padding
            place = state["param_slice_mappings"][0]["layers.0.dense.weight"]
            assert torch.equal(
                masters[place.start : place.start + place.numel], whole["layers.0.dense.weight"].reshape(-1)
            )
    assert "optimizer_state_dict" not in checkpoint.get_state_for_rank(0, 0, 0, keys_to_ignore=["optimizer_state_dict"])


def test_incomplete_folders_are_refused(folder, tmp_path):
    refused(FileNotFoundError, "optim_states", ZeROCheckpoint, str(tmp_path))
    refused(FileNotFoundError, "nowhere", DeepSpeedCheckpoint, str(tmp_path / "nowhere"))
    os.unlink(os.path.join(folder, "zero_pp_rank_1_mp_rank_02_optim_states.pt"))
    refused(ValueError, "7 optimizer files", ZeROCheckpoint, folder)
    refused(ValueError, "degrees are wrong|files are missing", ZeROCheckpoint, folder, source_3d=model_3d_desc(2, 2, 2))
