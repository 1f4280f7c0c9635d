"""Loss scalers against a plain simulation over random overflow patterns, state, pickles and wrong parameters."""

import pickle
import random

import pytest
import torch

from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaleConfig, LossScaler
from refusals import refused


class Simulation:
    """The rules once more, told by counters instead of iteration numbers."""

    def __init__(self, scale, window, hysteresis, consecutive, floor, factor):
        self.scale, self.window, self.hysteresis = scale, window, hysteresis
        self.consecutive, self.floor, self.factor = consecutive, floor, factor
        self.tolerated = hysteresis - 1  # overflows that do not lower the scale
        self.clean = 0  # clean steps in a row

    def step(self, overflow):
        if overflow:
            self.clean = 0
            if self.tolerated > 0:
                self.tolerated -= 1
            else:
                self.scale = max(self.scale / self.factor, self.floor)
            return
        self.clean += 1
        if self.consecutive:
            self.tolerated = self.hysteresis - 1
        if self.clean == self.window:
            self.clean = 0
            self.tolerated = self.hysteresis - 1
            self.scale *= self.factor


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 5])
@pytest.mark.parametrize("window, chance", [(1, 0.5), (2, 0.4), (20, 0.06), (100, 0.02), (7, 0.9)])
def test_follows_the_simulation(window, chance, hysteresis, consecutive):
    draw = random.Random(window * 1000 + hysteresis)
    scaler = DynamicLossScaler(
        init_scale=2**16, scale_window=window, min_scale=0.25, delayed_shift=hysteresis,
        consecutive_hysteresis=consecutive, raise_error_at_min_scale=False,
    )  # fmt: skip
    expected = Simulation(2.0**16, window, hysteresis, consecutive, 0.25, 2.0)
    scales = set()
    for step in range(3000):
        # Long spells of either kind, so that the scale wanders to the floor and back.
        overflow = draw.random() < (chance if step // 300 % 2 else chance / 3)
        scaler.update_scale(overflow)
        expected.step(overflow)
        if expected.scale > 2.0**100:
            expected.scale = scaler.cur_scale = 2.0**16
        assert scaler.loss_scale == expected.scale, f"after step {step}"
        assert scaler.cur_iter == step + 1
        assert scaler.last_overflow_iter == step if overflow else scaler.last_overflow_iter < step
        scales.add(scaler.loss_scale)
    assert len(scales) > 3, "the pattern must move the scale"


def test_at_the_floor():
    scaler = DynamicLossScaler(init_scale=4, min_scale=2)
    scaler.update_scale(True)
    assert scaler.loss_scale == 2
    refused(RuntimeError, "loss scale is at its minimum 2.*min_loss_scale", scaler.update_scale, True)
    quiet = DynamicLossScaler(init_scale=2, min_scale=2, raise_error_at_min_scale=False)
    quiet.update_scale(True)
    assert quiet.loss_scale == 2


def test_other_factor():
    scaler = DynamicLossScaler(init_scale=9, scale_factor=3.0, scale_window=1)
    scaler.update_scale(False)
    assert scaler.loss_scale == 27
    scaler.update_scale(True)
    assert scaler.loss_scale == 9


def test_static():
    scaler = LossScaler(scale=128)
    for overflow in (True, False, True):
        scaler.update_scale(overflow)
    assert (scaler.loss_scale, scaler.cur_scale, scaler.dynamic) == (128, 128, False)
    assert LossScaler().loss_scale == 1


@pytest.mark.parametrize("scaler", [LossScaler(8), DynamicLossScaler(init_scale=8)], ids=["static", "dynamic"])
def test_backward_scales(scaler):
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    scaler.backward((weight * 3).sum())
    assert weight.grad.tolist() == [24.0, 24.0]
    assert scaler.scale_gradient(None, (torch.ones(2), None), ())[0].tolist() == [8.0, 8.0]


def test_has_overflow():
    scaler = DynamicLossScaler()
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    params[0].grad = torch.ones(3)
    params[1].grad = torch.sparse_coo_tensor([[0]], [1.0], (3,))
    assert not scaler.has_overflow(params)
    for bad in (float("inf"), -float("inf"), float("nan")):
        params[0].grad = torch.tensor([1.0, bad, 1.0])
        assert scaler.has_overflow(params)
    params[0].grad = None
    params[1].grad = torch.sparse_coo_tensor([[0]], [float("nan")], (3,))
    assert scaler.has_overflow(params) and not LossScaler().has_overflow(params)


def test_state_and_pickle_continue_bit_for_bit():
    rules = {"scale_window": 5, "delayed_shift": 3}
    original, resumed = DynamicLossScaler(init_scale=2**10, **rules), DynamicLossScaler(**rules)
    for step in range(13):
        original.update_scale(step % 4 == 0)
    state = original.state_dict()
    resumed.load_state_dict(state)
    unpickled = pickle.loads(pickle.dumps(original))
    assert resumed.__dict__ == unpickled.__dict__ == original.__dict__
    for step in range(40):
        for scaler in (original, resumed, unpickled):
            scaler.update_scale(step % 5 == 1)
        assert resumed.__dict__ == unpickled.__dict__ == original.__dict__
    assert state["cur_iter"] == 13, "a saved state must not change with the scaler"


def test_pickle_names_the_path_that_checkpoints_use():
    for scaler in (LossScaler(1.0), DynamicLossScaler()):
        data = pickle.dumps(scaler, protocol=2)
        assert b"cdeepspeed.runtime.fp16.loss_scaler\n" in data and b"_C" not in data
    assert set(LossScaler(1.0).__dict__) == {"cur_scale", "dynamic"}


def test_pickle_of_another_writer():
    # A fixed scale as existing checkpoints hold it: the class by path, then its two attributes.
    data = (b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\nq\x00)\x81q\x01}q\x02"
            b"(X\t\x00\x00\x00cur_scaleq\x03"
        b"G@`\x00\x00\x00\x00\x00\x00X\x07\x00\x00\x00dynamicq\x04\x89ub.")  # fmt: skip
    scaler = pickle.loads(data)
    assert type(scaler) is LossScaler and scaler.loss_scale == 128.0 and not scaler.dynamic


PROGRESS = {"cur_scale": 64.0, "cur_iter": 9, "last_overflow_iter": 4, "cur_hysteresis": 2}
RULES = {
    "scale_factor": 4.0, "scale_window": 7, "min_scale": 8, "delayed_shift": 3, "consecutive_hysteresis": True,
    "raise_error_at_min_scale": False,
}  # fmt: skip


def test_a_checkpoint_says_how_far_a_scale_was_and_the_configuration_its_rules():
    """Everything that a scaler has is one or the other: none of the rules in a checkpoint counts."""
    assert {*PROGRESS, *RULES, "dynamic", "dtype"} == vars(DynamicLossScaler()).keys()
    for options in ({}, RULES):
        saved = DynamicLossScaler(2**10, dtype=torch.bfloat16, **{**RULES, "scale_window": 99, "scale_factor": 3.0})
        saved.__dict__.update(PROGRESS)
        scaler = DynamicLossScaler(2**8, **options)
        rules = {name: value for name, value in vars(scaler).items() if name not in PROGRESS}
        scaler.go_on(vars(saved))
        assert {name: value for name, value in vars(scaler).items() if name not in PROGRESS} == rules
        left = {**PROGRESS, "cur_hysteresis": 2 if options else 1}  # one overflow of three was tolerated; of one, none
        assert {name: getattr(scaler, name) for name in PROGRESS} == left
    lower = DynamicLossScaler(2**10, min_scale=128)
    lower.go_on(PROGRESS)
    assert lower.cur_scale == 128


def test_state_of_the_other_kind_is_refused():
    refused(
        ValueError,
        "saved loss scale is static.*this run's is dynamic",
        DynamicLossScaler().load_state_dict,
        LossScaler(2).state_dict(),
    )
    refused(ValueError, "saved loss scale is dynamic", LossScaler().load_state_dict, DynamicLossScaler().state_dict())


def test_create():
    args = {
        loss_scaler.INITIAL_LOSS_SCALE: 2**8, loss_scaler.SCALE_WINDOW: 7, loss_scaler.DELAYED_SHIFT: 2,
        loss_scaler.CONSECUTIVE_HYSTERESIS: True, loss_scaler.MIN_LOSS_SCALE: 4,
    }  # fmt: skip
    made = CreateLossScaler(torch.half, 0, True, args)
    assert (made.cur_scale, made.scale_window, made.delayed_shift, made.min_scale) == (2**8, 7, 2, 4)
    assert made.consecutive_hysteresis and made.dynamic and made.dtype == torch.half
    assert CreateLossScaler(torch.half, 0, True, None).cur_scale == 2**32
    assert CreateLossScaler(torch.half, 64, False, None).loss_scale == 64
    for dtype in (torch.float32, torch.bfloat16):
        fixed = CreateLossScaler(dtype, 64, True, None)
        assert type(fixed) is LossScaler and fixed.loss_scale == 1.0


def test_config_holder():
    holder = LossScaleConfig(torch.half, True, dynamic_loss_args={"init_scale": 16, "scale_window": 3})
    holder.loss_scaler.update_scale(True)
    assert (holder.cur_scale, holder.cur_iter, holder.last_overflow_iter) == (8, 1, 0)
    assert holder.dynamic_loss_scale and (holder.scale_window, holder.scale_factor, holder.min_loss_scale) == (
        3,
        2.0,
        1,
    )
    holder.cur_scale = 2
    assert holder.loss_scaler.loss_scale == 2
    fixed = LossScaleConfig(torch.half, False, static_loss_scale=32)
    assert (fixed.cur_scale, fixed.cur_iter, fixed.dynamic_loss_scale) == (32, 0, False)


@pytest.mark.parametrize(
    "params, text",
    [
        ({"scale_factor": 1.0}, "scale_factor = 1"),
        ({"scale_window": 0}, "scale_window = 0"),
        ({"min_scale": 0}, "min_scale = 0"),
        ({"delayed_shift": 0}, "hysteresis. = 0"),
        ({"init_scale": 1, "min_scale": 2}, "init_scale = 1.*min_scale = 2"),
        ({"init_scale": float("inf")}, "init_scale = inf"),
    ],
)
def test_wrong_parameters(params, text):
    refused(ValueError, text, DynamicLossScaler, **params)
    for wrong in (0, -1, float("nan"), "1", True):
        refused(ValueError, "scale =", LossScaler, wrong)


def scales_of(config, steps):
    """The scale after each step: "x" overflows, "." does not."""
    scales = []
    for step in steps:
        config.loss_scaler.update_scale(step == "x")
        scales.append(config.cur_scale)
    return scales


def test_without_zero_it_waits_a_step_longer_and_stays_at_the_floor():
    made = LossScaleConfig(torch.half, True, dynamic_loss_args={"init_scale": 2**4, "scale_window": 2})
    assert scales_of(made, "xxxxxxx") == [8, 4, 2, 1, 1, 1, 1] and (made.cur_iter, made.last_overflow_iter) == (7, 6)
    made = LossScaleConfig(torch.half, True, dynamic_loss_args={"init_scale": 2**8, "scale_window": 2})
    assert scales_of(made, ".....") == [256, 256, 512, 512, 1024]
    assert scales_of(made, "xx...x") == [512, 256, 256, 256, 512, 256]
    made = LossScaleConfig(torch.half, True, dynamic_loss_args={"init_scale": 2**8, "delayed_shift": 2})
    assert scales_of(made, "xx") == [256, 128], "hysteresis is there for those who ask"
    zero = DynamicLossScaler(init_scale=2**8, scale_window=2)
    for _ in range(2):
        zero.update_scale(False)
    assert zero.cur_scale == 512, "ZeRO optimizers count every step"
