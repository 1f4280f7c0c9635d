"""An engine logs its configuration when it starts: once, on rank 0, and only values that differ from the defaults."""

from unittest import mock

import pytest

from deepspeed.host import product_error
from engine_models import loss_on, make_net
from harness import on_ranks, run_ranks
from logs import logged
from runs import engine_of, take_step, together

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "my_own_key": 1,
}


@on_ranks(2, init=True)
def test_rank_0_tells_the_values_that_are_no_defaults_once(rank, world_size):
    with logged() as texts:
        model = make_net()
        engine = engine_of(model, CONFIG, model_parameters=model.parameters())
        for step in range(3):
            take_step(engine, loss_on(engine, step, size=2))
    assert engine.config is CONFIG
    first, second = together([text for text in texts if "onfiguration" in text])
    assert second == []
    report = [text for text in first if "differs from the defaults" in text]
    assert len(report) == 1
    lines = report[0].splitlines()[1:]
    assert "gradient_clipping = 0.5 (given)" in lines
    assert "optimizer.params.lr = 0.001 (given)" in lines
    assert any(line.startswith("train_batch_size = 4 (derived: ") for line in lines)
    assert not any(line.startswith("zero_optimization") for line in lines)
    assert sum("my_own_key" in text for text in first) == 1


def memory_of_a_step(rank, world_size, wanted):
    with logged() as texts:
        model = make_net()
        engine = engine_of(model, {**CONFIG, "memory_breakdown": wanted}, model_parameters=model.parameters())
        take_step(engine, loss_on(engine, 0, size=2))
    return [text.split(" GB")[0] for text in texts if text.startswith(("Engine ", "MA "))]


def test_memory_breakdown_tells_memory_around_each_part_of_a_step():
    first, second = run_ranks(2, memory_of_a_step, True)
    parts = ["forward", "backward", "step"]
    assert first[::2] == [f"Engine {when} {part}" for part in parts for when in ("before", "after")]
    assert len(first) == 12 and all(float(line.split()[1]) > 0 for line in first[1::2])
    assert second == [], "rank 0 speaks for all"
    assert run_ranks(1, memory_of_a_step, False) == [[]]


@pytest.mark.parametrize("bf16, error, times", [(True, 0.0267, 1), (True, 0.0017, 0), (False, 0.0267, 0)])
@on_ranks(2, init=True)
def test_inexact_bf16_products_are_told_once_by_rank_0(rank, world_size, bf16, error, times):
    """With this measured error of torch's products; an engine is made twice."""
    with logged() as texts, mock.patch.object(product_error, "product_error", lambda dtype: error):
        for _ in range(2):
            model = make_net()
            engine_of(model, {**CONFIG, "bf16": {"enabled": bf16}}, model_parameters=model.parameters())
    first, second = together([text for text in texts if "bf16 matrix products" in text])
    assert len(first) == times and second == [], (first, second)
    assert all("2.67%" in text and "torch 2.x" in text and "fp32" in text for text in first)
