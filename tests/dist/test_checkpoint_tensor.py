"""Checkpoints of runs whose layers are cut over ranks (``tensor_parallel.autotp_size``): any number of tensor-parallel
and data-parallel ranks and any ZeRO stage read them, as they are and as universal ones."""

import os
import re
import subprocess
import sys
import types

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.convert.export import difference, export
from deepspeed.checkpoint.layouts import storage
from deepspeed.checkpoint.layouts.open_saved import open_run
from deepspeed.formats.safetensors_file import read_safetensors
from deepspeed.utils.param_cut import cut_of
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import run_ranks
from refusals import refused
from runs import NATIVE, SMALL_PARTS, engine_of, identical, moments, raised, settings, take_step, weights
from tensor_models import WORDS, Decoder, GPT2Block, LlamaBlock, tokens_of

SAMPLES = 4  # of a step: 1, 2 and 4 data-parallel ranks share them


def _uneven():
    """Three heads, and 41 channels of the gated unit: two ranks have unequal slices."""
    return Decoder([LlamaBlock(width=24, heads=3, shared_heads=3, inner=41) for _ in range(2)], "rotary", 24)


def _copies():
    """Two key/value heads: each has two copies on four ranks."""
    return Decoder([LlamaBlock(width=32, heads=4, shared_heads=2) for _ in range(2)], "rotary", 32)


def _fused():
    """Query, key and value in one matrix; the embedding is the head; one block and the positions are frozen."""
    model = Decoder([GPT2Block(width=32, heads=4) for _ in range(2)], "learned", 32, tied=True)
    for param in (*model.blocks[0].parameters(), *model.places.parameters()):
        param.requires_grad_(False)
    return model


MODELS = {"uneven": _uneven, "copies": _copies, "fused": _fused}


def make(name, tp, stage, world, seed=0, **more):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS[name]()
    tensor = {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    config = settings(
        stage, SAMPLES * tp // world, rate=0.003, zero=SMALL_PARTS, gradient_clipping=1.0, **tensor, **more
    )
    return engine_of(model, config)


def train(engine, step):
    """The mean loss of the same samples, whoever has them."""
    tokens = tokens_of(SAMPLES, seed=step)
    copies, copy = engine.parallel.dp_world_size, engine.parallel.dp_rank
    own = tokens.chunk(copies)[copy].to(engine.device)
    logits = engine(own)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), own[:, 1:].reshape(-1))
    total = torch.tensor([take_step(engine, loss)], dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def states(engine):
    """name -> whole weight, master and moments."""
    found = {name: [value] for name, value in weights(engine).items()}
    cuts = {name: cut_of(param) for name, param in engine.module.named_parameters()}
    for name, kinds in moments(engine).items():
        found[name] += [one if cuts[name] is None else cuts[name].join(one.contiguous()).clone() for one in kinds]
    return found


def save(rank, world, name, tp, stage, native, folder, dtype="fp32"):
    engine = make(name, tp, stage, world, checkpoint=NATIVE if native else {}, dtype=dtype)
    for step in range(2):
        train(engine, step)
    engine.save_checkpoint(folder, tag="t", client_state={"mine": 7})
    found = states(engine)
    return found, [train(engine, step) for step in (2, 3)], states(engine)


def load(rank, world, name, tp, stage, folder, universal=False, dtype="fp32"):
    more = {"checkpoint": {"load_universal": True}} if universal else {}
    engine = make(name, tp, stage, world, seed=5, dtype=dtype, **more)
    _, client_state = engine.load_checkpoint(folder, tag="universal" if universal else "t")
    assert client_state["mine"] == 7 and engine.global_steps == 2
    found = states(engine)
    return found, [train(engine, step) for step in (2, 3)], states(engine)


def check_same(saved, loaded, bits=False, gap=1e-4):
    """The states that were saved are in every rank of ``loaded``, bit by bit, and training goes on alike."""
    for found in loaded:
        assert found[0].keys() == saved[0].keys()
        for name, kinds in saved[0].items():
            assert len(found[0][name]) == len(kinds), name
            assert all(torch.equal(a, b) for a, b in zip(found[0][name], kinds)), name
        assert found[1] == (saved[1] if bits else pytest.approx(saved[1], rel=gap))
        assert not bits or identical(found[2], saved[2])


@pytest.mark.sample("values")
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("world, tp", [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("native", [False, True])
def test_the_same_ranks_go_on_bit_by_bit(name, world, tp, stage, native, tmp_path):
    saved = run_ranks(world, save, name, tp, stage, native, str(tmp_path), init=True)
    check_same(saved[0], run_ranks(world, load, name, tp, stage, str(tmp_path), init=True), bits=True)


# Ranks, tensor-parallel ranks, ZeRO stage.
BEFORE = [(1, 1, 0), (2, 1, 3), (2, 2, 1), (2, 2, 3), (4, 2, 0), (4, 2, 2), (4, 4, 1)]
AFTER = [(1, 1, 3), (2, 1, 1), (2, 2, 2), (4, 2, 3), (4, 4, 0), (3, 3, 1)]


@pytest.mark.sample("values", 8)
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("after", AFTER)
def test_any_number_of_ranks_reads_it(name, before, native, after, tmp_path):
    saved = run_ranks(before[0], save, name, *before[1:], native, str(tmp_path), init=True)
    loaded = run_ranks(after[0], load, name, *after[1:], str(tmp_path), init=True)
    check_same(saved[0], loaded)


@pytest.mark.parametrize("native", [False, True])
def test_masters_of_bf16(native, tmp_path):
    saved = run_ranks(2, save, "uneven", 2, 1, native, str(tmp_path), "bf16", init=True)
    loaded = run_ranks(4, load, "uneven", 4, 3, str(tmp_path), False, "bf16", init=True)
    check_same(saved[0], loaded, gap=0.02)


def _with_sequences(rank, world, name, folder):
    """Ranks that share sequences hold states as data-parallel ranks do."""
    engine = make(name, 2, 1, world, seed=5, sequence_parallel_size=2)
    engine.load_checkpoint(folder, tag="t")
    engine.save_checkpoint(folder, tag="t", client_state={"mine": 7})
    return states(engine)


def test_ranks_that_share_sequences_read_and_save_it(tmp_path):
    saved = run_ranks(2, save, "copies", 2, 2, False, str(tmp_path), init=True)
    for found in run_ranks(4, _with_sequences, "copies", str(tmp_path), init=True):
        assert identical(found, saved[0][0])
    check_same(saved[0], run_ranks(1, load, "copies", 1, 3, str(tmp_path), init=True))


def to_universal(folder):
    ds_to_universal.main(
        types.SimpleNamespace(input_folder=os.path.join(folder, "t"), output_folder=os.path.join(folder, "universal"))
    )


@pytest.mark.sample("values", 8)
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("after", AFTER)
def test_any_number_of_ranks_reads_the_universal_one(name, before, native, after, tmp_path):
    saved = run_ranks(before[0], save, name, *before[1:], native, str(tmp_path), init=True)
    to_universal(str(tmp_path))
    loaded = run_ranks(after[0], load, name, *after[1:], str(tmp_path), True, init=True)
    check_same(saved[0], loaded)


@pytest.mark.sample("values")
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_script_in_the_folder_joins_slices(name, stage, tmp_path):
    saved = run_ranks(4, save, name, 4 if name == "copies" else 2, stage, False, str(tmp_path), init=True)[0][0]
    command = [sys.executable, "-I", str(tmp_path / "zero_to_fp32.py"), str(tmp_path), str(tmp_path / "out")]
    made = subprocess.run([*command, "-t", "t"], capture_output=True, text=True, cwd="/")
    assert made.returncode == 0, made.stderr
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert set(found) == set(MODELS[name]().state_dict())
    for key, kinds in saved.items():
        assert torch.equal(found[key], kinds[min(1, len(kinds) - 1)]), key
    assert name != "fused" or found["lm_head.weight"] is found["embed.weight"]


@pytest.mark.sample("values")
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("native", [False, True])
def test_exports_and_comparisons_see_whole_weights(name, stage, native, tmp_path):
    saved = run_ranks(2, save, name, 2, stage, native, str(tmp_path / "a"), init=True)[0][0]
    (path,) = export(str(tmp_path / "a" / "t"), str(tmp_path / "out"))
    found = read_safetensors(path)[0]
    assert set(found) == set(MODELS[name]().state_dict())
    assert all(torch.equal(found[key].read(), kinds[min(1, len(kinds) - 1)]) for key, kinds in saved.items())
    run_ranks(1, _saves_again, name, str(tmp_path), init=True)
    assert not [
        line for line in difference(str(tmp_path / "a" / "t"), str(tmp_path / "b" / "t")) if "stage 0" not in line
    ]


def _saves_again(rank, world, name, folder):
    engine = make(name, 1, 1, world)
    engine.load_checkpoint(os.path.join(folder, "a"), tag="t")
    engine.save_checkpoint(os.path.join(folder, "b"), tag="t")


def test_slices_that_nobody_describes_are_refused(tmp_path):
    run_ranks(2, save, "uneven", 2, 1, False, str(tmp_path), init=True)
    for path in (tmp_path / "t").glob("*model_states.pt"):
        state = storage.read(str(path))
        state[keys.TENSOR_CUTS] = {"blocks.0.mlp.gate_proj.weight": [0, [7]]}
        torch.save(state, path)
    refused(RuntimeError, "t is damaged", open_run, str(tmp_path / "t"))
    for path in (tmp_path / "t").glob("*model_states.pt"):
        state = storage.read(str(path))
        del state[keys.TENSOR_CUTS], state[keys.UNIVERSAL_CHECKPOINT_INFO]
        torch.save(state, path)
    with pytest.raises(ValueError, match="slices of 2 model-parallel ranks .* convert it with ds_to_universal"):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="t")
    with pytest.raises(ValueError, match="slices of 2 model-parallel ranks: join them with ds_to_universal"):
        export(str(tmp_path / "t"), str(tmp_path / "out"))


def _save_lean(rank, world, folder):
    engine = make("fused", 2, 1, world)
    train(engine, 0)
    train(engine, 1)
    engine.save_checkpoint(folder, tag="t", client_state={"mine": 7}, exclude_frozen_parameters=True)
    return states(engine)


def test_frozen_parameters_may_be_left_out(tmp_path):
    saved = run_ranks(2, _save_lean, str(tmp_path), init=True)[0]
    to_universal(str(tmp_path))
    for universal in (False, True):
        found = run_ranks(4, load, "fused", 4, 3, str(tmp_path), universal, init=True)[0][0]
        trained = {name for name, kinds in saved.items() if len(kinds) > 1}
        assert trained and all(identical(found[name], saved[name]) for name in trained)


def _other_width(rank, world, folder):
    model = Decoder([LlamaBlock(width=24, heads=3, shared_heads=3, inner=43) for _ in range(2)], "rotary", 24)
    found = []
    for tag in ("t", "universal"):
        more = {"checkpoint": {"load_universal": True}} if tag == "universal" else {}
        engine = engine_of(model, settings(1, 2, tensor_parallel={"autotp_size": 2}, **more))
        before = {name: value.clone() for name, value in engine.module.state_dict().items()}
        found.append(raised(engine.load_checkpoint, folder, tag=tag))
        assert identical(before, dict(engine.module.state_dict()))
    return found


def test_another_model_is_refused_with_both_shapes(tmp_path):
    run_ranks(1, save, "uneven", 1, 1, False, str(tmp_path), init=True)
    to_universal(str(tmp_path))
    for rank, width in enumerate((22, 21)):
        plain, universal = run_ranks(2, _other_width, str(tmp_path), init=True)[rank]
        shapes = rf"saved with shape \(41, 24\), the model has \({width}, 24\) on this rank, of \(43, 24\) in all"
        assert re.search(rf"'blocks.0.mlp.gate_proj.weight' was {shapes}", plain[1]), plain
        assert re.search(r"gate_proj.weight' has shape \(41, 24\) in .*of this model has \(43, 24\)", universal[1])


def _hands_on(rank, world, folder):
    """A checkpoint of four tensor-parallel ranks goes on with two, and the script gives back what it was given."""
    engine = make("copies", 2, 1, world)
    _, client_state = engine.load_checkpoint(folder, tag="t")
    engine.save_checkpoint(folder, tag="second", client_state=client_state)
    return client_state


def test_what_a_load_returns_can_be_saved(tmp_path):
    run_ranks(4, save, "copies", 4, 1, False, str(tmp_path), init=True)
    client_state = run_ranks(2, _hands_on, str(tmp_path), init=True)[0]
    assert keys.TENSOR_CUTS not in client_state
    assert client_state[keys.UNIVERSAL_CHECKPOINT_INFO][keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS]
    second = storage.read(str(tmp_path / "second" / "mp_rank_00_model_states.pt"))
    assert len(second[keys.TENSOR_CUTS]["blocks.0.self_attn.k_proj.weight"][1]) == 2
    assert not second[keys.UNIVERSAL_CHECKPOINT_INFO][keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS]


@pytest.mark.parametrize("name", list(MODELS))
def test_the_published_metadata_is_enough_without_copies(name, tmp_path):
    """Without our own key the patterns decide, as for other tools."""
    ranks = 4 if name == "copies" else 2
    saved = run_ranks(ranks, save, name, ranks, 1, False, str(tmp_path), init=True)
    for path in (tmp_path / "t").glob("*model_states.pt"):
        state = storage.read(str(path))
        info = state[keys.UNIVERSAL_CHECKPOINT_INFO]
        del state[keys.TENSOR_CUTS]
        torch.save(state, path)
    if name == "copies":
        assert r"blocks\.\d+\.self_attn\.k_proj\.weight$" in info[keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS]
        refused(ValueError, "cannot be put together: .*k_proj", to_universal, str(tmp_path))
        return
    if name == "fused":
        assert info[keys.PARAMETER_WITH_SUB_PARAMS][0]["shape"] == (32, (32, 32, 32))
    ds_to_universal.main(
        types.SimpleNamespace(
            input_folder=str(tmp_path / "t"), output_folder=str(tmp_path / "universal"), no_strict=True
        )
    )
    for key, kinds in saved[0][0].items():
        for kind, value in zip(("fp32", "exp_avg", "exp_avg_sq"), kinds[1:]):
            assert torch.equal(torch.load(tmp_path / "universal" / "zero" / key / f"{kind}.pt")["param"], value), key


def _on_two_nodes(rank, world, folder, loads):
    os.environ["CROSS_RANK"] = str(rank // 2)  # two nodes of two ranks, each with a disk of its own
    disk, more = os.path.join(folder, f"disk{rank // 2}"), {"checkpoint": {"use_node_local_storage": True}}
    engine = make("copies", 4 if loads else 2, 3, world, seed=5 if loads else 0, **more)
    if loads:
        engine.load_checkpoint(disk, tag="t")
    else:
        train(engine, 0)
        engine.save_checkpoint(disk, tag="t")
    return states(engine)


def test_a_node_gets_the_slices_that_others_have(tmp_path):
    saved, loaded = (run_ranks(4, _on_two_nodes, str(tmp_path), loads, init=True) for loads in (False, True))
    assert all(identical(found, saved[0]) for found in loaded)
