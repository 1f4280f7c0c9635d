"""Universal checkpoints: any ranks, stage and precision save, any others go on from the converted folder."""

import os
from types import SimpleNamespace

import pytest
import torch

import peer_model
from deepspeed.checkpoint.ds_to_universal import main as convert
from engine_models import loss_on, net_engine
from harness import on_ranks, run_ranks
from programs import WARMUP
from refusals import refused
from runs import SMALL_PARTS, moments, sgd, take_step, weights
from sampling import every_case, sample
from test_checkpoint import PRECISIONS
from test_checkpoint_peer import expectation

SIZE = 12  # of a batch: 1, 2, 3 and 4 ranks share it evenly
KINDS = ("exp_avg", "exp_avg_sq")


def make_engine(world, stage, precision, seed=0, optimizer=None, **more):
    more = {"size": SIZE, "scheduler": WARMUP, **precision, **more}
    return net_engine(world, stage, seed=seed, client=optimizer, zero=SMALL_PARTS, **more)


def train(engine, rank, world, first, steps):
    """Mean losses of the whole batch, the same whatever the number of ranks."""
    seen = []
    for step in range(first, first + steps):
        total = torch.tensor(take_step(engine, loss_on(engine, step, SIZE, rank, world)), dtype=torch.float64)
        if world > 1:
            torch.distributed.all_reduce(total)
        seen.append(float(total) / world)
    return seen


def states(engine):
    """name -> weight, and of trained parameters master, moments and step."""
    kinds = engine.stepping.core.slot_names()
    found = {(name, "lp"): value for name, value in weights(engine).items()}
    for name, tensors in moments(engine, kinds).items():
        found.update({(name, kind): one for kind, one in zip(["fp32", *kinds], tensors, strict=True)})
    steps = dict(zip(engine.stepping.names, engine.stepping.core.steps().tolist()))
    return found, steps, engine.get_lr(), engine.global_steps


def body_save(rank, world, folder, stage, precision):
    engine = make_engine(world, stage, precision)
    train(engine, rank, world, 0, 3)
    engine.save_checkpoint(folder, tag="t", client_state={"epoch": 3})
    return states(engine), train(engine, rank, world, 3, 2)


def body_load(rank, world, folder, stage, precision, tag=None):
    engine = make_engine(world, stage, precision, seed=5, checkpoint={"load_universal": True})
    path, client_state = engine.load_checkpoint(folder, tag=tag)
    assert os.path.dirname(path) == os.path.join(folder, "universal")
    assert client_state["epoch"] == 3
    return states(engine), train(engine, rank, world, 3, 2)


def to_universal(folder, tag="t", **options):
    convert(
        SimpleNamespace(
            input_folder=os.path.join(folder, tag),
            output_folder=os.path.join(folder, "universal"),
            **{"num_extract_workers": 1, "num_merge_workers": 1, **options},
        )
    )


def check_same(saved, loaded):
    for key, value in saved[0].items():
        assert value.dtype == loaded[0][key].dtype and torch.equal(value, loaded[0][key]), key
    assert saved[0].keys() == loaded[0].keys()
    assert saved[1:] == loaded[1:]


@pytest.mark.any_device("list")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_four_ranks_of_stage_2_go_on_as_others(precision, tmp_path):
    saved, losses = run_ranks(4, body_save, str(tmp_path), 2, PRECISIONS[precision])[0]
    to_universal(tmp_path)
    assert (tmp_path / "latest_universal").read_text() == "universal"
    for world, stage in [(2, 3), (1, 1), (3, 2), (2, 0)]:
        loaded, resumed = run_ranks(world, body_load, str(tmp_path), stage, PRECISIONS[precision])[0]
        check_same(saved, loaded)
        assert resumed[0] == pytest.approx(losses[0], abs=1e-6), (world, stage)
        assert resumed[1] == pytest.approx(losses[1], abs=1e-6 if precision == "fp32" else 1e-3), (world, stage)


@pytest.mark.any_device("list")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_stage_converts(stage, tmp_path):
    saved, losses = run_ranks(3 if stage == 3 else 2, body_save, str(tmp_path), stage, PRECISIONS["bf16"])[0]
    to_universal(tmp_path)
    for to_world, to_stage in [(1, 2), (2, 3)]:
        loaded, resumed = run_ranks(to_world, body_load, str(tmp_path), to_stage, PRECISIONS["bf16"])[0]
        check_same(saved, loaded)
        assert resumed[0] == pytest.approx(losses[0], abs=1e-6)


def body_momentum(rank, world, folder, stage, load):
    more = {"checkpoint": {"load_universal": True}} if load else {}
    engine = make_engine(world, stage, {}, seed=5 if load else 0, optimizer=sgd, **more)
    if load:
        engine.load_checkpoint(folder)
    else:
        train(engine, rank, world, 0, 3)
        engine.save_checkpoint(folder, tag="t")
    found = moments(engine, ["momentum_buffer"])
    momenta = {name: momentum for name, (_, momentum) in found.items() if not name.startswith("never")}
    return momenta, train(engine, rank, world, 3, 2)


@pytest.mark.any_device("list")
def test_optimizers_of_torch(tmp_path):
    momenta, losses = run_ranks(2, body_momentum, str(tmp_path), 2, False)[0]
    to_universal(tmp_path)
    assert (tmp_path / "universal" / "zero" / "first.weight" / "momentum_buffer.pt").exists()
    for world, stage in [(3, 1), (2, 3)]:
        loaded, resumed = run_ranks(world, body_momentum, str(tmp_path), stage, True)[0]
        assert all(torch.equal(value, loaded[name]) for name, value in momenta.items() if value is not None)
        assert resumed == pytest.approx(losses, abs=1e-6)


def body_first_state(rank, world, folder):
    engine = make_engine(world, 2, {}, seed=5, optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
                         checkpoint={"load_universal": True})  # fmt: skip
    name, param = next(iter(engine.module.named_parameters()))
    param.load_hp_checkpoint_state(os.path.join(folder, "universal", "zero", name), 0, 1)
    mapping = param._hp_mapping
    if mapping is None:
        return None
    start = mapping.lp_fragment_address.start
    return start, mapping.get_optim_state_fragment("momentum_buffer").clone(), mapping.hp_fragment.clone()


def test_a_state_that_the_optimizer_has_not_made_yet(tmp_path):
    momenta, _ = run_ranks(2, body_momentum, str(tmp_path), 2, False)[0]
    to_universal(tmp_path)
    found = [answer for answer in run_ranks(2, body_first_state, str(tmp_path)) if answer is not None]
    name = next(iter(momenta))
    assert found
    for start, momentum, _ in found:
        assert torch.equal(momentum, momenta[name].reshape(-1)[start : start + momentum.numel()])


def body_peer(rank, world, cases):
    for folder, stage, dtype, to_stage in cases:
        seen, expected = peer_model.what(stage, dtype), expectation(stage, dtype)
        made = {**seen["config"], "zero_optimization": {"stage": to_stage}, "checkpoint": {"load_universal": True}}
        engine = peer_model.make_engine(made, seed=5)
        _, client_state = engine.load_checkpoint(folder)
        assert client_state["note"] == "kept" and engine.get_lr() == seen["lr"]
        for name, value in weights(engine).items():
            assert torch.equal(value.float(), expected["lp", name].float()), (stage, dtype, to_stage, name)
        for name, tensors in moments(engine, KINDS).items():
            for kind, one in zip(("fp32", *KINDS), tensors):
                assert torch.equal(one, expected[kind, name]), (stage, dtype, to_stage, name, kind)
        assert engine.stepping.core.steps().tolist() == [4] * 8
        loss = float(peer_model.loss(engine, 4, rank).detach())
        if rank == 0:
            assert loss == pytest.approx(seen["next_loss_rank0"], rel=1e-6 if dtype == "fp32" else 2e-2)


@pytest.mark.parametrize("world", [1, 3])
def test_files_of_another_implementation_convert(world, tmp_path):
    cases, kinds = [], [kind for kind in peer_model.KINDS if kind[0]]
    if not every_case():
        kinds = [kinds[index] for index in sample(kinds, "values", seed=world)]
    for stage, dtype in kinds:
        folder = str(tmp_path / f"{stage}-{dtype}")
        convert(SimpleNamespace(
            input_folder=os.path.join(peer_model.folder(stage, dtype), "global_step4"),
            output_folder=os.path.join(folder, "universal"), num_extract_workers=1, num_merge_workers=1,
        ))  # fmt: skip
        cases += [(folder, stage, dtype, to_stage) for to_stage in ((stage + 1) % 4, stage)]
    run_ranks(world, body_peer, cases)


def body_steps(rank, world, folder, stage):
    """The single steps that callers of the optimizer object know."""
    engine = make_engine(world, stage, PRECISIONS["bf16"], seed=5, checkpoint={"load_universal": True})
    path = os.path.join(folder, "universal")
    optimizer = engine.optimizer
    if stage == 3:
        optimizer.checkpoint_event_prologue()
        optimizer.load_module_checkpoint_state_from_checkpoint_dir_stage3(path, True)
        optimizer.checkpoint_event_epilogue()
        whole = states(engine)[0]
        slices = {
            name: optimizer.load_hp_checkpoint_state(os.path.join(path, "zero", name), "fp32", param)
            for name, param in engine.module.named_parameters()
            if param.requires_grad
        }
        optimizer.load_hp_checkpoint_state_from_checkpoint_dir_stage3(path)
        return states(engine), whole, slices
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            used = not name.startswith(("sometimes", "never"))
            assert param.load_hp_checkpoint_state(os.path.join(path, "zero", name), 0, 1) == (3 if used else 0)
    whole = states(engine)[0]
    optimizer.load_hp_checkpoint_state_from_checkpoint_dir("bit16_groups", path)
    return states(engine), whole, None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_optimizer_object_reads_them(stage, tmp_path):
    saved, _ = run_ranks(2, body_save, str(tmp_path), 2, PRECISIONS["bf16"])[0]
    to_universal(tmp_path)
    answers = run_ranks(3, body_steps, str(tmp_path), stage)
    loaded, early, _ = answers[0]
    assert loaded[1] == {**saved[1]}
    for key, value in saved[0].items():
        if key[1] != "lp" or not key[0].startswith("frozen."):
            assert torch.equal(value, loaded[0][key]), key
        if key[1] == "fp32" or (stage < 3 and key[1] in KINDS):
            assert torch.equal(value, early[key]), key
    if stage == 3:
        for name in answers[0][2]:
            whole = torch.cat([slices[name] for _, _, slices in answers])
            assert torch.equal(whole[: saved[0][name, "fp32"].numel()], saved[0][name, "fp32"].reshape(-1))


@on_ranks(2)
def test_what_is_not_there_is_said(rank, world, folder):
    make_engine(world, 2, {}).save_checkpoint(folder, tag="t")
    engine = make_engine(world, 2, {}, checkpoint={"load_universal": True})
    for tag, words in (
        (None, ("latest_universal", "ds_to_universal")),
        ("t", ("not a universal checkpoint", "load_universal")),
    ):
        error = refused(ValueError, None, engine.load_checkpoint, folder, tag=tag)
        assert all(word in str(error) for word in words)
    assert make_engine(world, 2, {}).load_checkpoint(os.path.join(folder, "nowhere")) == (None, None)


def body_weights(rank, world, folder, stage, options):
    engine = make_engine(world, stage, PRECISIONS["bf16"], seed=5, checkpoint={"load_universal": True})
    fresh = states(engine)[0]
    engine.load_checkpoint(folder, **options)
    return states(engine)[0], fresh


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_alone(stage, tmp_path):
    saved = run_ranks(2, body_save, str(tmp_path), 3, PRECISIONS["bf16"])[0][0][0]
    to_universal(tmp_path)
    for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
        loaded, fresh = run_ranks(2, body_weights, str(tmp_path), stage, options)[0]
        for key, value in saved.items():
            exact = key[1] == "lp" or (key[1] == "fp32" and "load_module_only" not in options)
            if exact:
                assert torch.equal(loaded[key], value), (options, key)
            elif key[1] == "fp32":  # what the weights give
                assert torch.equal(loaded[key], value.bfloat16().float()), (options, key)
            else:
                assert torch.equal(loaded[key], fresh[key]), (options, key)
