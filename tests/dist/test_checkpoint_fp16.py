"""fp16: the loss scale goes on where it was, at any topology; a model without matrix products, for any CPU."""

import os

import torch

from harness import run_ranks
from models import Parts, seeded
from runs import KEEP_GATHERED, dtype_of, engine_of, load_into, moments, settings, weights, with_fp16
from runs import train as train_on
from sampling import every_case, sample


def element_wise():
    return Parts(
        lambda net, x: (x * net.a + net.b * net.frozen).float().pow(2).mean(),
        a=torch.nn.Parameter(torch.rand(5, 7) - 0.5),
        b=torch.nn.Parameter(torch.rand(7)),
        frozen=torch.nn.Parameter(torch.rand(7), requires_grad=False),
        never=torch.nn.Parameter(torch.rand(3)),
    )


def make_engine(stage, dtype, seed=0):
    net, made = seeded(element_wise, seed=seed), settings(stage, 1, dtype=dtype, zero=KEEP_GATHERED)
    if dtype == "fp16":
        made["fp16"] = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 2}
    with with_fp16():
        return engine_of(net, made, model_parameters=list(net.parameters()))


def train(engine, first, steps):
    def loss_at(step, micro):
        return engine(torch.rand(5, 7, generator=torch.Generator().manual_seed(step)).to(dtype_of(engine)))

    return train_on(engine, loss_at, steps, first)


def state(engine):
    scaler = engine.stepping.scaler
    found = {"steps": engine.core.steps().tolist(), "skipped": engine.skipped_steps}
    found["counters"] = engine.global_steps, engine.global_samples
    if scaler is not None and scaler.dynamic:
        found["scale"] = (
            scaler.cur_scale,
            scaler.cur_iter,
            scaler.last_overflow_iter,
            scaler.cur_hysteresis,
        )
    found.update({name: value.float().tolist() for name, value in weights(engine).items()})
    found.update({("state", name): [one.tolist() for one in all_of] for name, all_of in moments(engine).items()})
    return found


def body_save(rank, world, folder):
    found = {}
    for stage in range(4):
        engine = make_engine(stage, "fp16")
        train(engine, 0, 14)
        engine.save_checkpoint(os.path.join(folder, str(stage)))
        found[stage] = (state(engine), train(engine, 14, 8), state(engine))
    return found


def body_load(rank, world, folder, pairs):
    found = []
    for stage, to_stage, dtype in pairs:
        engine = load_into(make_engine(to_stage, dtype, seed=4), os.path.join(folder, str(stage)))
        found.append((state(engine), train(engine, 14, 8), state(engine)))
    return found


def test_the_loss_scale_goes_on(tmp_path):
    saved = run_ranks(2, body_save, str(tmp_path))[0]
    assert 0 < saved[0][0]["skipped"] < 14 and saved[0][0]["steps"][0] + saved[0][0]["skipped"] == 14
    for before, _, after in saved.values():  # skipped steps have seen their samples
        steps, samples = before["counters"]
        assert steps == 14 and after["counters"] == (22, samples // 14 * 22)
    for world in (1, 2, 3):
        pairs = [(stage, to, "fp16") for stage in range(4) for to in range(4)]
        pairs += [(stage, 3 - stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")]
        if not every_case():
            kept = sample(pairs, "values", 8, seed=world)
            pairs = [pair for place, pair in enumerate(pairs) if place in kept or (world == 2 and pair[0] == pair[1])]
        for (stage, to, dtype), found in zip(pairs, run_ranks(world, body_load, str(tmp_path), pairs)[0]):
            wanted = saved[stage]
            if dtype == "fp16":
                assert found[0] == wanted[0], (stage, to, world)
                if (world, to) == (2, stage):
                    assert found == wanted, stage
                if bool(stage) == bool(to):  # without ZeRO the scale rises one step later
                    assert found[2]["scale"] == wanted[2]["scale"]
                continue
            for key in wanted[0]:
                if isinstance(key, tuple):
                    assert found[0][key] == wanted[0][key], (stage, to, dtype, world, key)
