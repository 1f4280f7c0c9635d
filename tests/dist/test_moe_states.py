"""``load_moe_state_dict``: weights of experts alone, from what any number of ranks and any stage has saved."""

import os

import pytest
import torch

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param
from harness import on_ranks
from hf_like_moe import EXPERTS, model_of
from hf_like_moe import WIDTH as HF_WIDTH
from moe_models import batch, moe_net, values
from refusals import refused
from runs import engine_of, settings, take_step, together

LAYER = "layer.deepspeed_moe.experts.deepspeed_experts"


def trained_experts(engine):
    """{(layer of the model, number of an expert, name below it): value} of all ranks."""
    mine = {}
    for name, param in engine.module.named_parameters():
        value = safe_get_full_fp32_param(param)
        if LAYER in name:
            local, rest = name.split(f"{LAYER}.")[1].split(".", 1)
            mine[engine.module.layer.deepspeed_moe.experts.deepspeed_experts.ds_expert_numbers[local], rest] = value
        elif ".experts.w" in name:
            layer = engine.module.get_submodule(name.rsplit(".experts.", 1)[0])
            first = layer.ep_rank * layer.num_local_experts
            mine.update({(first + row, name): one for row, one in enumerate(value)})
    return {key: value for one in together(mine) for key, value in one.items()}


MANY = pytest.mark.every("a stage more of the same")


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=MANY), 3])
@on_ranks(4, init=True)
def test_weights_of_experts_alone(rank, world, stage, folder):
    engine = engine_of(moe_net(rank % 2, 4, 2, 2, False, False), settings(stage, 8, rate=0.02))
    take_step(engine, engine(batch(0, rank)))
    engine.save_checkpoint(folder, "one")
    expected = trained_experts(engine)
    for ep_size in (1, 4):
        net = moe_net(rank % ep_size, 4, ep_size, 2, False, False)
        other = engine_of(net, settings(0, 8, rate=0.02))
        found = {"first.weight": None}
        other.load_moe_state_dict(folder, "one", found, False, model=net, num_experts=other.num_experts)
        assert found.pop("first.weight") is None and len(found) == 4 * 4 // ep_size
        numbers = net.layer.deepspeed_moe.experts.deepspeed_experts.ds_expert_numbers
        for name, value in found.items():
            local, rest = name.removeprefix(f"{LAYER}.").split(".", 1)
            torch.testing.assert_close(value, expected[numbers[local], rest], rtol=0, atol=0)
        other.module.load_state_dict(found, strict=False)
        other.destroy()
    if stage == 0:
        torch.distributed.barrier()
        old = os.path.join(folder, "one")
        if rank == 0:
            for name in [name for name in os.listdir(old) if name.startswith("layer_0_")]:
                os.rename(os.path.join(old, name), os.path.join(old, name.removeprefix("layer_0_")))
        torch.distributed.barrier()
        again = {}
        DeepSpeedEngine.load_moe_state_dict(folder, "one", again, True, num_experts=[4])
        assert set(again) == set(found) and all(torch.equal(again[name], value) for name, value in found.items())


@on_ranks(2, init=True)
def test_stacked_experts_alone(rank, world, folder):
    def build(ep_size, stage):
        section = {"expert_parallel": {"enabled": True, "autoep_size": ep_size}}
        return engine_of(model_of("qwen3_moe"), settings(stage, rate=0.02, **section))

    engine = build(2, 2)
    take_step(engine, engine(values(rank, 2, 4, HF_WIDTH)))
    engine.save_checkpoint(folder, "one")
    expected = trained_experts(engine)
    other, found = build(1, 3), {}
    about = {"module_path": "model.layers.0.mlp", "num_experts": EXPERTS}
    other.load_moe_state_dict(folder, "one", found, False, model=other.module, autoep_layers=[about])
    assert sorted(found) == sorted(name for name in other.module.state_dict() if ".experts.w" in name)
    for name, value in found.items():
        torch.testing.assert_close(value, torch.stack([expected[e, name] for e in range(EXPERTS)]), rtol=0, atol=0)
    with pytest.raises(ValueError, match="'model.layers.0.mlp' was saved with 8 experts, the model's has 4"):
        about["num_experts"] = 8
        other.load_moe_state_dict(folder, "one", found, False, model=other.module, autoep_layers=[about])
    refused(ValueError, "pass model=, whose layers", DeepSpeedEngine.load_moe_state_dict, folder, "one", found, False)
    refused(
        ValueError,
        "autoep_layers= is compared with .* pass model=, or leave autoep_layers= out",
        DeepSpeedEngine.load_moe_state_dict,
        folder,
        "one",
        found,
        True,
        num_experts=EXPERTS,
        autoep_layers=[about],
    )


def half_frozen(rank, ep_size):
    """The first weight of each expert is not trained."""
    net = moe_net(rank % ep_size, 4, ep_size, 2, False, False)
    for name, param in net.named_parameters():
        if LAYER in name and ".0.weight" in name:
            param.requires_grad_(False)
    return net


@pytest.mark.parametrize("stage", [pytest.param(0, marks=MANY), 3])
@on_ranks(4, init=True)
def test_experts_of_which_a_part_is_frozen(rank, world, stage, folder):
    engine = engine_of(half_frozen(rank, 2), settings(stage, 8, rate=0.02))
    assert len({n: p for n, p in engine.module.named_parameters() if LAYER in n and not p.requires_grad}) == 2
    take_step(engine, engine(batch(0, rank)))
    engine.save_checkpoint(folder, "one")
    engine.eval()
    with torch.no_grad():
        expected = engine(batch(5, rank))
    for to_stage, ep_size in ((3, 4), (0, 2), (3, 1)):
        net = half_frozen(rank, ep_size)
        other = engine_of(net, settings(to_stage, 8, rate=0.02))
        for name, param in net.named_parameters():
            if LAYER in name and not param.requires_grad:
                with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
                    param.zero_()
        other.load_checkpoint(folder, "one")
        other.eval()
        with torch.no_grad():
            torch.testing.assert_close(other(batch(5, rank)), expected, rtol=1e-5, atol=1e-6)
        other.train()
        take_step(other, other(batch(1, rank)))
        other.destroy()
