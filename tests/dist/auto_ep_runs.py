"""Runs of unchanged models with experts (``hf_like_moe``), and the same model in one process."""

import pytest
import torch

import runs
from deepspeed.moe.ep_repack import repack_expert_weights
from engine_models import step_losses
from hf_like_moe import WIDTH, model_of
from moe_models import ADAM, adam, values
from plain import Plain
from runs import moments, settings, weights


def config(world, stage, ep_size, **more):
    experts = {"enabled": True, "autoep_size": ep_size}
    adam = {"type": "AdamW", "params": ADAM}
    more = {"optimizer": adam, "gradient_clipping": 0.3, "expert_parallel": experts, **more}
    return settings(stage, None, None, **{"train_batch_size": 2 * world, **more})


def batch(step, rank, tokens=8):
    return values(50 * step + 7 * rank, 2, tokens // 2, WIDTH) * 2


def frozen_model_of(family, **more):
    """A model whose experts are not trained."""
    model = model_of(family, **more)
    for name, param in model.named_parameters():
        param.requires_grad_(".experts." not in name)
    return model


def train_one(family, world, steps, make=model_of, optimizer=adam, **more):
    """``(losses of each step and rank, parameters by name)`` of the unchanged model with all ranks' batches."""
    plain = Plain(make(family, **more), optimizer, dtype=None, clip=0.3, zeros=True)
    plain.run(lambda model, step, rank: model(batch(step, rank)), range(steps), world)
    return plain.losses, {name: value.detach() for name, value in plain.model.state_dict().items()}


def steps_of(engine, rank, steps, first=0):
    return step_losses(engine, (batch(step, rank) for step in range(first, first + steps)))


def follows(engine, rank, expected, case=None, first=0, make=model_of):
    """The next steps have the losses of ``train_one``, and the parameters are those at its end."""
    losses, params = expected
    own = steps_of(engine, rank, len(losses) - first, first)
    assert own == pytest.approx([step[rank] for step in losses[first:]], rel=1e-6, abs=3e-6), case
    check(engine, rank, params, make)


def check(engine, rank, expected, make=model_of):
    """Every parameter here is that of the model in one process, or the part of it that this rank has."""
    trained = weights(engine)
    trained.update(runs.joined(engine, {name: master for name, (master,) in moments(engine, ()).items()}))
    for name, layer in engine._experts.layers.items():
        part = slice(layer.ep_rank * layer.num_local_experts, (layer.ep_rank + 1) * layer.num_local_experts)
        source = make(engine.module.config.model_type, form=engine.module.form)
        source.load_state_dict(expected)
        whole = repack_expert_weights(source.get_submodule(name).experts, layer.spec, 0, 1)
        for number, weight in enumerate(whole):
            mine = trained.pop(f"{name}.experts.w{number + 1}")
            torch.testing.assert_close(mine, weight[part], rtol=1e-4, atol=5e-6)
        gate = trained.pop(f"{name}.router.gate.weight")
        torch.testing.assert_close(gate, expected[f"{name}.gate.weight"], rtol=1e-4, atol=5e-6)
    for name, value in trained.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=5e-6)
