"""Gradients on a device have memory from their backward to the step, and what a script does with them stays right."""

import pytest
import standin
import torch

import deepspeed
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from harness import run_ranks
from models import two_layers
from runs import engine_of, settings, together, weights

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")


def make_engine(stage, **more):
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    standin.choose(1, lazy=True)
    return engine_of(two_layers(), settings(stage, gradient_clipping=1.0, **more))


def batch(engine, seed):
    torch.manual_seed(seed)
    return torch.randn(2, 6).to(engine.device)


def absent(engine):
    """Returns "none", "some" or "all": the share of the gradients that have no memory."""
    size, held = engine.core.absent_grad_bytes(), engine.core.held_bytes()["grad"]
    return "none" if size == 0 else "all" if size == held else "some"


def memory_of_steps(rank, world, stage):
    engine, found = make_engine(stage, accumulate=2), []
    for step in range(2):
        for _ in range(2):
            loss = engine(batch(engine, step)).square().mean()
            found.append(absent(engine))
            engine.backward(loss)
            found.append(absent(engine))
            engine.step()
            found.append(absent(engine))
    together(0)
    return found, standin.faults_at_end()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_have_memory_from_their_backward_to_the_step(stage, world):
    for found, faults in run_ranks(world, memory_of_steps, stage, init=True, fresh=True):
        assert found == ["all", "none", "none", "none", "none", "all"] * 2 and faults == []


def what_scripts_do(rank, world, stage):
    """Returns weights of two engines: one whose script looks at gradients, keeps and moves them, and a plain one."""
    found = []
    for curious in (True, False):
        engine, kept = make_engine(stage), []
        for step in range(3):
            engine.backward(engine(batch(engine, step)).square().mean())
            if curious:
                param = next(engine.module.parameters())
                values = safe_get_full_grad(param)
                if param.grad is not None:
                    kept.append((param.grad, param.grad.cpu()))
                if stage > 0:
                    engine.offload_states()
                    engine.reload_states()
                assert torch.equal(safe_get_full_grad(param), values)
                safe_set_full_grad(param, values)
            engine.step()
            if curious:
                assert safe_get_full_grad(param) is None
                # A gradient that is set where none has memory is the gradient of the step, with nothing around it.
                safe_set_full_grad(param, torch.zeros_like(values))
                engine.zero_grad()
        assert all(torch.equal(grad.cpu(), values) for grad, values in kept)
        found.append({name: value.cpu() for name, value in weights(engine).items()})
        engine.destroy()
    return found, standin.faults_at_end()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_scripts_do_with_gradients(stage):
    ((curious, plain), faults) = run_ranks(1, what_scripts_do, stage, init=True, fresh=True)[0]
    assert curious.keys() == plain.keys() and faults == []
    for name, value in plain.items():
        assert torch.equal(curious[name], value), name


def gradients_of_a_script(rank, world):
    """The script puts tensors of its own as .grad before any backward."""
    engine = make_engine(0)
    for param in engine.module.parameters():
        param.grad = torch.full_like(param, 0.5)
    before = weights(engine)
    engine.step()
    numel = sum(param.numel() for param in engine.module.parameters())
    moved = all(not torch.equal(before[name], value) for name, value in weights(engine).items())
    return float(engine.get_global_grad_norm()), 0.5 * numel**0.5, moved


def test_gradients_of_a_script_get_memory():
    norm, expected, moved = run_ranks(1, gradients_of_a_script, init=True, fresh=True)[0]
    assert norm == pytest.approx(expected, rel=1e-5) and moved
