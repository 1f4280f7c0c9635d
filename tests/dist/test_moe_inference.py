"""``init_inference`` of models with experts: from what any degree and stage has saved, on other numbers of ranks, with
slices of experts where there are fewer of them than ranks. Answers are those of the model that was trained."""

import json
import os

import pytest
import torch
from torch import nn

import deepspeed
import hf_like_moe as look_alikes
from deepspeed.moe.layer import MoE
from harness import on_ranks
from logs import logged
from models import Parts, seeded
from moe_models import WIDTH, batch, expert, values
from refusals import refused
from runs import engine_of, take_step


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def forward_model_of(net, x):
    out, net.aux, _ = net.layer(net.first(x))
    return net.last(x + out)


def model_of(experts, ep_size, kind=Gated, **more):
    return Parts(
        forward_model_of,
        first=nn.Linear(WIDTH, WIDTH),
        layer=MoE(WIDTH, kind(), experts, ep_size, k=min(2, experts), eval_capacity_factor=2.0, **more),
        last=nn.LayerNorm(WIDTH),
    )


@pytest.mark.parametrize("stage, drop", [(0, True), (3, False), (2, False)])
@on_ranks(4, init=True)
def test_answers_are_those_of_the_trained_model(rank, world, stage, drop, folder):
    torch.manual_seed(rank)
    settings = {
        "train_batch_size": 8 * world,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
    }
    more = {"drop_tokens": drop, "use_residual": not drop}
    engine = engine_of(model_of(2, 2, **more), settings)
    with torch.no_grad():
        for number, one in enumerate(engine.module.layer.deepspeed_moe.experts.parameters()):
            shape = getattr(one, "ds_shape", one.shape)
            deepspeed.utils.safe_set_full_fp32_param(one, values(100 * (rank % 2) + number, *shape))
    for step in range(2):
        take_step(engine, (engine(batch(step, rank)) - 1).square().mean() + 0.01 * engine.module.aux)
    engine.save_checkpoint(folder)
    engine.eval()
    x = values(rank, 3 + rank, WIDTH)
    with torch.no_grad():
        expected = engine(x)
    for ep_size in (1, 2, 4):
        torch.manual_seed(9)
        served = deepspeed.init_inference(
            model_of(2, 1, **more), dtype=torch.float32, ep_size=ep_size, moe_experts=[2], checkpoint=folder,
            moe_type="standard" if drop else "residual",
        )  # fmt: skip
        assert len(served.module.layer.deepspeed_moe.experts.state_dict()) == (10 if ep_size == 1 else 5)
        with torch.no_grad():
            torch.testing.assert_close(served(x), expected, rtol=1e-5, atol=2e-6)
        weights = [p.shape for n, p in served.module.named_parameters() if n.endswith("experts.0.down.weight")]
        assert weights == [(WIDTH, 4 if ep_size == 4 else 8)]
    assert served.inference_ep_group is not None and served.expert_mp_group is not None
    with torch.no_grad():
        for mp_size, ep_size in ((2, 1), (4, 1), (2, 4)):
            served = deepspeed.init_inference(
                model_of(2, 1, **more), dtype=torch.float32, mp_size=mp_size, ep_size=ep_size, checkpoint=folder
            )
            neighbour = rank - rank % mp_size  # whose tokens all mp_size ranks bring
            same = values(neighbour, 3 + neighbour, WIDTH)
            whole = deepspeed.init_inference(model_of(2, 1, **more), dtype=torch.float32, checkpoint=folder)
            torch.testing.assert_close(served(same), whole(same), rtol=1e-5, atol=2e-6)
            shapes = [p.shape for n, p in served.module.named_parameters() if "_experts.0" in n and "down.w" in n]
            assert shapes == [(WIDTH, 8 * 2 // max(mp_size, ep_size))]
            assert served.inference_mp_group is not None


def test_one_rank_and_the_forms_of_a_checkpoint(tmp_path):
    model, x = seeded(model_of, 2, 1).eval(), values(1, 5, WIDTH)
    expected = model(x)
    torch.save({"module": model.state_dict()}, tmp_path / "whole.pt")
    form = {"type": "ds_model", "version": 0.0, "checkpoints": "whole.pt"}
    (tmp_path / "form.json").write_text(json.dumps(form))
    for given in (
        {"checkpoint": str(tmp_path / "whole.pt")},
        {"checkpoint": form, "base_dir": str(tmp_path)},
        {"checkpoint": "form.json", "base_dir": str(tmp_path)},
        {"checkpoint_config": {"checkpoint_dir": str(tmp_path / "whole.pt")}},
    ):
        served = deepspeed.init_inference(model_of(2, 1), config={"dtype": "fp32"}, **given)
        torch.testing.assert_close(served(x), expected)
    served.profile_model_time()
    assert served.first is served.module.first and not served.is_compiled and not served.module.training
    served(x)
    assert len(served.model_times()) == 1 and served.model_times() == []
    plain = deepspeed.init_inference(nn.Linear(3, 2), dtype=torch.bfloat16)
    assert plain(torch.zeros(1, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    refused(
        FileNotFoundError,
        os.path.join(str(tmp_path), "none"),
        deepspeed.init_inference,
        model_of(2, 1),
        dtype="fp32",
        checkpoint=str(tmp_path / "none"),
    )


@pytest.mark.parametrize(
    "given, error, text",
    [
        ({"moe_experts": [4]}, ValueError, r"moe_experts = \[4\], and the model's MoE layers have \[2\]"),
        ({"moe_type": "residual"}, ValueError, "MoE layer 'layer' has no dense expert"),
        ({"use_triton": True}, NotImplementedError, "use_triton=True is not built"),
        ({"enable_cuda_graph": True}, NotImplementedError, "enable_cuda_graph=True is not built"),
        ({"set_empty_params": True}, NotImplementedError, "set_empty_params=True is not built"),
        ({"save_mp_checkpoint_path": "x"}, NotImplementedError, "save_mp_checkpoint_path='x' is not built"),
        ({"mp_size": 2, "ep_size": 3}, ValueError, "moe.ep_size = 3 and tensor_parallel.tp_size .*= 2: one has to be"),
        ({"dtype": torch.int8}, NotImplementedError, "torch.int8"),
        ({"checkpoint": {"type": "Megatron", "checkpoints": ["a", "b"]}}, NotImplementedError, "names 2 files"),
    ],
)
def test_what_is_refused(given, error, text):
    refused(error, text, deepspeed.init_inference, model_of(2, 1), **{"dtype": torch.float32, **given})


@pytest.mark.parametrize("key", ["replace_with_kernel_inject", "kernel_inject"])
def test_kernels_that_are_not_built_leave_the_models_layers(key):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3)
    expected = model(x)
    with logged() as lines:
        engine = deepspeed.init_inference(model, dtype=torch.float32, **{key: True})
    assert torch.equal(engine(x), expected)
    assert sum("replace_with_kernel_inject has no effect yet" in line for line in lines) == 1


@on_ranks(4, init=True)
def test_experts_of_unchanged_models_are_sliced(rank, world):
    before = look_alikes.EXPERTS, look_alikes.INNER
    look_alikes.EXPERTS, look_alikes.INNER = 2, 8
    try:
        for family in ("mixtral", "qwen3_moe"):
            expected = look_alikes.model_of(family).eval()
            for given in ({"ep_size": 4}, {"mp_size": 4}, {"mp_size": 2}, {"mp_size": 2, "ep_size": 4}):
                alike = given.get("mp_size", 1)
                neighbour = rank - rank % alike  # whose tokens all bring
                x = values(neighbour, 2, 3 + neighbour, WIDTH)
                served = deepspeed.init_inference(look_alikes.model_of(family), dtype=torch.float32, **given)
                with torch.no_grad():
                    torch.testing.assert_close(served(x), expected(x), rtol=1e-5, atol=2e-6)
                shapes = {p.shape for n, p in served.module.named_parameters() if n.endswith("experts.w2")}
                assert shapes == {(1, WIDTH, 8 * 2 // max(given.values()))}
        look_alikes.INNER = 5
        refused(
            ValueError,
            "model.layers.0.block_sparse_moe': its experts are 5 wide inside: no 2",
            deepspeed.init_inference,
            look_alikes.model_of("mixtral"),
            dtype=torch.float32,
            ep_size=4,
        )
    finally:
        look_alikes.EXPERTS, look_alikes.INNER = before


@on_ranks(2, init=True)
def test_what_ranks_cannot_share(rank, world):
    def build(**given):
        layers = {"experts": 2, "kind": Gated, **given}
        deepspeed.init_inference(model_of(ep_size=1, **layers), dtype=torch.float32, moe={"ep_size": world})

    refused(ValueError, "its experts are 9 wide inside: no 2 slices", build, experts=1, kind=expert)
    refused(
        ValueError,
        "expert 0 of this rank cannot be sliced for 2 ranks",
        build,
        experts=1,
        kind=lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, WIDTH)),
    )
    refused(ValueError, "'layer': its 3 experts cannot be shared evenly by ep_size=2", build, experts=3)
    refused(
        ValueError,
        "moe.ep_size = 3 does not divide the 2 ranks",
        deepspeed.init_inference,
        model_of(2, 1),
        dtype=torch.float32,
        ep_size=3,
    )
    refused(
        ValueError,
        "'layer': it was built with ep_size=2: to serve it so build it with 1",
        deepspeed.init_inference,
        model_of(2, 2),
        dtype=torch.float32,
    )
