"""Tokens that layers drop: choices, rows and their gradients, masks, the schedule, and what is refused."""

import math

import pytest
import torch
from torch import nn

from deepspeed._native import _C
from deepspeed.data.random_ltd import (
    RandomLTDScheduler,
    TokenDropping,
    TokenDroppingForward,
    convert_to_random_ltd,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)
from deepspeed.ops.op_builder import RandomLTDBuilder
from deepspeed.ops.random_ltd import GatherTokens, ScatterTokens, bert_sample_tokens, gpt_sample_tokens
from deepspeed.ops.random_ltd.dropping_utils import cut_mask

SCHEDULE = {
    "min_value": 128,
    "max_value": 2048,
    "schedule_type": "fixed_linear",
    "schedule_config": {"require_steps": 10000, "seq_per_step": 16},
}


def section(layers=(0, 2), count=3, order="batch_seq_dim", mask="mask", schedule=SCHEDULE):
    return {
        "total_layer_num": count,
        "random_ltd_layer_num": None,
        "random_ltd_layer_id": list(layers),
        "model_mask_name": mask,
        "hidden_state_order": order,
        "global_batch_size": 4,
        "random_ltd_schedule": schedule,
    }


# ---- choices ---------------------------------------------------------------------------------------------------------


def choose(seed=7, step=3, layer=1, first=0, samples=4, count=50, keep=20):
    return _C.choose_tokens(seed, step, layer, first, samples, count, keep)


def test_choices_are_ascending_numbers_and_depend_on_every_number_of_their_place():
    found = choose()
    assert found.dtype == torch.int32 and found.shape == (4, 20)
    assert (found[:, 1:] > found[:, :-1]).all() and found.min() >= 0 and found.max() < 50
    assert torch.equal(found, choose())
    assert torch.equal(choose(first=2, samples=2), found[2:])  # by the number of the sample alone
    for other in (choose(seed=8), choose(step=4), choose(layer=2), choose(first=4)):
        assert not torch.equal(other, found)
    assert torch.equal(choose(keep=50)[0], torch.arange(50, dtype=torch.int32))
    with pytest.raises(ValueError, match="cannot choose 51 of 50 tokens"):
        choose(keep=51)


def test_every_token_is_kept_equally_often():
    samples, count, keep = 20000, 10, 3
    kept = torch.bincount(choose(samples=samples, count=count, keep=keep).flatten(), minlength=count).double()
    share = keep / count
    error = math.sqrt(share * (1 - share) / samples)
    assert ((kept / samples - share).abs() < 4.5 * error).all()


# ---- rows ------------------------------------------------------------------------------------------------------------


def by_index(x, w, index, batch_first):
    """The same by explicit indexing, in the order [samples, tokens, width]."""
    x = x if batch_first else x.transpose(0, 1)
    at = index.long()[..., None].expand(-1, -1, x.shape[-1])
    whole = x.scatter(1, at, torch.tanh(x.gather(1, at) @ w))
    return whole if batch_first else whole.transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_and_gradients_are_those_of_explicit_indexing(batch_first, dtype):
    torch.manual_seed(0)
    samples, tokens, width, kept = 3, 11, 8, 5
    shape = (samples, tokens, width) if batch_first else (tokens, samples, width)
    index = choose(samples=samples, count=tokens, keep=kept)
    x, w, scale = (
        torch.randn(shape, dtype=dtype),
        torch.randn(width, width, dtype=dtype),
        torch.randn(shape, dtype=dtype),
    )
    results = []
    for dropped in (True, False):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        if dropped:
            passed, some = GatherTokens.apply(a * 2, index, batch_first)
            whole = ScatterTokens.apply(passed, torch.tanh(some @ b), index, batch_first)
        else:
            whole = by_index(a * 2, b, index, batch_first)
        (whole * scale).sum().backward()
        results.append((whole, a.grad, b.grad))
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    whole, plain = results[0][0], (x * 2)
    whole, plain = (t if batch_first else t.transpose(0, 1) for t in (whole, plain))
    for sample in range(samples):  # dropped tokens have passed unchanged, in their places
        others = [token for token in range(tokens) if token not in index[sample].tolist()]
        assert torch.equal(whole[sample, others], plain[sample, others])


def test_rows_of_planned_steps_have_shapes_alone():
    x = torch.zeros(3, 11, 8, device="meta", requires_grad=True)
    index = choose(samples=3, count=11, keep=5).to("meta")
    passed, some = GatherTokens.apply(x * 2, index, True)
    whole = ScatterTokens.apply(passed, some * 3, index, True)
    whole.sum().backward()
    assert some.shape == (3, 5, 8) and whole.is_meta and x.grad.shape == whole.shape == x.shape


def test_a_choice_for_other_samples_is_refused():
    with pytest.raises(ValueError, match=r"tokens were chosen for 2 samples, and activations of shape \(3, 4, 5\)"):
        GatherTokens.apply(torch.zeros(3, 4, 5), torch.zeros(2, 1, dtype=torch.int32), True)


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 7), (3, 1, 1, 7), (3, 2, 7, 7), (1, 1, 7, 7), (7, 7), (3, 7, 7), (1, 1, 1, 7)])
def test_masks_are_cut_to_the_kept_tokens(shape):
    mask = torch.randn(shape)
    index = choose(samples=3, count=7, keep=4)
    found = cut_mask(mask, index, 7)
    full = mask[None] if shape == (7, 7) else mask
    full = full.expand(3, *full.shape[1:])
    for sample in range(3):
        at = index[sample].long()
        wanted = full[sample][..., at]
        wanted = wanted[..., at, :] if full.dim() > 2 and full.shape[-2] == 7 else wanted
        assert torch.equal(found[sample], wanted)


def test_masks_that_fit_nothing_or_two_things_are_refused():
    with pytest.raises(ValueError, match=r"shape \(3, 1, 6\) does not fit 3 samples of 7 tokens"):
        cut_mask(torch.zeros(3, 1, 6), choose(samples=3, count=7, keep=2), 7)
    with pytest.raises(ValueError, match="may be one of 7 samples or of 7 tokens"):
        cut_mask(torch.zeros(7, 7), choose(samples=7, count=7, keep=2), 7)


def test_sampling_functions_and_the_op():
    causal = torch.ones(1, 1, 8, 8).tril()
    torch.manual_seed(1)
    indices, mask = gpt_sample_tokens(5, 8, 3, layers=2, attn_mask=causal)
    assert indices.shape == (2, 3, 5) and indices.dtype == torch.int32 and not torch.equal(indices[0], indices[1])
    assert torch.equal(mask, torch.ones(1, 1, 5, 5).tril())
    assert torch.equal(cut_mask(causal, indices[0], 8)[1], mask[0])  # the same for every choice
    mask_of_keys = torch.randn(3, 1, 1, 8)
    torch.manual_seed(1)
    again, masks = bert_sample_tokens(5, 8, 3, layers=2, attn_mask=mask_of_keys)
    assert torch.equal(again, indices) and [one.shape for one in masks] == [(3, 1, 1, 5)] * 2
    assert gpt_sample_tokens(5, 8, 3)[1] is None and bert_sample_tokens(5, 8, 3)[1] is None
    op, x = RandomLTDBuilder().load(), torch.randn(3, 8, 4)
    kept = op.token_gather(x, indices[0], True)
    assert torch.equal(kept[1], x[1, indices[0, 1].long()])
    assert op.token_scatter_(x, torch.zeros_like(kept), indices[0], True) is x and not x[1, indices[0, 1].long()].any()
    assert op.token_sort_(indices.flip(-1).clone(), 8).equal(indices)
    assert op.mask_gather_gpt(causal, 5).equal(mask) and op.mask_gather_bert(causal, indices)[1][2].equal(mask[0])


# ---- the schedule ----------------------------------------------------------------------------------------------------


def test_the_schedule_is_its_formula_at_every_step():
    scheduler = RandomLTDScheduler(section())
    layer_tokens = 0
    for step in range(20000):
        wanted = math.floor(step / 10000 * (2048 - 128) + 128)
        wanted = min(wanted - wanted % 16, 2048)
        assert scheduler.update_seq(step) == scheduler.get_current_seq() == scheduler.get_value(step) == wanted
        layer_tokens += 4 * (2 * wanted + 2048)
    assert wanted == 2048 and scheduler.consumed_layer_tokens == layer_tokens
    scheduler.update_seq(19999)  # another micro-step of that step
    assert scheduler.consumed_layer_tokens == layer_tokens == scheduler.get_total_layer_tokens(20000)
    assert (scheduler.model_layer_num, scheduler.get_random_ltd_layer_num()) == (3, 2)
    other = RandomLTDScheduler(section())
    other.load_state_dict(scheduler.state_dict())
    assert other.state_dict() == scheduler.state_dict()
    other.set_current_seq(5)
    assert other.get_current_seq() == 5
    other.reset_to_init()
    assert other.get_current_seq() == 128 and other.consumed_layer_tokens == 0


def test_a_length_that_is_no_multiple_is_reached_and_kept():
    schedule = {
        **SCHEDULE,
        "min_value": 66,
        "max_value": 197,
        "schedule_config": {"require_steps": 10, "seq_per_step": 16},
    }
    scheduler = RandomLTDScheduler(section(schedule=schedule))
    assert [scheduler.get_value(step) for step in (0, 10, 11, 1000)] == [66, 192, 197, 197]


# ---- what is refused -------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, hidden_states, mask=None):
        return self.fc(hidden_states)


class Needy(Layer):
    def forward(self, hidden_states, mask, past=None):
        return hidden_states


class Greedy(Layer):
    def forward(self, hidden_states, *others):
        return hidden_states


class Nameless(Layer):
    def forward(self, *given, mask=None):
        return given[0]


class Narrow(Layer):
    def forward(self, hidden_states, mask=None):
        return hidden_states[..., :2]


def planned(kind=Layer, count=3, **given):
    model = convert_to_random_ltd(nn.Sequential(*(kind() for _ in range(count))), kind)
    config = section(**given)
    plan = TokenDropping(RandomLTDScheduler(config), config, 1, 0, 1)
    plan.take(TokenDroppingForward.of(model))
    plan.scheduler.set_current_seq(2)
    return model, plan


@pytest.mark.parametrize(
    "text, call",
    [
        (r"argument 'mask' of Needy.forward has no default", lambda: planned(Needy)),
        (r"argument '\*others' of Greedy.forward has no default", lambda: planned(Greedy)),
        (r"first argument of Nameless.forward is \*given: it must be", lambda: planned(Nameless)),
        (r"names the layers \[3, 5\], and the model has 3", lambda: planned(layers=(1, 3, 5))),
        (r"names a layer twice", lambda: planned(layers=(1, 1))),
        (r"total_layer_num is 4, and the model has 3 layers", lambda: planned(count=3, layers=(1,)) and planned_of_4()),
        (r"model_mask_name 'attention' is not an argument of 0.forward", lambda: planned(mask="attention")),
        ("no layer of the class Greedy. Its modules have", lambda: convert_to_random_ltd(Layer(), Greedy)),
    ],
)
def test_refused(text, call):
    with pytest.raises(ValueError, match=text):
        call()


def planned_of_4():
    model = convert_to_random_ltd(nn.Sequential(Layer(), Layer(), Layer()), Layer)
    config = section(count=4, layers=(1,))
    TokenDropping(RandomLTDScheduler(config), config, 1, 0, 1).take(TokenDroppingForward.of(model))


def test_a_layer_that_returns_another_shape_is_refused():
    model, plan = planned(Narrow)
    with pytest.raises(TypeError, match=r"Narrow returns \(1, 2, 2\) for hidden states of shape \(1, 2, 4\)"):
        model(torch.zeros(1, 6, 4))
    assert plan.lengths == {0: (6, 2)}


def test_outside_of_training_and_in_copies_layers_are_plain():
    import copy
    import pickle

    model, plan = planned()
    x = torch.randn(2, 6, 4)
    plain = nn.Sequential.forward(model.eval(), x)
    model.train()
    assert not torch.equal(model(x), plain) and set(plan.lengths) == {0, 2}
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in copies:
        assert torch.equal(other(x), plain)
        other[0].fc.weight.data.zero_()
    assert model[0].fc.weight.abs().sum() > 0
    assert torch.equal(model.eval()(x), plain)


def test_state_dicts_have_the_names_of_the_plain_model():
    model, _ = planned()
    plain = nn.Sequential(Layer(), Layer(), Layer())
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(save_without_random_ltd(model))
    published = {"1.random_ltd_layer.fc.weight": 1, "inner": {"0.random_ltd_layer.fc.bias": 2}}
    assert remove_random_ltd_state_dict(published) == {"1.fc.weight": 1, "inner": {"0.fc.bias": 2}}
    own = {"my_random_ltd_layer.fc.weight": 1}  # a module of the user whose name ends alike
    assert remove_random_ltd_state_dict(own) == own
