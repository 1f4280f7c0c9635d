"""Runs a saved step of a model that is cut over ranks again: as many processes as the run had start on this machine.
Each has an engine with the configuration of the run.

``python -m deepspeed.diagnosis.ranks`` is one of them.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import types

import torch
from torch import nn

import deepspeed.comm
from deepspeed.checkpoint.read.weights import restore
from deepspeed.diagnosis.bundle import Bundle, BundleError
from deepspeed.diagnosis.replay import (
    check,
    check_inputs,
    check_names,
    forward_loss,
    function_of,
    loss_of,
    see,
    trained,
    watch,
)
from deepspeed.engine.arguments import only_training
from deepspeed.engine.initialize import initialize
from deepspeed.host.ports import free_port
from deepspeed.log import logger
from deepspeed.zero.core import writing
from deepspeed.zero.nested import cast_floats
from deepspeed.zero.parameters.sharded_parameter import is_sharded

# Sections about other steps and about data, which one step does not need. A step that runs again in fp32 leaves out the
# sections that make tensors narrower, too.
_OTHER_STEPS = ("scheduler", "elasticity", "checkpoint", "nebula", "datastates_ckpt", "data_efficiency",
                "train_batch_size", "curriculum_learning", "progressive_layer_drop")  # fmt: skip
_NARROW = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast", "data_types", "communication_data_type")


class RanksReplay:
    """Answers as ``Replay`` does. ``model``, ``step``: ``FILE.py:function``."""

    def __init__(self, bundle, model, step):
        check(bundle)
        if step and bundle.first["pipeline"]:
            raise BundleError("--step is for models that do not return their loss, and this is a PipelineModule, which "
                              "has a loss_fn: leave --step out")  # fmt: skip
        self._bundle, self._targets, self._made = bundle, (model, step or ""), {}

    def run(self, rank, others=False, dtype=None):
        how = ("others" * others, "wide" * (dtype is not None))
        if how not in self._made:
            self._made[how] = self._run_all(how)
        return self._made[how][rank]

    def figures(self, passes):
        return {rank: {tuple(key): tuple(found) for key, found in one.gradients} for rank, one in passes.items()}

    def _run_all(self, how):
        world, found = self._bundle.first["world_size"], []
        for content in self._bundle.ranks.values():
            check_inputs(content)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "WORLD_SIZE": str(world)}
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), LOCAL_WORLD_SIZE=str(world))
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", __name__, self._bundle.folder, *self._targets, *how, folder]
            ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
            started = [subprocess.Popen(command, env={**env, **own}) for own in ranks]
            while any(process.poll() is None for process in started):
                if any(process.poll() for process in started):  # the others would wait for it
                    for process in started:
                        process.kill()
                time.sleep(0.05)
            codes = [process.wait() for process in started]
            if any(codes):
                raise BundleError(f"the ranks of the replay ended with the codes {codes}; their messages are above")
            for rank in range(world):
                with open(os.path.join(folder, f"{rank}.json"), encoding="utf-8") as file:
                    found.append(types.SimpleNamespace(**json.load(file)))
        return found


def _config(content, wide):
    """The configuration of an engine that makes this one step as the run did."""
    made = {key: value for key, value in only_training(content["given"]).items() if key not in _OTHER_STEPS}
    zero = made["zero_optimization"] = dict(made.get("zero_optimization") or {})
    for key in ("offload_optimizer", "offload_param"):  # drives of the run may be elsewhere
        if (zero.get(key) or {}).get("device", "none") != "none":
            zero[key] = {"device": "cpu"}
    if (made.get("fp16") or {}).get("enabled"):
        made["fp16"] = {**made["fp16"], "loss_scale": content["loss_scale"]}
    if content["schedule"]:
        made["pipeline"] = {**(made.get("pipeline") or {}), "schedule": content["schedule"]}
    made.setdefault("optimizer", {"type": "SGD", "params": {"lr": 0.0}})
    made["train_micro_batch_size_per_gpu"] = content["config"]["train_micro_batch_size_per_gpu"]
    made["gradient_accumulation_steps"] = content["accumulation"]
    return {key: value for key, value in made.items() if not (wide and key in _NARROW)}


def _engine(content, made, wide):
    """``made``: what the function of ``--model`` has returned."""
    model, mpu = made if isinstance(made, tuple) else (made, None)
    model = model.float() if wide else model
    params, groups = dict(model.named_parameters()), content["groups"]
    if all(name in params for group in groups for name in group["names"]):
        groups = [{**group["options"], "params": [params[name] for name in group["names"]]} for group in groups]
    else:  # the engine puts layers of its own in
        groups = None
    engine = initialize(model=model, model_parameters=groups, mpu=mpu, config=_config(content, wide))[0]
    run = engine._checkpoints.run_state()
    own = {run.weights.named(name): param for name, param in run.weights.unique()}
    check_names(own.keys(), content)
    with torch.no_grad(), writing(engine.core):
        for name, param in own.items():
            mine = param.ds_handle.shard if is_sharded(param) else param.data
            saved = content["weights"][name][1]
            if mine.numel() != saved.numel():
                raise BundleError(
                    f"--model makes another model: this rank has {mine.numel()} elements of {name!r}, and "
                    f"{saved.numel()} were saved"
                )
            mine.copy_(saved.reshape(mine.shape))
            if is_sharded(param):
                param.ds_handle.set_slice(mine)
        for name, buffer in run.weights.buffers.items():
            buffer.copy_(content["buffers"].get(run.weights.named(name), buffer))
    engine.core.refresh_master()
    for name, module in engine.module.named_modules():
        module.training = name not in content["in_eval"]
    return engine


def _others(bundle, content):
    """As ``Replay`` chooses them, as many on all ranks that have some."""
    most = min((len(one["micro_batches"]) for one in bundle.ranks.values() if one["micro_batches"]), default=1)
    return content["before"] or content["micro_batches"][: most - 1]


def _train(engine, content, micro_batches, step, dtype, made):
    micro_batches = trained(content, micro_batches)
    for number, one in enumerate(micro_batches):
        engine.set_gradient_accumulation_boundary(number + 1 == len(micro_batches))
        loss = loss_of(step, engine, one, engine.device, dtype, made)
        engine.backward(loss, scale_wrt_gas=one.get("parts", 2) > 1)
        engine.step()


def _train_pipeline(engine, content, micro_batches, step, dtype, made):
    """A stage that lacks micro-batches, since the step has failed before they came, has the first ones again."""
    module, states, loss_fn = engine.module, itertools.cycle(content["passes"]), engine.module.loss_fn
    module.register_forward_pre_hook(lambda *_: restore(next(states)))

    def seen(*given):
        see(made, loss := loss_fn(*given), "the loss", "")
        return loss

    if loss_fn is not None and not isinstance(loss_fn, nn.Module):
        module.loss_fn = seen
    pairs = [one["inputs"] if dtype is None else cast_floats(one["inputs"], dtype) for one in micro_batches]
    engine.train_batch(itertools.cycle(pairs))
    made.losses += [loss.item() for loss in engine.fwd_outputs or [engine.agg_train_loss]]


def main(folder, model, step, others, wide, results):
    logger.setLevel("WARNING")
    deepspeed.comm.init_distributed(verbose=False)
    bundle, rank = Bundle(folder), deepspeed.comm.get_rank()
    content, made = bundle.ranks[rank], types.SimpleNamespace(losses=[], gradients=[], first=None, error=None)
    torch.set_num_threads(content["machine"]["threads"])
    engine = _engine(content, function_of(model, "--model")(), wide)

    def inspect(norm, applied=True):
        made.gradients += engine._postmortem.gradients().items() if applied else ()

    engine.stepping.inspect = inspect
    watch(engine.module, made)
    train = _train_pipeline if content["pipeline"] else _train
    micro_batches = _others(bundle, content) if others else content["micro_batches"]
    step = function_of(step, "--step") if step else forward_loss
    try:
        train(engine, content, micro_batches, step, torch.float32 if wide else None, made)
    except BundleError:
        raise
    except Exception as error:  # the model's own
        error = error.__cause__ or error if content["pipeline"] else error
        made.error = f"{type(error).__name__}: {error}"
    with open(os.path.join(results, f"{rank}.json"), "w", encoding="utf-8") as file:
        json.dump(vars(made), file)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BundleError as error:
        sys.exit(f"ds_postmortem: {error}")
