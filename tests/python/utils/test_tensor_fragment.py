"""Access to what training keeps of a parameter, over a link made up for the test, and fragments of flat partitions.

tests/dist/test_tensor_fragment.py has the same over engines.
"""

import importlib
import inspect
import types

import pytest
import torch

import deepspeed.utils as utils
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state, link_hp_params
from deepspeed.utils.tensor_fragment import (
    fragment_address,
    get_hp_fragment_mapping,
    map_to_flat_opt_states,
    tensor_fragment,
)
from processes import run_after_torch
from refusals import refused
from runs import identical

SAFE = {
    "safe_get_full_fp32_param": ["param"],
    "safe_get_full_grad": ["param"],
    "safe_get_full_optimizer_state": ["param", "optim_state_key"],
    "safe_set_full_fp32_param": ["param", "value"],
    "safe_set_full_grad": ["param", "value"],
    "safe_set_full_optimizer_state": ["param", "value", "optim_state_key"],
    "safe_get_local_fp32_param": ["param"],
    "safe_get_local_grad": ["param"],
    "safe_get_local_optimizer_state": ["param", "optim_state_key"],
    "safe_set_local_fp32_param": ["param", "value"],
    "safe_set_local_grad": ["param", "value"],
    "safe_set_local_optimizer_state": ["param", "value", "optim_state_key"],
    "safe_update_full_grad_vectorized": ["param_list", "update_func"],
}


def test_names_and_signatures():
    where = importlib.import_module("deepspeed.utils.tensor_fragment")
    for name, parameters in SAFE.items():
        function = getattr(utils, name)
        assert function is getattr(where, name)
        assert list(inspect.signature(function).parameters) == parameters, name
    for name in ("get_full_hp_param", "get_full_hp_grad", "set_full_hp_param", "set_full_hp_grad", "link_hp_params"):
        assert callable(getattr(utils, name))
    assert utils.tensor_fragment is tensor_fragment and utils.fragment_address is fragment_address


@pytest.mark.parametrize("first", ["deepspeed.utils", "deepspeed.utils.tensor_fragment"])
def test_the_name_means_the_class_whatever_is_imported_first(first):
    code = f"import {first}\nfrom deepspeed.utils import tensor_fragment\nassert isinstance(tensor_fragment, type)"
    assert run_after_torch(code).returncode == 0


class Link:
    """A rank that owns elements 2..5 and 8..9 of ten; what others own stays as it is. Gradients are kept times 4."""

    OWN = [(2, 4), (8, 2)]

    def __init__(self, shape=(2, 5), own=OWN, states=("exp_avg",)):
        self.owner = types.SimpleNamespace(loss_scale=4.0)
        self.own = own
        self.kept = {kind: torch.arange(10.0).reshape(shape) for kind in ("fp32", "grad", *states)}
        self.kept["grad"] *= 4
        self.published = None

    def _factor(self, kind):
        return self.owner.loss_scale if kind == "grad" else 1.0

    def get(self, kind):
        return self.kept[kind] / self._factor(kind) if self.kept.get(kind) is not None else None

    def set(self, kind, value):
        self.kept[kind] = value * self._factor(kind)
        if kind == "fp32":
            self.published = value.clone()

    def set_pieces(self, kind, flat):
        for (_, numel, view), begin in zip(self.pieces(kind), (0, self.own[0][1])):
            view.copy_(flat[begin : begin + numel])

    def pieces(self, kind):
        if self.kept.get(kind) is None:
            return []
        flat = self.kept[kind].view(-1)
        return [(offset, numel, flat[offset : offset + numel]) for offset, numel in self.own]


def linked(dtype=torch.bfloat16, **options):
    param = torch.nn.Parameter(torch.zeros(2, 5, dtype=dtype))
    param._ds_link = Link(**options)
    return param


def sharded(**options):
    """As a parameter of stage 3: no values here, a slice of six with padding."""
    param = torch.nn.Parameter(torch.empty(0))
    param.ds_id, param.ds_shape = 0, torch.Size([2, 5])
    shard = torch.zeros(6)
    param.ds_handle = types.SimpleNamespace(name="layer.weight", slice_numel=6, shard=shard, device=shard.device)
    param._ds_link = Link(**{"own": [(6, 4)], **options})
    return param


def held(param, where="full"):
    """The value, the gradient and a state of the optimizer; of ``where``: "full" or "local"."""
    value, grad, state = (
        getattr(utils, f"safe_get_{where}_{kind}") for kind in ("fp32_param", "grad", "optimizer_state")
    )
    return [value(param), grad(param), state(param, "exp_avg")]


@pytest.mark.parametrize("make", [linked, sharded])
def test_whole_tensors_go_through_the_link(make):
    param = make()
    whole = torch.arange(10.0).reshape(2, 5)
    assert identical(held(param), [whole] * 3) and utils.safe_get_full_optimizer_state(param, "exp_avg_sq") is None
    utils.safe_set_full_fp32_param(param, whole + 1)
    utils.safe_set_full_grad(param, (whole + 2).flatten())  # flat is fine
    utils.safe_set_full_optimizer_state(param, whole + 3, "exp_avg")
    assert identical(held(param), [whole + 1, whole + 2, whole + 3])


def test_parts_are_the_pieces_end_to_end():
    param = linked()
    own = torch.tensor([2.0, 3, 4, 5, 8, 9])
    assert identical(held(param, "local"), [own] * 3), "the gradient without the loss scale"
    assert utils.safe_get_local_optimizer_state(param, "exp_avg_sq") is None
    utils.safe_get_local_fp32_param(param).zero_()
    assert torch.equal(utils.safe_get_local_fp32_param(param), own), "it is a copy"


def test_parts_of_stage_3_are_padded():
    param = sharded()
    assert identical(held(param, "local")[:2], [torch.tensor([6.0, 7, 8, 9, 0, 0])] * 2)
    utils.safe_set_local_fp32_param(param, torch.arange(6.0))  # values for the padding are dropped
    utils.safe_set_local_grad(param, torch.arange(4.0))  # and need not be there
    assert [one.flatten().tolist() for one in held(param)[:2]] == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]] * 2


def test_a_rank_that_owns_nothing():
    assert utils.safe_get_local_fp32_param(linked(own=[])) is None
    assert utils.safe_get_local_grad(linked(own=[])) is None
    assert utils.safe_get_local_fp32_param(sharded(own=[])).tolist() == [0] * 6
    assert utils.safe_get_local_grad(sharded(own=[])).tolist() == [0] * 6
    param = linked(own=[])
    utils.safe_set_local_fp32_param(param, None)
    assert param._ds_link.published is not None, "it takes part where others have something to set"
    utils.safe_set_local_grad(param, None)


def test_setting_parts():
    param, part = linked(), torch.full((6,), 50.0)
    utils.safe_set_local_fp32_param(param, part)
    expected = [0, 1, 50, 50, 50, 50, 6, 7, 50, 50]
    assert param._ds_link.published.flatten().tolist() == expected, "weights follow on all ranks"
    utils.safe_set_local_grad(param, part)
    utils.safe_set_local_optimizer_state(param, part, "exp_avg")
    assert [one.flatten().tolist() for one in held(param)] == [expected] * 3


def test_what_does_not_fit():
    param = sharded()
    for numel in (0, 3, 5, 7):
        words = r"'layer.weight' \(2, 5\): this rank's part has 6 elements"
        refused(ValueError, words, utils.safe_set_local_fp32_param, param, torch.zeros(numel))
    for shape in ((5, 2), (9,), (2, 5, 1)):
        words = r"'layer.weight' \(2, 5\) cannot take a value of shape"
        refused(ValueError, words, utils.safe_set_full_grad, param, torch.zeros(shape))
    refused(TypeError, "takes a tensor, got float", utils.safe_set_full_fp32_param, param, 1.0)
    setters = ((utils.safe_set_full_optimizer_state, (2, 5)), (utils.safe_set_local_optimizer_state, (6,)))
    for set_state, shape in setters:
        words = "no optimizer state 'momentum' to set"
        refused(ValueError, words, set_state, param, torch.zeros(shape), "momentum")
    param._ds_link.kept["grad"] = None
    assert utils.safe_get_full_grad(param) is None and utils.safe_get_local_grad(param) is None
    refused(ValueError, "no gradient to set", utils.safe_set_local_grad, param, torch.zeros(6))


def test_a_parameter_that_no_engine_trains():
    param = torch.nn.Parameter(torch.ones(3))
    assert (
        utils.safe_get_full_fp32_param(param).tolist() == [1, 1, 1] == utils.safe_get_local_fp32_param(param).tolist()
    )
    assert utils.safe_get_full_grad(param) is None is utils.safe_get_local_grad(param)
    (2 * param).sum().backward()
    grad = utils.safe_get_full_grad(param)
    assert grad.tolist() == [2, 2, 2]
    grad.zero_()
    assert param.grad.tolist() == [2, 2, 2], "it is a copy"
    utils.safe_set_full_grad(param, torch.full((3,), 7.0))
    utils.safe_set_local_fp32_param(param, torch.full((3,), 8.0))
    assert param.grad.tolist() == [7] * 3 and param.tolist() == [8] * 3
    param.grad = None
    utils.safe_set_local_grad(param, torch.full((3,), 9.0))
    assert param.grad.tolist() == [9] * 3 and utils.safe_get_full_optimizer_state(param, "exp_avg") is None
    assert utils.safe_get_local_optimizer_state(param, "exp_avg") is None
    for set_state in (utils.safe_set_full_optimizer_state, utils.safe_set_local_optimizer_state):
        refused(ValueError, "no optimizer state 'exp_avg' to set", set_state, param, torch.zeros(3), "exp_avg")


def test_a_16_bit_parameter_that_no_engine_trains_has_no_fp32_value():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert utils.safe_get_full_fp32_param(param) is None
    refused(ValueError, "no fp32 value to set", utils.safe_set_full_fp32_param, param, torch.zeros(3))
    param.sum().backward()
    assert utils.safe_get_full_grad(param).dtype == torch.float32


def test_a_sharded_parameter_that_is_not_trained():
    param = torch.nn.Parameter(torch.empty(0))
    param.ds_id, param.ds_shape = 0, torch.Size([2])
    kept, calls = torch.tensor([1.0, 2.0]), []

    def all_gather():
        param.data = kept.clone()

    def partition(has_been_updated):
        calls.append(has_been_updated)
        if has_been_updated:
            kept.copy_(param.data)
        param.data = torch.empty(0)

    param.all_gather, param.partition = all_gather, partition
    assert utils.safe_get_full_fp32_param(param).tolist() == [1, 2]
    utils.safe_set_full_fp32_param(param, torch.tensor([3.0, 4.0]))
    assert kept.tolist() == [3, 4] and calls == [False, True] and param.numel() == 0
    refused(ValueError, "no gradient to set", utils.safe_set_full_grad, param, torch.zeros(2))


def test_update_of_gradients():
    first, second, without = linked(), linked(), linked()
    without._ds_link.kept["grad"] = None
    seen = []

    def update(grad, param):
        seen.append(param)
        if param is second:
            grad.zero_()
            return None
        return grad + 1

    utils.safe_update_full_grad_vectorized([first, without, second], update)
    assert seen[0] is first and seen[1] is second and len(seen) == 2
    assert torch.equal(utils.safe_get_full_grad(first), torch.arange(1.0, 11).reshape(2, 5))
    assert not utils.safe_get_full_grad(second).any()


# ---- fragments ------------------------------------------------------------------------------------------------------
SIZES = [(2, 3), (5,), (0,), (4, 1)]
TOTAL = 15


def group(size, rank, states=True):
    """Parameters of a group, linked to partition ``rank`` of ``size`` elements each, as rank ``rank`` has them."""
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in SIZES]
    begin, end = rank * size, min(TOTAL, (rank + 1) * size)
    flat = torch.arange(float(TOTAL))[begin:end].clone()
    gradients = {0: []}
    link_hp_params(params, flat, gradients, {}, False, 0, begin, end - begin, None)
    for param in params:
        if param._hp_mapping is not None:
            gradients[0].append(param._hp_mapping.hp_fragment * 2)
    if states:
        state = {flat: {"exp_avg": flat * 3, "step": torch.tensor(1.0), "name": "x"}}
        lazy_init_hp_params_optimizer_state(params, flat, state)
    return params, flat, gradients


def wholes():
    return [part.reshape(shape) for part, shape in zip(torch.arange(float(TOTAL)).split([6, 5, 0, 4]), SIZES)]


@pytest.mark.parametrize("size", [1, 4, 5, 6, 8, 15])
def test_fragments_of_all_partitions_make_the_whole(size):
    ranks = [group(size, rank)[0] for rank in range(-(-TOTAL // size))]
    for index, whole in enumerate(wholes()):
        params = [params[index] for params in ranks]
        assert torch.equal(sum(p.get_full_hp_param() for p in params), whole)
        assert torch.equal(sum(p.get_full_hp_param("exp_avg") for p in params), 3 * whole)
        assert torch.equal(sum(p.get_full_hp_grad() for p in params), 2 * whole)
        assert torch.equal(sum(utils.safe_get_full_fp32_param(p) for p in params), whole)
        assert sum(p._hp_mapping is not None for p in params) >= (whole.numel() > 0)


def test_setting_fragments():
    params, flat, gradients = group(8, 0)
    first, second, _, outside = params
    assert outside._hp_mapping is None
    for param in params:
        value = torch.full(param.shape, 50.0)
        utils.safe_set_full_fp32_param(param, value)
        utils.safe_set_full_grad(param, value + 1)
        utils.safe_set_full_optimizer_state(param, value + 2, "exp_avg")
        assert torch.equal(param.detach(), value.bfloat16()), "the weight follows"
    assert flat.tolist() == [50] * 8
    assert [g.tolist() for g in gradients[0]] == [[51] * 6, [51] * 2]
    assert utils.safe_get_full_optimizer_state(second, "exp_avg").tolist() == [52, 52, 0, 0, 0]
    assert first._hp_mapping.get_optim_state_keys() == ["exp_avg"], "step has no value for each element"


def test_one_fragment():
    param = torch.nn.Parameter(torch.arange(5.0).bfloat16())
    flat = torch.full((4,), 9.0)
    made = get_hp_fragment_mapping(param, 6, flat, {1: [torch.ones(2)]}, {1: [torch.zeros(2)]}, True, 1, 9, 4)
    assert made.lp_fragment_address == fragment_address(numel=2, start=3)
    assert made.get_hp_fragment_address() == fragment_address(numel=2, start=0)
    assert made.get_lp_grad_fragment(0).tolist() == [0, 0], "the offloaded one"
    made.update_hp()
    assert flat.tolist() == [3, 4, 9, 9]
    flat[0] = 7
    made.update_lp()
    assert param.tolist() == [0, 1, 2, 7, 4]
    refused(ValueError, "no optimizer state 'exp_avg'; there are", made.get_hp_fragment, "exp_avg")
    refused(
        ValueError,
        "has none in the partition of 4 from 11 on",
        get_hp_fragment_mapping,
        param,
        6,
        flat,
        {},
        {},
        False,
        0,
        11,
        4,
    )


def test_states_end_to_end():
    params, flat, _ = group(8, 0)
    state = {}
    map_to_flat_opt_states(flat, params, state, ["exp_avg"])
    assert torch.equal(state[flat]["exp_avg"], 3 * torch.arange(8.0))
    state[flat]["exp_avg"].zero_()
    assert not params[0].get_full_hp_param("exp_avg").any(), "fragments are views of it"


def test_a_gradient_before_any_backward():
    params, _, gradients = group(15, 0)
    gradients.clear()
    assert not params[0].get_full_hp_grad().any()
    refused(ValueError, "has no gradient to set", params[0].set_full_hp_grad, torch.zeros(2, 3))
