"""Ulysses for models of transformers, where it is installed: logits, losses and gradients of one process."""

import importlib.util

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.sequence import parallel_state, weighted_loss
from deepspeed.sequence.hf_attention import configure_model
from deepspeed.utils import groups
from harness import on_ranks
from refusals import refused
from runs import by_rank_0, take_step, weight_list
from sequence_models import sgd_engine

MISSING = importlib.util.find_spec("transformers") is None
if not MISSING:
    import transformers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING, reason="not installed: transformers")]
LENGTH = 12


def model_of(heads=4, kv=2, window=None, implementation="sdpa"):
    torch.manual_seed(2)
    kind = transformers.MistralConfig if window else transformers.LlamaConfig
    more = {"sliding_window": window} if window else {}
    config = kind(
        vocab_size=31, hidden_size=heads * 4, intermediate_size=16, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv, max_position_embeddings=64, attn_implementation=implementation, use_cache=False, **more,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def capped_attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **more):
    """An attention with soft caps, registered by a user."""
    groups_of = module.num_key_value_groups
    key, value = (x.repeat_interleave(groups_of, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    length = query.shape[2]
    looks = torch.ones(length, length, dtype=torch.bool).tril() if attention_mask is None else attention_mask
    scores = scores.masked_fill(~looks, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def family_model(family):
    """Two layers of models that people have: windows in every second layer, soft caps, norms of queries and keys."""
    torch.manual_seed(2)
    kinds = {"qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "gemma2": "Gemma2Config", "gemma3": "Gemma3TextConfig"}
    more = {
        "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "qwen3": {"head_dim": 4},
        "gemma2": {"head_dim": 4, "sliding_window": 4, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4},
        "gemma3": {"head_dim": 4, "sliding_window": 4, "query_pre_attn_scalar": 4},
    }
    implementation = "sdpa"
    if family == "gemma2":
        transformers.AttentionInterface.register("capped", capped_attention)
        transformers.AttentionMaskInterface.register("capped", transformers.masking_utils.sdpa_mask)
        implementation = "capped"
    config = getattr(transformers, kinds[family])(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, pad_token_id=0, **more[family],
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


@pytest.mark.parametrize("kind", ["causal", "packed", "padded"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3"])
@on_ranks(2, init=True, timeout=90)
def test_families(rank, world, family, kind):
    plain, model = family_model(family), family_model(family)
    register(model, world, core_attn_implementation=model.config._attn_implementation)
    assert gap_of(rank, world, plain, model, batch_of(kind)) < 1e-4


def gap_of(rank, world, plain, model, batch):
    """The largest difference of a logit, and of a gradient that is summed over the ranks, to those of one process."""
    labels = batch.pop("labels")
    expected = plain(**batch).logits
    upper = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4)) * (labels != -100)[..., None]
    (expected * upper).sum().backward()
    mine = {name: value.chunk(world, 1)[rank] for name, value in batch.items()}
    logits, kept = model(**mine).logits, labels.chunk(world, 1)[rank] != -100
    (logits * upper.chunk(world, 1)[rank]).sum().backward()
    gap = (logits - expected.chunk(world, 1)[rank])[kept].abs()
    return max(float(gap.max()) if gap.numel() else 0.0, grad_gap(model, grads_of(plain)))


def grad_gap(model, wanted, losses=1):
    """``losses``: how many ranks have the loss of the whole sequence."""
    for param in model.parameters():
        dist.all_reduce(param.grad)
    return max(float((param.grad / losses - wanted[name]).abs().max()) for name, param in model.named_parameters())


def batch_of(kind, step=0, rank=0):
    tokens = torch.randint(0, 31, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))
    labels, positions, more = tokens.clone(), torch.arange(LENGTH).expand(2, LENGTH), {}
    if kind == "packed":
        positions = torch.cat((torch.arange(5), torch.arange(LENGTH - 5))).expand(2, LENGTH)
    if kind == "padded":
        kept = torch.ones(2, LENGTH, dtype=torch.int64)
        kept[0, 7:] = kept[1, 4:] = 0  # the second half of a row is nothing but padding
        labels = labels.masked_fill(kept == 0, -100)
        more = {"attention_mask": kept}
    if kind == "uneven labels":
        labels[:, 3:] = -100
    return {"input_ids": tokens, "position_ids": positions, "labels": labels, **more}


def register(model, world, **more):
    return UlyssesSPAttentionHF.register_with_transformers(
        **{
            "model_name_or_path": model, "core_attn_implementation": "sdpa", "sequence_parallel_size": world,
            "micro_batch_size": 2, **more,
        }
    )  # fmt: skip


def grads_of(model):
    return {name: param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.sample("values", 10)
@pytest.mark.parametrize("checkpoint", ["", "reentrant", "no reentrant"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("heads, kv", [(4, 4), (4, 2), (6, 3), (5, 1), (2, 2)])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", ["causal", "packed", "padded", "uneven labels"])
@on_ranks(init=True, timeout=90)
def test_equals_one_process(rank, world, kind, heads, kv, window, checkpoint):
    plain, model = model_of(heads, kv, window), model_of(heads, kv, window)
    batches = [batch_of(kind, 0, owner) for owner in range(world)]
    mpu = register(model, world)
    assert mpu is parallel_state
    loader = UlyssesSPDataLoaderAdapter(
        [batches[rank]], sp_rank=rank, sp_group=mpu.get_sequence_parallel_group(), sp_world_size=world, device="cpu"
    )
    gaps = []
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
        model.train()
    deferred = []
    for owner, mine in enumerate(loader):
        expected = plain(**batches[owner])
        plain.zero_grad()
        expected.loss.backward()
        wanted = grads_of(plain)
        labels = mine.pop("shift_labels")
        out = model(**mine)
        kept = mine.get("attention_mask", torch.ones_like(mine["input_ids"])).bool()
        gap = (out.logits - expected.logits.chunk(world, 1)[rank]).abs()[kept]
        gaps.append(float(gap.max()) if gap.numel() else 0.0)
        local = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss = weighted_loss(local, labels)
        gaps.append(abs(float(loss - expected.loss)))
        deferred.append((loss, wanted))
    for loss, wanted in reversed(deferred):  # the backward of a forward that was not the last one
        model.zero_grad()
        loss.backward()
        gaps.append(grad_gap(model, wanted, losses=world))
    assert max(gaps) < 2e-5


@on_ranks(2, init=True, timeout=90)
def test_a_path_and_a_fixed_length(rank, world, folder):
    """Registered by its path: models of that path share sequences, others in the process do not."""
    by_rank_0(rank, model_of().save_pretrained, folder)
    mpu = register(folder, world, seq_length=LENGTH, seq_length_is_variable=False, disable_in_eval=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    other, whole = model_of(), batch_of("causal")
    expected = other(**whole).logits
    group = mpu.get_sequence_parallel_group()
    mine = {name: value.chunk(world, 1)[dist.get_rank(group)] for name, value in whole.items() if name != "labels"}
    assert float((model(**mine).logits - expected.chunk(world, 1)[dist.get_rank(group)]).abs().max()) < 1e-5
    assert float((model.eval()(**whole).logits - expected).abs().max()) < 1e-5  # disable_in_eval
    refused(ValueError, "has 12 tokens in a batch of 2.*told seq_length=12, 6 on each rank", model.train(), **whole)


class Wrapped:
    """As PEFT's models are."""

    def __init__(self, model):
        self.model = model

    def get_base_model(self):
        return self.model


@on_ranks(2, init=True, timeout=90)
def test_arguments(rank, world):
    assert register(model_of(), 1) is None
    assert register(Wrapped(model_of()), world) is parallel_state
    cases = [
        ({"core_attn_implementation": "eager"}, '"eager" cannot share sequences.*Use one of.*sdpa'),
        ({"core_attn_implementation": "flex_attention"}, "cannot share sequences"),
        ({"core_attn_implementation": "mine"}, 'no attention function "mine"'),
        ({"seq_length_is_variable": False}, "needs seq_length"),
        ({"seq_length_is_variable": False, "max_length": 7}, "seq_length 7 cannot be cut into 2 equal parts"),
        ({"model": 7}, "model_name_or_path is a int"),
    ]
    for more, words in cases:
        refused(ValueError, "(?s)" + words, register, **{"model": model_of(), "world": world, **more})
    model = model_of()
    register(model, world)
    mine = {name: value.chunk(world, 1)[rank] for name, value in batch_of("causal").items() if name != "labels"}
    with pytest.raises(ValueError, match="the model's attention mask is none of"):
        odd = torch.rand(2, 1, LENGTH // world, LENGTH // world, generator=torch.Generator().manual_seed(1)) > 0.5
        model(**mine, attention_mask=odd)
    refused(
        ValueError,
        "a cache of keys does not know",
        model.generate,
        mine["input_ids"],
        max_new_tokens=2,
        use_cache=True,
        do_sample=False,
    )


@pytest.mark.parametrize("stage, world", [(0, 2), (1, 4), (2, 2), (3, 4)])
@on_ranks(init=True, timeout=120)
def test_training(rank, world, stage):
    """An engine on shared sequences against one process: SGD, a batch of each rank in turn."""
    plain, model = model_of(), model_of()
    mpu = register(model, 2)
    engine = sgd_engine(model, stage, 0.3, mpu=mpu)
    place, replica = mpu.get_sequence_parallel_rank(), mpu.get_data_parallel_rank()
    own = [batch_of("uneven labels" if rank == 1 else "causal", step, rank) for step in range(2)]
    loader = UlyssesSPDataLoaderAdapter(own, place, engine.seq_parallel_group, 2, engine.device)
    assert len(loader) == 4
    steps = torch.optim.SGD(plain.parameters(), lr=0.3)
    for turn, mine in enumerate(loader):
        labels = mine.pop("shift_labels")
        logits = engine(**mine).logits
        local = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        take_step(engine, weighted_loss(local, labels))
        steps.zero_grad()
        owners = [2 * one + turn % 2 for one in range(world // 2)]
        losses = [
            plain(**batch_of("uneven labels" if owner == 1 else "causal", turn // 2, owner)).loss for owner in owners
        ]
        (sum(losses) / len(losses)).backward()
        steps.step()
    gap = max(float((a - b).abs().max()) for a, b in zip(weight_list(engine), plain.parameters()))
    assert replica == rank // 2
    engine.destroy()
    groups.clear()
    assert gap < 1e-5


@pytest.mark.parametrize("shifted", [False, True])
def test_tiles(shifted):
    plain, model, batch = model_of(), model_of(), batch_of("uneven labels")
    assert deepspeed.sequence.tile(model) == ["model.layers.0.mlp", "model.layers.1.mlp", "loss"]
    expected = plain(**batch)
    assert torch.allclose(
        model(input_ids=batch["input_ids"]).logits, plain(input_ids=batch["input_ids"]).logits, atol=1e-5
    )
    if shifted:
        batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
    loss = model(**batch).loss
    expected.loss.backward()
    loss.backward()
    wanted = grads_of(plain)
    assert abs(float(loss - expected.loss)) < 1e-6
    assert max(float((param.grad - wanted[name]).abs().max()) for name, param in model.named_parameters()) < 1e-5


@pytest.mark.parametrize(
    "world, method, heads, kv, chunk, checkpoint",
    [
        (2, "ring", 4, 2, 0, "no reentrant"),
        (2, "ulysses", 5, 1, 0, ""),
        (2, "auto", 4, 2, 5, "reentrant"),
        (1, "auto", 4, 2, 5, ""),
        (4, "both", 4, 2, 0, "reentrant"),
        (4, "auto", 2, 2, 0, ""),
    ],
)
@on_ranks(init=True, timeout=90)
def test_methods_and_chunks(rank, world, method, heads, kv, chunk, checkpoint):
    """As the section ``sequence_parallel`` says: logits and gradients of one process."""
    plain, model = model_of(heads, kv), model_of(heads, kv).train()
    made = configure_model(model, dist.get_world_group(), method=method, chunk=chunk)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
    assert gap_of(rank, world, plain, model, batch_of("causal")) < 1e-4
    assert (made._ring is not None) == (method in ("ring", "both") or heads < world)


@pytest.mark.parametrize("kind, window", [("packed", None), ("padded", None), ("causal", 4), ("packed", 4)])
@pytest.mark.parametrize("world, method, chunk", [(2, "ring", 0), (2, "auto", 4), (1, "auto", 5)])
@on_ranks(init=True, timeout=90)
def test_masks_by_blocks(rank, world, method, chunk, kind, window):
    """Masks of blocks: padding, documents and windows in a ring and in chunks."""
    plain, model = model_of(4, 2, window), model_of(4, 2, window).train()
    made = configure_model(model, dist.get_world_group(), method=method, chunk=chunk)
    assert gap_of(rank, world, plain, model, batch_of(kind)) < 1e-4 and (made._ring is not None) == (method == "ring")


@on_ranks(2, init=True, timeout=90)
def test_the_dropout_of_rings_and_chunks_does_not_know_the_cut(rank, world):
    """Logits and gradients, where every layer drops probabilities: those of the first way."""
    found, batch = [], batch_of("packed")
    for method, chunk in (("ring", 0), ("auto", 4), ("auto", 5)):
        model = model_of().train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        made = configure_model(model, dist.get_world_group(), method=method, chunk=chunk)
        torch.manual_seed(7)
        logits = model(**{name: batch[name].chunk(world, 1)[rank] for name in ("input_ids", "position_ids")}).logits
        logits.square().sum().backward()
        grads = [param.grad for param in model.parameters()]
        for grad in grads:
            dist.all_reduce(grad)
        found.append([logits.detach(), *grads])
        assert (made._ring is not None) == (method == "ring")
    assert max(float((a - b).abs().max()) for one in found for a, b in zip(one, found[0])) < 1e-4


@pytest.mark.parametrize("how", ["registered", "configured"])
@on_ranks(2, init=True, timeout=90)
def test_a_model_without_positions_is_refused(rank, world, how):
    model, batch = model_of(), batch_of("causal")
    if how == "registered":
        register(model, world)
    else:
        configure_model(model, dist.get_world_group())
    tokens = batch["input_ids"].chunk(world, 1)[rank]
    refused(ValueError, "LlamaForCausalLM was called without position_ids", model, input_ids=tokens)
    refused(ValueError, "LlamaForCausalLM was called without position_ids", model, tokens, None, None)
    # another model of the process
    assert model_of()(input_ids=tokens).logits.shape == (2, LENGTH // 2, 31)


def sdpa_attention_forward(module, query, key, value, attention_mask, scaling=None, s_aux=None, **more):
    """With sinks, under the name that blocks ask for."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores, length = query @ key.transpose(2, 3) * scaling, query.shape[2]
    looks = torch.ones(length, length, dtype=torch.bool).tril() if attention_mask is None else attention_mask
    scores = scores.masked_fill(~looks, torch.finfo(scores.dtype).min)
    scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return (scores.softmax(-1)[..., :length] @ value).transpose(1, 2).contiguous(), None


def gpt_oss():
    """Attention sinks, windows in every second layer."""
    torch.manual_seed(2)
    transformers.AttentionInterface.register("sinks", sdpa_attention_forward)
    transformers.AttentionMaskInterface.register("sinks", transformers.masking_utils.sdpa_mask)
    config = transformers.GptOssConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, head_dim=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, pad_token_id=0, sliding_window=4,
        num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sinks")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


@pytest.mark.parametrize("method, chunk", [("ulysses", 0), ("ring", 0), ("auto", 5)])
@on_ranks(2, init=True, timeout=90)
def test_sinks_of_gpt_oss(rank, world, method, chunk):
    plain, model, batch = gpt_oss(), gpt_oss(), batch_of("causal")
    configure_model(model, dist.get_world_group(), method=method, chunk=chunk)
    batch.pop("labels")
    expected = plain(**batch).logits
    expected.square().sum().backward()
    logits = model(**{name: value.chunk(world, 1)[rank] for name, value in batch.items()}).logits
    logits.square().sum().backward()
    gaps, wanted = [float((logits - expected.chunk(world, 1)[rank]).abs().max())], grads_of(plain)
    assert wanted["model.layers.1.self_attn.sinks"].abs().max() > 1e-4
    for name, param in model.named_parameters():
        dist.all_reduce(param.grad)
        gaps.append(float((param.grad - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1.0)))
    assert max(gaps) < 1e-4


def test_what_a_model_will_need():
    """tests/python/sequence/test_lengths.py has the figures; here it is a real model, for two ranks as well."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    found = [
        deepspeed.sequence.explain(
            model_of(), {**config, "sequence_parallel_size": size}, memory=8 << 20, ranks=size
        )
        for size in (1, 2)
    ]  # fmt: skip
    assert found[1].longest > 1.6 * found[0].longest > 1000
    assert "gradient_checkpointing" in str(found[0]) and "2 ranks" in str(found[0])


@on_ranks(2, init=True, timeout=90)
def test_auto_wrap(rank, world):
    """By the group: models that were not wrapped stay as they are."""
    model, plain, batch = model_of(), model_of(), batch_of("packed")
    assert deepspeed.sequence.auto_wrap_model_for_sp(model, dist.get_world_group()) is model
    mine = {name: value.chunk(world, 1)[rank] for name, value in batch.items() if name != "labels"}
    expected = plain(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    assert float((model(**mine).logits - expected.chunk(world, 1)[rank]).abs().max()) < 1e-5
