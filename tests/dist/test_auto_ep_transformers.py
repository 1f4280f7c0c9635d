"""Models of transformers itself, where it is installed, whose experts ranks share by the section ``expert_parallel``:
losses and gradients of the unchanged model in one process, what it records, generates and loads."""

import copy
import importlib.util

import pytest
import torch

import deepspeed
from deepspeed.module_inject.auto_ep import AutoEP, source_state_dict
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.moe.ep_repack import repack_expert_weights
from deepspeed.utils import safe_get_full_grad
from harness import on_ranks
from runs import engine_of

MISSING = importlib.util.find_spec("transformers") is None
if not MISSING:
    import transformers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING, reason="not installed: transformers")]

USUAL = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "num_experts_per_tok": 2, "attention_dropout": 0.0,
}  # fmt: skip
LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
LATENT = {
    "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
SIZES = {
    "mixtral": {"num_local_experts": 8, **LOSS},
    "qwen2_moe": {
        "num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 28, "norm_topk_prob": False,
        **LOSS,
    },
    "qwen3_moe": {
        "num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 8, "mlp_only_layers": [0],
        **LOSS,
    },
    "deepseek_v2": {"topk_method": "group_limited_greedy", **LATENT},
    "deepseek_v3": LATENT,
}  # fmt: skip


def model_of(family, **more):
    transformers.set_seed(5)
    config = transformers.AutoConfig.for_model(family, **{**USUAL, **SIZES[family], **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("gate.weight"):  # routers that prefer somebody
                value.mul_(20)
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.linspace(0, 0.3, len(value)))
    return model


def batch(rank):
    rows = torch.randint(0, 48, (2, 10), generator=torch.Generator().manual_seed(3 + rank))
    return {"input_ids": rows, "labels": rows}


def gradients_of_all(family, world):
    """``(loss of each rank, gradients by name)`` of the unchanged model."""
    model = model_of(family).train()
    losses = [model(**batch(rank)).loss for rank in range(world)]
    (sum(losses) / world).backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return [loss.item() for loss in losses], grads


CASES = [
    ("mixtral", 3, False), ("qwen2_moe", 2, True), ("qwen3_moe", 1, False), ("deepseek_v2", 3, False),
    ("deepseek_v3", 0, False), ("deepseek_v3", 2, True),
]  # fmt: skip


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(init=True, timeout=240)
def test_losses_and_gradients_are_those_of_the_unchanged_model(rank, world):
    for family, stage, recomputed in CASES:
        losses, expected = gradients_of_all(family, world)
        model = model_of(family)
        if recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        settings = {
            "train_batch_size": 2 * world,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "expert_parallel": {"enabled": True, "autoep_size": world},
        }
        engine = engine_of(model, settings)
        loss = engine(**batch(rank)).loss
        assert loss.item() == pytest.approx(losses[rank], abs=2e-5), (family, stage)
        engine.backward(loss)
        found = {name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()}
        for name, layer in engine._experts.layers.items():
            source = model_of(family).get_submodule(name)
            with torch.no_grad():
                for inner, param in source.named_parameters():
                    param.copy_(expected.pop(f"{name}.{inner}"))
            whole = repack_expert_weights(source.experts, layer.spec, 0, 1)
            part = slice(layer.ep_rank * layer.num_local_experts, (layer.ep_rank + 1) * layer.num_local_experts)
            named = {f"experts.w{n + 1}": weight[part] for n, weight in enumerate(whole)}
            named["router.gate.weight"] = source.gate.weight
            named.update({k: v for k, v in source.named_parameters() if k.startswith("shared")})
            expected.update({f"{name}.{inner}": value.detach() for inner, value in named.items()})
        assert set(found) == set(expected), (family, set(found) ^ set(expected))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
        engine.step()
        engine.destroy()


@pytest.mark.parametrize("family", SIZES)
def test_what_a_model_returns_records_and_saves(family, tmp_path):
    model = model_of(family).eval()
    own = copy.deepcopy(model)
    auto = AutoEP(model, AutoEPConfig(enabled=True))
    specs = auto.ep_parser()
    auto.replace_moe_layers(specs, 1, 0)
    wants = {"output_hidden_states": True, **({} if "deepseek" in family else {"output_router_logits": True})}
    with torch.no_grad():
        a, b = model(**batch(0), **wants), own(**batch(0), **wants)
    assert set(a) == set(b)
    for name in ("loss", "logits", "aux_loss", "hidden_states", "router_logits"):
        if getattr(b, name, None) is not None:
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=2e-5)
    rows = batch(0)["input_ids"]
    model.config.output_router_logits = own.config.output_router_logits = False  # whose loss generation cannot make
    more = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert model.generate(rows, **more).tolist() == own.generate(rows, **more).tolist()
    state = source_state_dict(model.state_dict(), specs)
    assert set(state) == set(own.state_dict()) and all(torch.equal(state[n], v) for n, v in own.state_dict().items())
    own.save_pretrained(tmp_path, state_dict=state)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(**batch(0), **wants).loss, b.loss)


@pytest.mark.parametrize("family", ("mixtral", "deepseek_v3"))
@on_ranks(2, init=True)
def test_generation_with_shared_experts(rank, world, family):
    own = model_of(family, output_router_logits=False).eval()
    rows = batch(0)["input_ids"]
    more = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = own.generate(rows, **more).tolist()
    model = model_of(family, output_router_logits=False)
    served = deepspeed.init_inference(model, dtype=torch.float32, ep_size=world)
    assert served.module.generate(rows, **more).tolist() == expected
