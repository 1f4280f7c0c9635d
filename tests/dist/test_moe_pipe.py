"""Experts in the stages of a pipeline: shared by its copies, with auxiliary losses that no layer hands on."""

import pytest
import torch

import deepspeed
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_fp32_param
from harness import on_ranks, run_ranks
from moe_models import ADAM, WIDTH, Loops, adam, batch, fill, gate_weights, moe_layer, plain_name, values
from plain import Plain
from refusals import refused
from runs import engine_of
from sampling import every_case

MICROS, STEPS, COEFF = 2, 3, 0.05


class Block(torch.nn.Module):
    """A linear layer, then one with experts; their auxiliary losses go to the list `aux` where there is one."""

    def __init__(self, layer, aux=None):
        super().__init__()
        self.linear, self.layer, self.aux = torch.nn.Linear(WIDTH, WIDTH), layer, aux

    def forward(self, x):
        x = x + 0.1 * torch.tanh(self.linear(x))
        out, aux, _ = self.layer(x)
        if self.aux is not None:
            self.aux.append(aux)
        return x + out


def filled(block, seed, wg, experts):
    fill(block.linear, seed)
    with torch.no_grad():
        wg.weight.copy_(gate_weights(4) * (1 + 0.1 * seed))
    for number, one in experts:
        fill(one, 100 * seed + 10 * number)
    return block


def data(step, micro, rank):
    return batch(10 * step + micro, rank), values(step + micro + rank, 8, WIDTH)


def loss_fn(outputs, labels):
    return (outputs - labels).square().mean()


def body(rank, world, stage, interval, schedule, scope="rank"):
    copy, stages = rank % 2, world // 2

    def block(seed):
        layer = moe_layer(4, 2, 2, False, False, 1.0, aux_scope=scope)
        moe = layer.deepspeed_moe
        numbered = [(2 * copy + i, one) for i, one in enumerate(moe.experts.deepspeed_experts)]
        return filled(Block(layer), seed, moe.gate.wg, numbered)

    deepspeed.init_distributed()
    model = PipelineModule(
        [block(seed + 1) for seed in range(stages)], num_stages=stages, loss_fn=loss_fn, partition_method="uniform",
        activation_checkpoint_interval=interval,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": MICROS,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.3,
        "moe": {"aux_loss_coeff": COEFF},
        "pipeline": {"schedule": schedule},
    }
    engine = engine_of(model, config)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(float(engine.train_batch(iter([data(step, micro, copy) for micro in range(MICROS)]))))
        norms.append(float(engine.get_global_grad_norm()))
    assert len(engine.pipe_plan().stages) == stages  # and no rank waits for another one
    figures = list(engine.moe_statistics().values())
    assert len(figures) == 1 and figures[0]["tokens"] == 2 * MICROS * 8 and figures[0]["aux_loss"] > 0
    found = {plain_name(n, 2 * copy): safe_get_full_fp32_param(p).tolist() for n, p in model.named_parameters()}
    return losses, norms, found


CASES = [(2, 0, 0, "1f1b", "rank"), (2, 1, 1, "1f1b", "batch"), (2, 1, 0, "zb-h1", "rank")]
STAGES = ((0, 0), (1, 1))
MORE = [(4, stage, interval, schedule, "batch") for stage, interval in STAGES for schedule in ("1f1b", "zb-h1")]


@pytest.mark.parametrize("stages, stage, interval, schedule, scope", CASES + MORE * every_case())
def test_equals_loops_in_one_process(stages, stage, interval, schedule, scope):
    blocks, shared = [], []
    for seed in range(1, stages + 1):
        layer = Loops(4, 2, False, False, 1.0)
        blocks.append(filled(Block(layer, shared), seed, layer.wg, enumerate(layer.experts)))
    plain = Plain(torch.nn.Sequential(*blocks), adam, dtype=None, clip=0.3, zeros=True)
    aux, losses = plain.model[0].aux, []
    for step in range(STEPS):
        losses.append(0.0)
        for micro in range(MICROS):
            copies = [data(step, micro, copy) for copy in range(2)]
            if scope == "batch":  # the balance of both copies' tokens
                copies = [[torch.cat(part) for part in zip(*copies)]]
            for inputs, labels in copies:
                loss = loss_fn(plain.model(inputs), labels)
                plain.add(loss + COEFF * sum(aux), share=1 / (len(copies) * MICROS))
                losses[-1] += loss.item() / (len(copies) * MICROS)
                aux.clear()
        plain.update()
    seen = set()
    for own_losses, own_norms, params in run_ranks(2 * stages, body, stage, interval, schedule, scope, init=True):
        assert own_losses == pytest.approx(losses, abs=3e-6) and own_norms == pytest.approx(plain.norms, rel=1e-5)
        for name, value in params.items():
            seen.add(name)
            assert torch.allclose(torch.tensor(value), plain.params[name], rtol=1e-4, atol=5e-6), name
    assert seen == set(plain.params)


@on_ranks(1, init=True)
def test_other_models_add_their_losses_themselves(rank, world):
    layer = moe_layer(4, 1, 1, False, False)
    config = {"train_batch_size": 8, "moe": {"aux_loss_coeff": 0.1}, "optimizer": {"type": "Adam"}}
    refused(
        ValueError,
        "moe.aux_loss_coeff=0.1 is for PipelineModule; Block adds the losses",
        deepspeed.initialize,
        model=Block(layer),
        config=config,
    )
