"""Random-LTD in an engine: what it trains, in recomputations, on other numbers of ranks, and after a restart."""

import importlib.util

import pytest
import torch

import deepspeed
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd, save_without_random_ltd
from harness import on_ranks
from layer_models import LENGTH, Block, Transformer, Words, batch_of, loss_of, token_dropping
from runs import NATIVE, engine_of, identical, last_of, raised, settings, take_step, weights


def engine_with(stage=0, accumulate=1, rows=2, model=None, section=None, **block):
    engine = engine_of(
        model or Transformer(**block), settings(stage, rows, accumulate, **(section or token_dropping()))
    )
    return convert_to_random_ltd(engine, Block)


def steps(engine, count=5, rank=0, world=1, rows=2, first=0):
    """Each step has the same samples on any number of ranks."""
    losses = []
    for step in range(first, first + count):
        for micro in range(engine.gradient_accumulation_steps()):
            batch = batch_of(step, rows, first=(micro * world + rank) * rows)
            losses.append(take_step(engine, loss_of(engine, batch)))
    return losses


@pytest.mark.any_device
@on_ranks(1)
def test_all_tokens_kept_is_the_plain_model_bit_by_bit(rank, world):
    kept = engine_with(section=token_dropping(least=LENGTH, most=LENGTH))
    plain = engine_of(Transformer(), settings(0))
    assert steps(kept) == steps(plain)
    assert identical(last_of(kept), last_of(plain))


@pytest.mark.any_device
@on_ranks(1)
def test_a_mask_on_the_device_counts_tokens_of_layers(rank, world):
    engine, wanted = engine_with(model=Words()), 0
    for step, kept in enumerate([4, 6, 8]):
        words = batch_of(step).to(engine.device)
        mask = torch.ones_like(words)
        mask[0, -3:] = 0
        take_step(engine, engine(words, attention_mask=mask).float().square().mean())
        wanted += round((2 * LENGTH - 3) * (2 * LENGTH + 2 * kept) / (4 * LENGTH))
    assert engine.consumed_tokens == wanted


@pytest.mark.any_device
@on_ranks(1)
def test_tokens_follow_the_schedule_and_dropped_ones_pass_unchanged(rank, world):
    engine, seen = engine_with(), {}
    for number, layer in enumerate(engine.module.h):
        layer.register_forward_hook(lambda _, given, made, at=number: seen.update({at: (given[0], made)}))
    for step, kept in enumerate([4, 6, 8, 10, 12, 12]):
        take_step(engine, loss_of(engine, batch_of(step)))
        assert engine.random_ltd_scheduler.get_current_seq() == kept
        changed = {at: (given != made).any(-1).sum(1).tolist() for at, (given, made) in seen.items()}
        assert changed == {0: [12, 12], 1: [kept] * 2, 2: [kept] * 2, 3: [12, 12]}
        if step == 0:
            which = [(seen[at][0] != seen[at][1]).any(-1) for at in (1, 2)]
            assert not torch.equal(*which) and not torch.equal(which[0][0], which[0][1])
    engine.eval()
    engine(batch_of(0))
    assert ((seen[1][0] != seen[1][1]).any(-1)).all()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("block", [{}, {"masked": True, "causal": False}, {"batch_first": False, "in_tuple": True}])
@on_ranks(1)
def test_recomputed_layers_choose_the_same_tokens(rank, world, stage, block):
    order = "batch_seq_dim" if block.get("batch_first", True) else "seq_batch_dim"
    results = []
    for reentrant in (None, True, False):
        engine = engine_with(stage, 2, section=token_dropping(hidden_state_order=order), reentrant=reentrant, **block)
        results.append((steps(engine), last_of(engine)))
    assert all(losses == results[0][0] and identical(end, results[0][1]) for losses, end in results)


def reference(engine, plan, batch):
    """The loss with explicit indexing: the layers of the plan on the chosen tokens."""
    from deepspeed._native import _C

    model, rows = engine.module, len(batch)
    x = model.into(batch)
    for number, layer in enumerate(model.h):
        if number not in plan.layers:
            x = Block.forward(layer, x)
            continue
        kept = plan.scheduler.get_current_seq()
        index = _C.choose_tokens(plan.seed, plan.step, number, 0, rows, x.shape[1], kept).long()
        at = index[..., None].expand(-1, -1, x.shape[-1])
        x = x.scatter(1, at, Block.forward(layer, x.gather(1, at)))
    found = model.head(x)
    return torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


@on_ranks(1)
def test_gradients_are_those_of_explicit_indexing(rank, world):
    engine, batch = engine_with(), batch_of(0)
    loss = loss_of(engine, batch)
    engine.backward(loss)
    found = [deepspeed.utils.safe_get_full_grad(param).clone() for param in engine.module.parameters()]
    other = reference(engine, engine._token_dropping._plan, batch)
    torch.testing.assert_close(other, loss)
    wanted = torch.autograd.grad(other, list(engine.module.parameters()))
    for mine, theirs in zip(found, wanted):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6 * theirs.abs().max().item())


@on_ranks(2)
def test_two_ranks_are_one_rank_that_accumulates(rank, world):
    sgd = {"type": "SGD", "params": {"lr": 0.3}}
    mine = engine_with(1, section={**token_dropping(), "optimizer": sgd, "gradient_clipping": 0.0})
    steps(mine, 3, rank, world)
    found = last_of(mine)
    if rank == 0:
        alone = Transformer()
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.3)
        plan = mine._token_dropping._plan
        for step in range(3):
            for other in range(world):
                loss = _plain_loss(alone, plan, step, other, batch_of(step, first=2 * other))
                (loss / world).backward()
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(found, alone.parameters()):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)


def _plain_loss(model, plan, step, sample, batch):
    """As ``reference``, of the samples from ``2 * sample`` on."""
    from deepspeed._native import _C

    x, kept = model.into(batch), plan.scheduler.get_value(step)
    for number, layer in enumerate(model.h):
        if number in plan.layers:
            index = _C.choose_tokens(plan.seed, step, number, 2 * sample, 2, x.shape[1], kept).long()
            at = index[..., None].expand(-1, -1, x.shape[-1])
            x = x.scatter(1, at, layer(x.gather(1, at)))
        else:
            x = layer(x)
    found = model.head(x)
    return torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


@on_ranks(1)
def test_a_resumed_run_goes_on_and_files_fit_the_plain_model(rank, world, tmp_path):
    engine = engine_with(accumulate=2)
    steps(engine, 3)
    engine.save_checkpoint(tmp_path, tag="t")
    state = torch.load(tmp_path / "t" / "mp_rank_00_model_states.pt")["random_ltd"]
    assert state == engine.random_ltd_scheduler.state_dict() and state["current_value"] == 8
    assert state["consumed_layer_tokens"] == 4 * sum(2 * kept + 2 * LENGTH for kept in (4, 6, 8))
    wanted = steps(engine, 3, first=3), engine.random_ltd_scheduler.state_dict(), weights(engine)
    other = engine_with(accumulate=2)
    other.load_checkpoint(tmp_path, tag="t")
    assert other.random_ltd_scheduler.state_dict() == state
    assert (steps(other, 3, first=3), other.random_ltd_scheduler.state_dict()) == wanted[:2]
    assert identical(list(weights(other).values()), list(wanted[2].values()))
    plain = engine_of(Transformer(), settings(0, accumulate=2))
    plain.load_checkpoint(tmp_path, tag="t")
    Transformer().load_state_dict(save_without_random_ltd(other))
    plain.save_checkpoint(tmp_path, tag="plain")
    other.load_checkpoint(tmp_path, tag="plain")  # says nothing of tokens
    assert other.random_ltd_scheduler.get_current_seq() == 10 and other.global_steps == 3


@on_ranks(1)
def test_checkpoints_without_pickles_have_the_counts(rank, world, tmp_path):
    section = {**token_dropping(), "checkpoint": NATIVE}
    engine, other = engine_with(section=section), engine_with(section=section)
    steps(engine, 3)
    engine.save_checkpoint(tmp_path, tag="t")
    other.load_checkpoint(tmp_path, tag="t")
    assert other.random_ltd_scheduler.state_dict() == engine.random_ltd_scheduler.state_dict()
    assert steps(other, 2, first=3) == steps(engine, 2, first=3)


@on_ranks(1)
def test_a_model_that_was_converted_before(rank, world):
    before = engine_of(convert_to_random_ltd(Transformer(), Block), settings(0, **token_dropping()))
    assert steps(before) == steps(engine_with())


@on_ranks(1)
def test_refused(rank, world):
    def configured(**changes):
        return raised(engine_of, Transformer(), settings(0, **token_dropping(**changes)))

    texts = {
        "random_ltd_layer_num": configured(random_ltd_layer_num=3),
        "micro_batch_size is 3, and train_micro_batch_size_per_gpu is 2": configured(micro_batch_size=3),
        "the first number of tokens is above the last one": configured(least=20, add=2),
        "the first one would be 0": configured(least=4, add=6),
        "hidden_state_order": configured(hidden_state_order=None),
        "does not enable it": raised(convert_to_random_ltd, engine_of(Transformer(), settings(0)), Block),
    }
    for text, error in texts.items():
        assert text in str(error), (text, error)
    off = token_dropping()
    off["data_efficiency"]["enabled"] = False
    engine = engine_of(Transformer(), settings(0, **off))
    assert not engine.random_ltd_enabled() and engine.random_ltd_scheduler is None


@on_ranks(2)
def test_ranks_that_share_a_sequence_are_refused(rank, world):
    shared = settings(0, sequence_parallel_size=2, **token_dropping())
    error = raised(deepspeed.initialize, model=Transformer(), config=shared, mesh_param=(1, 2))
    assert "2 ranks share a sequence" in str(error), error


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", ["gpt2", "bert", "vit"])
@on_ranks(1)
def test_layers_of_transformers(rank, world, kind):
    import transformers

    small = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    small.update(vocab_size=29, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=29, n_embd=16, n_layer=4, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        model, name = transformers.GPT2LMHeadModel(config), "GPT2Block"
    elif kind == "bert":
        model, name = transformers.BertForMaskedLM(transformers.BertConfig(**small)), "BertLayer"
    else:
        config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=3, **small)
        model, name = transformers.ViTForImageClassification(config), "ViTLayer"
    layer = next(type(one) for one in model.modules() if type(one).__name__ == name)
    length = 17 if kind == "vit" else LENGTH
    for kept in (length, 6):
        section = token_dropping(least=kept, most=kept, add=1, model_type="decoder" if kind == "gpt2" else "encoder")
        engine = convert_to_random_ltd(engine_of(model, settings(0, **section)), layer)
        batch = batch_of(0)
        alive = torch.ones_like(batch)
        alive[0, -3:] = 0
        given = {"input_ids": batch, "attention_mask": alive, "labels": batch}
        if kind == "vit":
            given = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}
        loss = engine(**given).loss
        assert engine._token_dropping._plan.lengths == {1: (length, kept), 2: (length, kept)}
        if kept == length:
            torch.testing.assert_close(loss, model.eval()(**given).loss)
            model.train()
        take_step(engine, loss)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks()
def test_consumed_tokens_are_the_sum_of_effective_lengths(rank, world, accumulate):
    engine = engine_with(accumulate=accumulate, model=Words())
    counted = 0
    for step, (cut, kept) in enumerate([(8, 4), (8, 6), (8, 8), (12, 10), (12, 12)]):
        for micro in range(accumulate):
            batch = batch_of(step, first=(micro * world + rank) * 2)
            found = engine(batch, curriculum_seqlen=cut)
            take_step(engine, found.square().mean())
        lengths = [cut, min(cut, kept), min(cut, kept), cut]
        counted += round(2 * sum(lengths) / 4) * world * accumulate
        report = engine.data_efficiency_report()
        assert report["layer_lengths"] == lengths and report["effective_length"] == sum(lengths) / 4
        assert (report["step"], report["sequence_length"], report["kept_tokens"]) == (step + 1, cut, kept)
        assert report["consumed_tokens"] == engine.consumed_tokens == counted


@on_ranks(1)
def test_the_learning_rate_follows_the_tokens_of_the_layers(rank, world):
    schedule = {"enabled": True, "total_layer_tokens": 400, "warmup_layer_tokens": 100, "warmup_type": "linear"}
    params = {"total_num_steps": 7, "warmup_max_lr": 0.01, "warmup_num_steps": 3}
    section = token_dropping(layer_token_lr_schedule=schedule)
    section["scheduler"] = {"type": "WarmupDecayLR", "params": params}
    engine = engine_with(section=section)
    for step in range(6):
        steps(engine, 1, first=step)
        tokens = engine.random_ltd_scheduler.consumed_layer_tokens
        assert tokens == 2 * sum(2 * min(4 + 2 * at, 12) + 24 for at in range(step + 1))
        wanted = 0.01 * (tokens / 100 if tokens < 100 else max(0.0, (400 - tokens) / 300))
        assert engine.get_lr()[0] == pytest.approx(wanted, abs=1.5e-4), (step, tokens)
    section["scheduler"] = {"type": "WarmupLR", "params": {}}
    error = raised(engine_of, Transformer(), settings(0, **section))
    assert "Use WarmupDecayLR or WarmupCosineLR" in str(error), error
