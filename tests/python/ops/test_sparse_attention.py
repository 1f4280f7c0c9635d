"""Sparse attention against dense attention with masks: patterns, modules, products and softmax of blocks, BERT."""

import copy

import pytest
import torch

from deepspeed.ops import sparse_attention as sparse
from deepspeed.ops.sparse_attention import layouts
from refusals import refused

PATTERNS = {
    "dense": lambda **more: sparse.DenseSparsityConfig(4, block=8, **more),
    "fixed": lambda **more: sparse.FixedSparsityConfig(4, block=8, num_local_blocks=2, **more),
    "variable": lambda **more: sparse.VariableSparsityConfig(4, 8, True, 1, [1, 2], [0, 3], [1, 4], **more),
    "bigbird": lambda **more: sparse.BigBirdSparsityConfig(4, 8, True, **more),
    "longformer": lambda **more: sparse.BSLongformerSparsityConfig(4, block=8, global_block_indices=[2], **more),
    "sliding": lambda **more: sparse.LocalSlidingWindowSparsityConfig(4, block=8, **more),
}
TOKENS = 56  # 7 blocks


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(layout):
    """The layout of the first head, as text."""
    return ["".join(map(str, row)) for row in layout[0].tolist()]


def seen_by(layout, block):
    return layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)


def dense(query, key, value, seen, more=0.0):
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + more
    seen = seen & (scores > float("-inf"))
    return (scores.masked_fill(~seen, -1e30).softmax(-1) * seen) @ value


def gap(found, expected):
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs)


# ---- patterns --------------------------------------------------------------------------------------------------------
def test_patterns_are_the_published_ones():
    made = sparse.FixedSparsityConfig(2, 16, num_local_blocks=4).make_layout(96)
    assert rows_of(made) == ["111101", "111101", "111101", "111101", "000111", "000111"]
    made = sparse.FixedSparsityConfig(1, 16, num_local_blocks=2, attention="unidirectional").make_layout(80)
    assert rows_of(made) == ["10000", "11000", "01100", "01110", "01011"]
    made = sparse.FixedSparsityConfig(1, 16, num_local_blocks=2, horizontal_global_attention=True).make_layout(64)
    assert rows_of(made) == ["1101", "1111", "0111", "1111"]
    made = sparse.VariableSparsityConfig(1, 16, local_window_blocks=[1, 2], global_block_indices=[4]).make_layout(96)
    assert rows_of(made) == ["100010", "011010", "011010", "000110", "000110", "000011"]
    ends = {"global_block_indices": [0], "global_block_end_indices": [2], "horizontal_global_attention": True}
    made = sparse.VariableSparsityConfig(1, 16, local_window_blocks=[1], **ends).make_layout(64)
    assert rows_of(made) == ["1111", "1111", "1110", "1101"]
    made = sparse.BSLongformerSparsityConfig(1, 16, global_block_indices=[2]).make_layout(80)
    assert rows_of(made) == ["11100", "11100", "11111", "00111", "00111"]
    made = sparse.LocalSlidingWindowSparsityConfig(2, 16).make_layout(64)
    assert rows_of(made) == ["1000", "1100", "0110", "0011"]
    made = sparse.BigBirdSparsityConfig(1, 16, num_random_blocks=0, attention="unidirectional").make_layout(80)
    assert rows_of(made) == ["10000", "11000", "11100", "10110", "10011"]


def test_heads_take_turns_with_global_patterns():
    config = sparse.FixedSparsityConfig(3, 16, True, num_local_blocks=4, num_different_global_patterns=2)
    made = config.make_layout(128)
    assert made[0, 0].tolist() == [1, 1, 1, 1, 0, 0, 0, 1] and made[1, 0].tolist() == [1, 1, 1, 1, 0, 0, 1, 0]
    assert torch.equal(made[0], made[2])


@pytest.mark.parametrize("make", [PATTERNS["bigbird"], PATTERNS["variable"]])
def test_random_blocks_are_the_same_in_every_process_and_differ_between_heads(make):
    torch.manual_seed(1)
    first = make().make_layout(160)
    torch.manual_seed(2)
    assert torch.equal(first, make().make_layout(160))
    assert not torch.equal(first[0], first[1])
    one_way = make(attention="unidirectional").make_layout(160)
    assert torch.equal(one_way, one_way.tril()) and one_way.diagonal(0, 1, 2).all()


def test_bad_patterns_name_both_numbers():
    fixed, variable, bigbird = (
        sparse.FixedSparsityConfig, sparse.VariableSparsityConfig, sparse.BigBirdSparsityConfig
    )  # fmt: skip
    refused(ValueError, "Sequence Length, 50, needs to be dividable by Block size 16!.*pad", fixed(4).make_layout, 50)
    refused(ValueError, "local window, 4, must be dividable by number of global blocks, 3!", fixed, 4, 16, False, 4, 3)
    refused(NotImplementedError, "'causal'", fixed, 4, attention="causal")
    one_way = {"attention": "unidirectional", "horizontal_global_attention": True}
    refused(ValueError, "can support horizontal global attention", variable, 4, **one_way)
    refused(ValueError, "Set different_layout_per_head to True", fixed, 4, num_different_global_patterns=2)
    more = {"different_layout_per_head": True, "num_different_global_patterns": 5}
    refused(ValueError, "5, cannot be larger than .* 4 / 1 = 4!", fixed, 4, **more)
    ends = {"global_block_indices": [0, 4], "global_block_end_indices": [1]}
    refused(ValueError, "start indices length, 2, must be same as .* length, 1!", variable, 4, **ends)
    ends["global_block_end_indices"] = [1, 4]
    refused(ValueError, "start index, 4, must be smaller than global block end index, 4!", variable, 4, **ends)
    refused(
        ValueError, "random blocks, 9, must be smaller than .* in a row, 2!", bigbird(4, 16, False, 9).make_layout, 32
    )
    window = bigbird(4, 16, num_sliding_window_blocks=5)
    refused(ValueError, "sliding window blocks, 5, must be smaller", window.make_layout, 32)
    refused(ValueError, "windows have 1 block or more", variable, 4, local_window_blocks=[])
    refused(NotImplementedError, "SparsityConfig has no make_layout", sparse.SparsityConfig(4).make_layout, 16)


class Stripes(sparse.SparsityConfig):
    """A pattern of a user."""

    made = 0

    def make_layout(self, seq_len):
        type(self).made += 1
        layout = self.setup_layout(seq_len)
        layout[0, :, ::2] = 1
        return self.check_and_propagate_first_head_layout(layout)


class Wrong(Stripes):
    def make_layout(self, seq_len):
        return super().make_layout(seq_len)[:, :1]


def test_a_layout_is_made_once_for_a_configuration_and_a_length():
    config, before = Stripes(2, 8), Stripes.made
    attend = sparse.SparseSelfAttention(config)
    for length in (16, 32, 16, 32):
        assert attend.get_layout(length).shape == (2, length // 8, length // 8)
    assert Stripes.made == before + 2
    assert layouts.layout_of(config, 16) is layouts.layout_of(config, 16)
    assert layouts.layout_of(copy.deepcopy(config), 16) is not layouts.layout_of(config, 16)
    refused(ValueError, r"returned the shape \(2, 1, 2\): .* is \(2, 2, 2\)", layouts.layout_of, Wrong(2, 8), 16)


# ---- modules ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
def test_equals_dense_attention_with_a_mask(name, dtype, most):
    attend = sparse.SparseSelfAttention(PATTERNS[name]())
    leaves = [normal(2, 4, TOKENS, 8, seed=at).to(dtype).requires_grad_() for at in range(3)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    upper = normal(2, 4, TOKENS, 8, seed=9).to(dtype)
    output = attend(*leaves)
    expected = dense(*wide, seen_by(attend.get_layout(TOKENS), 8))
    found = [output, *torch.autograd.grad(output, leaves, upper)]
    assert gap(found, [expected, *torch.autograd.grad(expected, wide, upper.double())]) < most


@pytest.mark.parametrize("padding_mode, pairs_mode", [("add", "mul"), ("mul", "mul"), ("add", "add"), ("mul", "add")])
@pytest.mark.parametrize("with_rpe", [False, True])
def test_masks_and_positions(padding_mode, pairs_mode, with_rpe):
    attend = sparse.SparseSelfAttention(PATTERNS["fixed"](), padding_mode, pairs_mode)
    leaves = [normal(2, 4, TOKENS, 8, seed=at).float().requires_grad_() for at in range(3)]
    kept = torch.ones(2, TOKENS, dtype=torch.bool)
    kept[0, 40:] = kept[1, :3] = False
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()

    def mask(keep, mode):
        return keep.float() if mode == "mul" else torch.zeros(keep.shape).masked_fill(~keep, -1e9)

    more = {"key_padding_mask": mask(kept, padding_mode)[:, None, None], "attn_mask": mask(causal, pairs_mode)}
    rpe = normal(4, TOKENS, TOKENS, seed=8).float().requires_grad_()
    inputs = [*leaves, rpe] if with_rpe else leaves
    output = attend(*leaves, rpe=rpe if with_rpe else None, **more)
    wide = [one.detach().double().requires_grad_() for one in inputs]
    seen = seen_by(attend.get_layout(TOKENS), 8) & causal & kept[:, None, None]
    expected = dense(*wide[:3], seen, wide[3] if with_rpe else 0.0)
    rows = seen.any(-1, keepdim=True)  # with masks that are added the others see all that is hidden
    upper = normal(2, 4, TOKENS, 8, seed=9).float() * rows
    found = [output * rows, *torch.autograd.grad(output, inputs, upper)]
    assert gap(found, [expected * rows, *torch.autograd.grad(expected, wide, upper.double())]) < 1e-5
    if padding_mode == pairs_mode == "mul":
        assert not output.masked_select(~rows.expand_as(output)).any()


def test_keys_may_be_given_transposed_and_lengths_may_change():
    attend = sparse.SparseSelfAttention(PATTERNS["longformer"]())
    for length in (24, TOKENS, 24):
        q, k, v = (normal(1, 4, length, 8, seed=at).float() for at in range(3))
        assert torch.equal(attend(q, k, v), attend(q, k.transpose(-1, -2), v))


def test_refusals_of_the_module():
    attend = sparse.SparseSelfAttention(PATTERNS["dense"](), max_seq_length=64)
    q = torch.zeros(2, 4, 32, 8)
    refused(NotImplementedError, "only self-attention is supported", attend, q, q, q[:, :2])
    refused(ValueError, "72 tokens is longer than max_seq_length, 64", attend, *[torch.zeros(1, 4, 72, 8)] * 3)
    refused(ValueError, "the layout has 4 heads and the queries 2", attend, *[q[:, :2]] * 3)
    refused(
        ValueError, r"key_padding_mask has the shape \(2, 30\): it is \(2, 32\)", attend, q, q, q, None, q[:, 0, :30, 0]
    )
    refused(ValueError, "attn_mask has the shape", attend, q, q, q, attn_mask=torch.ones(32, 5))
    refused(ValueError, r"rpe has the shape \(1, 3, 32, 32\)", attend, q, q, q, torch.zeros(3, 32, 32))
    refused(ValueError, "attn_mask_mode is 'max'", sparse.SparseSelfAttention, PATTERNS["dense"](), "add", "max")
    refused(NotImplementedError, "has no make_layout", sparse.SparseSelfAttention(), *[torch.zeros(1, 4, 16, 8)] * 3)


# ---- products and softmax --------------------------------------------------------------------------------------------
LAYOUT = torch.tensor([[[1, 0, 1], [0, 1, 0]], [[0, 0, 0], [1, 1, 1]]])  # 2 heads, 2 x 3 blocks
BLOCK = 4


def to_blocks(whole):
    return torch.stack(
        [whole[:, h, r * BLOCK :, c * BLOCK :][..., :BLOCK, :BLOCK] for h, r, c in LAYOUT.nonzero().tolist()], 1
    )


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
def test_products_equal_dense_ones(mode, trans_a, trans_b):
    rows, columns, inner, kept = 2 * BLOCK, 3 * BLOCK, 5, seen_by(LAYOUT, BLOCK)
    sparse_matrix = normal(2, 2, rows, columns, seed=1) * kept
    if mode == "sdd":
        left, right = normal(2, 2, rows, inner, seed=2), normal(2, 2, inner, columns, seed=3)
        left, right = left.transpose(-1, -2) if trans_a else left, right.transpose(-1, -2) if trans_b else right
    elif mode == "dsd":
        left, right = sparse_matrix, normal(2, 2, rows if trans_a else columns, inner, seed=2)
        right = right.transpose(-1, -2) if trans_b else right
    else:
        left, right = normal(2, 2, inner, columns if trans_b else rows, seed=2), sparse_matrix
        left = left.transpose(-1, -2) if trans_a else left
    left, right = left.clone().requires_grad_(), right.clone().requires_grad_()
    expected = (left.transpose(-1, -2) if trans_a else left) @ (right.transpose(-1, -2) if trans_b else right)
    given = [to_blocks(left) if mode == "dsd" else left, to_blocks(right) if mode == "dds" else right]
    found = sparse.MatMul(LAYOUT, BLOCK, mode, trans_a, trans_b)(*given)
    expected = to_blocks(expected) if mode == "sdd" else expected
    upper = normal(*expected.shape, seed=7)
    of_blocks = [kept if index == {"dsd": 0, "dds": 1}.get(mode) else 1 for index in range(2)]
    wanted = [one * keep for one, keep in zip(torch.autograd.grad(expected, (left, right), upper), of_blocks)]
    assert gap([found, *torch.autograd.grad(found, (left, right), upper)], [expected, *wanted]) < 1e-12


def test_softmax_of_blocks_and_all_three_make_attention():
    layout = PATTERNS["bigbird"]().make_layout(TOKENS)
    q, k, v = (normal(2, 4, TOKENS, 8, seed=at) for at in range(3))
    scores = sparse.MatMul(layout, 8, "sdd", trans_b=True)(q, k).requires_grad_()
    padding, pairs = normal(2, TOKENS, seed=4), torch.ones(TOKENS, TOKENS).tril()
    more = {"key_padding_mask": padding, "attn_mask": pairs, "attn_mask_mode": "mul"}
    used = sparse.Softmax(layout, 8)(scores, scale=8**-0.5, **more)
    output = sparse.MatMul(layout, 8, "dsd")(used, v)
    seen = seen_by(layout, 8) & pairs.bool()
    assert gap([output], [dense(q, k, v, seen, padding[:, None, None])]) < 1e-12
    assert torch.autograd.gradcheck(
        lambda x: sparse.Softmax(layout[:2, :2, :2], 8)(x), normal(1, 8, 8, 8, seed=1).requires_grad_()
    )


def test_ops_of_the_module_are_its_parts():
    attend = sparse.SparseSelfAttention(PATTERNS["fixed"]())
    q, k, v = (normal(1, 4, TOKENS, 8, seed=at) for at in range(3))
    product, softmax, with_values = attend.get_ops(4, TOKENS)
    assert gap([with_values(softmax(product(q, k), scale=8**-0.5), v)], [attend(q, k, v)]) < 1e-12
    assert attend.get_ops(4, TOKENS)[0] is product
    refused(ValueError, "the layout has 4 heads and the queries 2", attend.get_ops, 2, TOKENS)


def test_bad_operands_name_both_numbers():
    refused(NotImplementedError, "sdd, dsd, dds; got 'ddd'", sparse.MatMul, LAYOUT, BLOCK, "ddd")
    product = sparse.MatMul(LAYOUT, BLOCK, "sdd")
    refused(
        ValueError, r"do not fit a layout of 2 heads with 2 x 3 blocks of 4", product, *[torch.zeros(1, 2, 8, 8)] * 2
    )
    product = sparse.MatMul(LAYOUT, BLOCK, "dsd")
    refused(ValueError, "the layout has 6 blocks of 4", product, torch.zeros(1, 5, 4, 4), torch.zeros(1, 2, 12, 3))
    refused(ValueError, "2 heads and 3 blocks of 4", product, torch.zeros(1, 6, 4, 4), torch.zeros(1, 2, 8, 3))
    refused(ValueError, "the layout has 6 blocks of 4", sparse.Softmax(LAYOUT, BLOCK), torch.zeros(1, 5, 4, 4))
