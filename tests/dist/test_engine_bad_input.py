"""What users get wrong: one paragraph that names the thing and the fix, at once, on every rank."""

import argparse

import pytest
import torch

import deepspeed
from engine_models import batch, config, loss_of, make_net
from harness import run_ranks
from runs import engine_of, take_step


def body(rank, world, what):
    made = config(world)
    model = make_net()
    if what == "no model":
        return deepspeed.initialize(config=made)
    if what == "no config":
        return deepspeed.initialize(model=model)
    if what == "no file":
        return deepspeed.initialize(model=model, config="/nowhere/ds.json")
    if what == "malformed":
        with open("broken.json", "w") as file:
            file.write('{"train_batch_size": 8,, }')
        return deepspeed.initialize(model=model, config="broken.json")
    if what == "two configs":
        return deepspeed.initialize(args=argparse.Namespace(deepspeed_config="a.json"), model=model, config=made)
    if what == "optimizer name":
        made["optimizer"]["type"] = "AdamX"
        return deepspeed.initialize(model=model, config=made)
    if what == "optimizer params":
        made["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentun": 0.9}}
        return deepspeed.initialize(model=model, config=made)
    if what == "max_grad_norm":
        made["optimizer"]["params"]["max_grad_norm"] = 1.0
        return deepspeed.initialize(model=model, config=made)
    if what == "scheduler name":
        made["scheduler"] = {"type": "WarmupLRR", "params": {}}
        return deepspeed.initialize(model=model, config=made)
    if what == "batch":
        made["train_batch_size"] = 7
        return deepspeed.initialize(model=model, config=made)
    if what == "stage":
        made["zero_optimization"]["stage"] = 4
        return deepspeed.initialize(model=model, config=made)
    if what == "optimizer object":
        return deepspeed.initialize(model=model, optimizer="adam", config=made)
    if what == "frozen":
        for p in model.parameters():
            p.requires_grad_(False)
        return deepspeed.initialize(model=model, config=made)
    if what == "mesh":
        return deepspeed.initialize(model=model, config=made, mesh_param=(2, 1))
    if what == "mesh and mpu":
        return deepspeed.initialize(model=model, config=made, mesh_param=(1, 1), mpu=object())
    if what == "twice":
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([p], lr=0.1)
        optimizer.param_groups[0]["params"].append(p)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=made)
    if what == "no optimizer":
        del made["optimizer"]
        engine = engine_of(model, made)
        return engine.backward(engine(batch(0)[0]).sum())
    engine = engine_of(model, made)
    tokens, targets = batch(0)
    if what == "not scalar":
        return engine.backward(engine(tokens))
    if what == "not a tensor":
        return engine.backward(loss_of(engine(tokens), targets).item())
    if what == "step in no_sync":
        with engine.no_sync():
            engine.backward(loss_of(engine(tokens), targets))
            return engine.step()
    if what == "no_sync twice":
        with engine.no_sync(), engine.no_sync():
            pass
    if what == "train batch":
        return engine.set_train_batch_size(9)
    if what == "data":
        return engine.deepspeed_io(7)
    raise AssertionError(what)


@pytest.mark.parametrize(
    "what, error, words",
    [
        ("no model", AssertionError, "needs a model"),
        ("no config", AssertionError, "no DeepSpeed configuration"),
        ("no file", (ValueError, FileNotFoundError), "/nowhere/ds.json"),
        ("malformed", ValueError, "broken.json"),
        ("two configs", AssertionError, "more than once: config and args.deepspeed_config"),
        ("optimizer name", deepspeed.DeepSpeedConfigError, "AdamX.*(Adam|AdamW)"),
        ("optimizer params", deepspeed.DeepSpeedConfigError, "momentun"),
        ("max_grad_norm", ValueError, "gradient_clipping"),
        ("scheduler name", deepspeed.DeepSpeedConfigError, "WarmupLRR.*WarmupLR"),
        ("batch", AssertionError, "7"),
        ("stage", (ValueError, AssertionError), "stage"),
        ("optimizer object", TypeError, "is a str"),
        ("frozen", ValueError, "nothing to optimise"),
        ("mesh", deepspeed.DeepSpeedConfigError, r"mesh_param = \(2, 1\) makes 2 ranks, but there are 1"),
        ("mesh and mpu", ValueError, "pass one of them"),
        ("twice", ValueError, "appears twice"),
        ("no optimizer", AssertionError, "needs an optimizer"),
        ("not scalar", AssertionError, r"scalar loss, got shape \(8, 6, 5\)"),
        ("not a tensor", TypeError, "not loss.item"),
        ("step in no_sync", AssertionError, "no_sync"),
        ("no_sync twice", AssertionError, "entered twice"),
        ("train batch", ValueError, "not divisible"),
        ("data", ValueError, "is a int"),
    ],
)
def test_bad_input_is_explained(what, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match="(?s)" + words):
        run_ranks(1, body, what)


def body_raises_in_backward(rank, world):
    """A backward that fails leaves nothing: the next ones train as if it had not been."""

    class Fragile(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, fail):
            ctx.fail = fail
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.fail:
                raise RuntimeError("this backward fails on purpose")
            return grad, None

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.early, self.late = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x, fail=False):
            return self.late(Fragile.apply(self.early(x), fail)).square().mean()

    models = [Model(), Model()]
    engines = [engine_of(m, config(world)) for m in models]
    for step in range(4):
        x = torch.full((2, 3), float(step + rank))
        for user in (False, True):
            loss = engines[0](x * 3, fail=True)
            with pytest.raises(RuntimeError, match="on purpose"):
                loss.backward() if user else engines[0].backward(loss)
        for engine in engines:
            take_step(engine, engine(x))
    return all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))


def test_a_failed_backward_leaves_no_state_behind():
    assert run_ranks(1, body_raises_in_backward) == [True]
