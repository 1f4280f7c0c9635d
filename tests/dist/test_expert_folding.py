"""Experts of an unchanged model that ranks share beside layers that they cut (``expert_parallel`` with
``tensor_parallel.autotp_size``): against the same model in one process."""

import argparse
import functools
import re

import pytest
import torch

from auto_ep_runs import batch, check, config, follows, steps_of, train_one
from deepspeed import comm as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.autoep_universal import validate_folding_metadata
from deepspeed.module_inject import explain
from deepspeed.module_inject.auto_ep import AutoEP, source_state_dict
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.module_inject.auto_ep_folding import build_folding_spec, mark_autoep_folding_partial_router_parameter
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups, safe_get_full_grad
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.zero.parameters.sharded_parameter import is_sharded
from engine_models import step_losses
from folded_models import folded_model_of, moe_model_of
from harness import on_ranks, run_ranks
from moe_models import Loops, moe_layer, plain_name, plain_run
from moe_models import batch as moe_batch
from refusals import refused
from runs import engine_of, load_into, together, weights
from sampling import every_case

SGD = {"lr": 0.05, "momentum": 0.9}
MODELS = [("mixtral", "listed"), ("qwen2_moe", "stacked"), ("deepseek_v3", "stacked"), ("deepseek_v2", "listed")]
# As transformers has them: it cuts experts, which are shared here, and sums the gradients of routers.
PLAN = {
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.block_sparse_moe.gate": "replicated_with_grad_allreduce",
    "model.layers.*.block_sparse_moe.experts.*.w1": "colwise",
    "model.layers.*.block_sparse_moe.experts.*.w2": "rowwise",
    "model.layers.*.block_sparse_moe.experts.*.w3": "colwise",
}
train_folded = functools.partial(train_one, make=folded_model_of)


def folded(world, stage, ep_size, **more):
    """Two ranks cut the dense layers."""
    return config(world, stage, ep_size, **{"tensor_parallel": {"autotp_size": 2}, **more})


# ---- training --------------------------------------------------------------------------------------------------------
def training_body(rank, world, cases, expected):
    for family, form, stage, ep_size, more in cases:
        more, model = {"optimizer": {"type": "SGD", "params": SGD}, **more}, folded_model_of(family, form)
        model._tp_plan = more.pop("plan", None)
        engine = engine_of(model, folded(world, stage, ep_size, **more))
        case, tensor = (family, form, stage, ep_size), engine.parallel.mp_world_size
        follows(engine, engine.parallel.dp_rank, expected[family, form], case, make=folded_model_of)
        figures = engine.moe_statistics().values()
        assert all(sum(one["tokens_per_expert"]) == 2 * 8 * world // tensor for one in figures), case
        assert all((one["exchange_bytes"] > 0) == (ep_size > 1) for one in figures), case
        assert len(set(together(*(one["exchange_bytes"] for one in figures)))) == 1, case  # of all ranks
        engine.destroy()


def trained_as_in_one_process(world, cases, tensor=2):
    sgd = functools.partial(torch.optim.SGD, **SGD)
    expected = {case[:2]: train_folded(case[0], world // tensor, 3, optimizer=sgd, form=case[1]) for case in cases}
    run_ranks(world, training_body, cases, expected, init=True)


def test_two_ranks_that_cut_the_dense_layers_share_the_experts():
    checks = {"expert_parallel": {"enabled": True, "autoep_size": 2, "validate_folding_routing": True}}
    cases = [
        (*MODELS[0], 0, 1, {}),
        (*MODELS[0], 1, 2, {"plan": PLAN}),
        (*MODELS[1], 1, 2, checks),
        (*MODELS[2], 2, 2, {}),
        (*MODELS[3], 3, 1, {}),
    ]
    cases += [(*model, stage, size, {}) for model in MODELS for stage in range(4) for size in (1, 2)] * every_case()
    trained_as_in_one_process(2, cases)


def test_four_ranks_share_more_experts_than_there_are_data_parallel_ranks():
    chunks = {"moe": {"overlap_chunks": 2}}
    cases = [(*MODELS[0], 1, 4, {}), (*MODELS[1], 0, 2, chunks), (*MODELS[2], 3, 4, {}), (*MODELS[3], 2, 2, {})]
    cases += [(*model, stage, size, {}) for model in MODELS for stage in range(4) for size in (1, 2, 4)] * every_case()
    trained_as_in_one_process(4, cases)


def test_four_ranks_cut_the_dense_layers_and_have_copies_of_experts():
    """Copies of experts lie on the tensor-parallel ranks, which are all ranks."""
    wide = {"tensor_parallel": {"autotp_size": 4}}
    trained_as_in_one_process(4, [(*MODELS[0], stage, 2, wide) for stage in (0, 2, 3)], tensor=4)


# ---- checkpoints -----------------------------------------------------------------------------------------------------
FAMILY = "deepseek_v3"
GATHER = {"gather_16bit_weights_on_model_save": True}


def engine_at(world, stage, ep_size, tensor, **more):
    """An engine whose data-parallel ranks have 4 samples in all."""
    more = {"zero": GATHER if stage == 3 else {}, **more}
    more = {"tensor_parallel": {"autotp_size": tensor}, "train_batch_size": 4 * tensor, **more}
    return engine_of(folded_model_of(FAMILY), config(world, stage, ep_size, **more))


def loaded(rank, world, folder, expected, cases, **more):
    """Engines of other ``cases`` have the parameters of one process after they have loaded the checkpoint."""
    for case in cases:
        engine = engine_at(world, *case, **more)
        with torch.no_grad():
            engine.module.model.layers[1].mlp.expert_bias.zero_()
        load_into(engine, folder)
        check(engine, rank, expected, folded_model_of)
        engine.destroy()


def checkpoint_body(rank, world, folder, expected, ways):
    for number, (form, first, *others) in enumerate(ways):
        engine = engine_at(world, *first, checkpoint={"writer": {"format": form}})
        steps_of(engine, engine.parallel.dp_rank, 2)
        engine.save_checkpoint(f"{folder}/{number}", tag="t")
        engine.save_16bit_model(f"{folder}/{number}", "whole.bin")
        engine.destroy()
        loaded(rank, world, f"{folder}/{number}", expected, others)
    if rank == 0:
        given = {"input_folder": f"{folder}/0/t", "output_folder": f"{folder}/0/u", "keep_temp_folder": False}
        more = {"num_extract_workers": 1, "num_merge_workers": 1, "strict": True, "inject_missing_state": False}
        ds_to_universal.main(argparse.Namespace(**given, **more))
    dist.barrier()
    loaded(rank, world, f"{folder}/0", expected, [(2, 2, 2)], checkpoint={"load_universal": True})


def test_checkpoints_load_at_any_degree_and_become_files_of_the_unchanged_model(tmp_path):
    expected = train_folded(FAMILY, 2, 2)[1]
    ways = [
        ["torch", (1, 4, 2), (3, 2, 2), (0, 2, 1)],
        ["safetensors", (2, 2, 2), (1, 1, 4), (3, 4, 1)],
        ["torch", (3, 4, 2), (0, 1, 2)],
        ["torch", (0, 2, 2), (1, 4, 2)],
    ]
    run_ranks(4, checkpoint_body, str(tmp_path), expected, ways, init=True)
    model = folded_model_of(FAMILY)
    specs = AutoEP(model, AutoEPConfig(enabled=True)).ep_parser()
    states = [torch.load(tmp_path / str(number) / "whole.bin") for number in range(len(ways))]
    states += [get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / str(number)), "t") for number in (0, 2)]
    for state in states:
        found = source_state_dict(state, specs)
        assert set(found) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=5e-6)


# ---- layers that the script has made ---------------------------------------------------------------------------------
def own_engine(rank, world, ep_size, drop, stage, tensor=2, sliced=False, **more):
    """An engine with a layer of ``deepspeed.moe``, and a function of the names of its parameters that gives those of
    the same model in one process. ``sliced``: the ranks cut experts, too."""
    layer = moe_layer(4, ep_size, 2, drop, False, 1.0, enable_expert_tensor_parallelism=sliced)
    number = rank // tensor if sliced else rank
    moe, first = layer.deepspeed_moe, number % ep_size * layer.num_local_experts
    own = {first + number: one for number, one in enumerate(moe.experts.deepspeed_experts)}
    more = {"tensor_parallel": {"autotp_size": tensor}, "optimizer": {"type": "SGD", "params": SGD}, **more}
    settings = config(world, stage, ep_size, expert_parallel={"enabled": False}, train_batch_size=4 * tensor, **more)
    return engine_of(moe_model_of(layer, moe.gate.wg, own), settings), lambda name: plain_name(name, first)


def own_layer_body(rank, world, cases, expected):
    data = rank // 2
    for ep_size, drop, stage, sliced in cases:
        engine, named = own_engine(rank, world, ep_size, drop, stage, sliced=sliced)
        losses, params = expected[drop]
        found = step_losses(engine, (moe_batch(step, data) for step in range(3)))
        assert found == pytest.approx([step[data] for step in losses], abs=3e-6), (ep_size, drop, stage)
        for name, value in weights(engine).items():
            torch.testing.assert_close(value, params[named(name)], rtol=1e-4, atol=5e-6)
        weight = engine.module.blocks[0].layer.deepspeed_moe.experts.deepspeed_experts[0][0].weight
        assert is_sharded(weight) or len(weight) == (rank % 2 * -1 + 5 if sliced else 9)
        engine.destroy()
        groups.clear()


def own_layers_in_one_process(steps, drop):
    layer, sgd = Loops(4, 2, drop, False, 1.0), functools.partial(torch.optim.SGD, **SGD)
    net = plain_run(moe_model_of(layer, layer.wg, dict(enumerate(layer.experts))), 2, steps, sgd)
    return net.losses, {name: value.detach() for name, value in net.model.state_dict().items()}


def test_layers_with_experts_of_the_script_beside_cut_layers():
    cases = [(4, True, 2, False), (2, False, 1, False), (1, True, 0, False), (4, False, 3, False)]
    cases += [(2, True, 0, True), (2, False, 2, True), (1, False, 1, True), (2, False, 3, True)]
    expected = {drop: own_layers_in_one_process(3, drop) for drop in (False, True)}
    run_ranks(4, own_layer_body, cases, expected, init=True)


# Checkpoints, each saved in the first way and loaded in the others: ranks that share experts, stage, ranks that cut
# layers, and whether they cut the experts, too.
OWN_CHECKPOINTS = [
    ["torch", (4, 1, 2, False), (4, 2, 1, False), (2, 0, 4, False), (2, 2, 2, True)],
    ["safetensors", (4, 3, 2, False), (2, 1, 1, False), (1, 2, 2, True)],
    ["torch", (2, 2, 2, True), (2, 2, 2, True), (4, 3, 1, False), (4, 1, 2, False)],
    ["torch", (2, 0, 2, True), (1, 1, 4, True)],
    ["safetensors", (2, 1, 2, True), (2, 0, 2, False)],
]


def own_checkpoint_body(rank, world, folder, expected):
    for tag, (form, *cases) in enumerate(OWN_CHECKPOINTS):
        for number, (ep_size, stage, tensor, sliced) in enumerate(cases):
            more = {"checkpoint": {"writer": {"format": form}}, "zero": GATHER if stage == 3 else {}}
            engine, named = own_engine(rank, world, ep_size, False, stage, tensor, sliced, **more)
            if number == 0:
                step_losses(engine, (moe_batch(step, rank // 2) for step in range(2)))
                engine.save_checkpoint(folder, tag=str(tag))
                engine.save_16bit_model(folder, f"whole{tag}.bin")
            else:
                load_into(engine, folder, tag=str(tag))
            for name, value in weights(engine).items():
                torch.testing.assert_close(value, expected[named(name)], rtol=1e-4, atol=5e-6)
            engine.destroy()
            groups.clear()


def test_checkpoints_of_layers_of_the_script_load_at_any_degree(tmp_path):
    expected = own_layers_in_one_process(2, False)[1]
    run_ranks(4, own_checkpoint_body, str(tmp_path), expected, init=True)
    states = [torch.load(tmp_path / f"whole{tag}.bin") for tag in range(len(OWN_CHECKPOINTS))]
    states += [get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag) for tag in ("0", "2")]
    for state in states:
        assert {plain_name(name, 0) for name in state} == set(expected)
        for name, value in state.items():
            torch.testing.assert_close(value, expected[plain_name(name, 0)], rtol=1e-4, atol=5e-6)


# ---- refusals, marks and facts ---------------------------------------------------------------------------------------
@on_ranks(2, init=True)
def test_different_routes_and_layers_that_do_not_fit_are_named(rank, world):
    experts = {"enabled": True, "autoep_size": 2, "validate_folding_routing": True}
    engine = engine_of(folded_model_of("mixtral"), folded(world, 1, 2, expert_parallel=experts))
    with torch.no_grad():
        engine.module.model.layers[1].block_sparse_moe.router.gate.weight.mul_(1 + rank)
    words = "layer 'model.layers.1.block_sparse_moe': routing differs .*combine_weights of rank 1 .* of rank 0"
    refused(RuntimeError, words, engine, batch(0, 0))
    engine.destroy()
    more = {"use_data_before_expert_parallelism": True}
    refused(ValueError, "leave it out", engine_of, folded_model_of("mixtral"), folded(world, 1, 2, **more))
    sliced = {"enabled": True, "autoep_size": 1, "expert_tensor_parallel_size": 2}
    words = "expert_tensor_parallel_size: 2 ranks cannot share one expert"
    refused(ValueError, words, engine_of, folded_model_of("mixtral"), folded(world, 1, 1, expert_parallel=sliced))
    layer = MoE(6, torch.nn.Linear(6, 6), 2, enable_expert_tensor_parallelism=True)
    model = moe_model_of(layer, layer.deepspeed_moe.gate.wg, {})
    words = "'blocks.0.layer': enable_expert_tensor_parallelism: nothing of its experts can be cut"
    refused(ValueError, words, engine_of, model, folded(world, 1, 1, expert_parallel=None))


def test_the_table_of_a_cut_leaves_experts_to_the_ranks_that_share_them():
    model, section = folded_model_of("mixtral"), {"tensor_parallel": {"autotp_size": 2}}
    experts = {"expert_parallel": {"enabled": True, "autoep_size": 4}}
    shared, whole = (explain(model, {**section, **more}) for more in (experts, {}))
    assert "layers.0.block_sparse_moe.experts: of a layer with experts, 0.25 of its weights" in shared
    assert "block_sparse_moe.experts.0.w1.weight: dimension" in whole and "experts.0.w1" not in shared
    found = [int(re.search(r"rank 0: ([\d,]+) bytes", text)[1].replace(",", "")) for text in (shared, whole)]
    of_experts = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name)
    slices = 3 / 5  # of 5 channels
    assert found[1] - found[0] == pytest.approx(4 * of_experts * (slices - 1 / 4))


@on_ranks(2, init=True)
def test_parameters_with_a_part_of_the_gradient_are_summed_once(rank, world):
    """Here each rank sees all of it, so that the sum is twice that."""
    for by_hand in (False, True):
        model = folded_model_of("mixtral")
        mark_autoep_folding_partial_router_parameter(model.head.bias)
        sections = {"expert_parallel": None} if by_hand else {}
        engine = engine_of(model, folded(world, 0 if not by_hand else 1, 2, **sections))
        if by_hand:
            spec = build_folding_spec(world_size=2, pp_size=1, tp_size=2, ep_size=2)
            for _ in range(2):
                engine.optimizer.configure_autoep_folding_tp_gradient_reduction(spec)
            engine.optimizer.configure_autoep_folding_tp_gradient_reduction(None)
            wrong = build_folding_spec(world_size=4, pp_size=1, tp_size=4, ep_size=2)
            configure = engine.optimizer.configure_autoep_folding_tp_gradient_reduction
            refused(ValueError, "tp_size=4, and 2 ranks", configure, wrong)
        engine.backward(engine(batch(0, 0)))
        found = [safe_get_full_grad(param) for param in (model.head.bias, model.head.weight)]
        plain = folded_model_of("mixtral")
        plain(batch(0, 0)).backward()
        torch.testing.assert_close(found[0], 2 * plain.head.bias.grad)
        torch.testing.assert_close(found[1], plain.head.weight.grad)
        engine.destroy()


def facts_body(rank, world, folder):
    engine = engine_at(world, 2, 4, 2)
    engine.save_checkpoint(folder, tag="t")
    dist.barrier()
    path = f"{folder}/t/zero_pp_rank_{rank // 2}_mp_rank_{rank % 2:02d}_optim_states.pt"
    found = torch.load(path)["folding"]
    kinds = found["param_families"]
    validate_folding_metadata(found, tp_size=2, ep_size=4, tp_rank=rank % 2, ep_rank=rank, zero_partition_count=2,
                              zero_partition_group=[rank % 2, rank % 2 + 2], zero_partition_rank=rank // 2)  # fmt: skip
    prefix = "model.layers.1"
    assert kinds[f"{prefix}.mlp.experts.w1"] == "expert" and kinds[f"{prefix}.mlp.router.gate.weight"] == "router"
    assert kinds[f"{prefix}.self_attn.q_proj.weight"] == "dense" == kinds[f"{prefix}.mlp.shared_experts.up_proj.weight"]
    state, spec = {}, engine._experts.folding.spec
    engine.load_moe_state_dict(folder, "t", state, False, engine.module, folding_spec=spec, checkpoint_mp_rank=rank % 2)
    torch.testing.assert_close(state[f"{prefix}.mlp.experts.w1"], engine.module.model.layers[1].mlp.experts.w1.detach())
    other = build_folding_spec(world_size=4, pp_size=1, tp_size=2, ep_size=2)
    refused(ValueError, "ep_size=2, and layer .* among 4", engine.load_moe_state_dict, folder, "t", {}, False,
            engine.module, folding_spec=other)  # fmt: skip


def test_files_of_optimizer_states_say_which_ranks_share_what(tmp_path):
    run_ranks(4, facts_body, str(tmp_path), init=True)


@on_ranks(2, init=True)
def test_sequences_that_are_split_between_blocks_are_refused(rank, world):
    section = {"tensor_parallel": {"autotp_size": 2, "split_sequence": True}}
    refused(ValueError, "split_sequence is true, and 'model.layers.0.*is of a layer with experts", engine_of,
            folded_model_of("mixtral"), folded(world, 1, 2, **section))  # fmt: skip
