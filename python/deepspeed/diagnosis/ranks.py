"""Runs a saved step of a model that is cut over ranks again: as many processes as the run had, on this machine.

``python -m deepspeed.diagnosis.ranks`` is one of them.
"""

import json
import os
import subprocess
import sys
import tempfile
import types

import torch

import deepspeed.comm
from deepspeed.diagnosis.bundle import Bundle, BundleError
from deepspeed.diagnosis.replay import Replay, forward_loss, function_of
from deepspeed.engine.initialize import initialize
from deepspeed.host.ports import free_port
from deepspeed.log import logger

_CUT = ("sequence_parallel_size", "sequence_parallel", "expert_parallel", "moe", "use_data_before_expert_parallelism")


class RanksReplay:
    """Answers as ``Replay`` does, but for gradients: which ranks add up what depends on the cut. ``model``, ``step``:
    ``FILE.py:function``."""

    def __init__(self, bundle, model, step):
        if bundle.refusal is not None:
            raise BundleError(f"{bundle.folder} is shown and not replayed: {bundle.refusal}")
        self._bundle, self._targets, self._made = bundle, (model, step or ""), {}

    def run(self, rank, others=False, dtype=None):
        how = ("others" * others, "wide" * (dtype is not None))
        if how not in self._made:
            self._made[how] = self._run_all(how)
        return self._made[how][rank]

    def reduced(self, passes):
        return {}

    def _run_all(self, how):
        world, found = self._bundle.first["world_size"], []
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "WORLD_SIZE": str(world)}
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), LOCAL_WORLD_SIZE=str(world))
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", __name__, self._bundle.folder, *self._targets, *how, folder]
            ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
            started = [subprocess.Popen(command, env={**env, **own}) for own in ranks]
            codes = [process.wait() for process in started]
            if any(codes):
                raise BundleError(f"the ranks of the replay ended with the codes {codes}; their messages are above")
            for rank in range(world):
                with open(os.path.join(folder, f"{rank}.json"), encoding="utf-8") as file:
                    found.append(types.SimpleNamespace(**json.load(file)))
        return found


def main(folder, model, step, others, wide, results):
    logger.setLevel("WARNING")
    deepspeed.comm.init_distributed(verbose=False)
    bundle, rank = Bundle(folder), deepspeed.comm.get_rank()
    given = {key: value for key, value in bundle.first["given"].items() if key in _CUT}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, **given}
    engine = initialize(model=function_of(model, "--model")(), config=config)[0]  # it joins the ranks of the cut
    replay = Replay(bundle, lambda: engine.module, function_of(step, "--step") if step else forward_loss, rank)
    made = replay.run(rank, bool(others), torch.float32 if wide else None)
    with open(os.path.join(results, f"{rank}.json"), "w", encoding="utf-8") as file:
        json.dump({**vars(made), "gradients": []}, file)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BundleError as error:
        sys.exit(f"ds_postmortem: {error}")
