"""In which cases tests train a program: axes, a value of each, and one sampler."""

from typing import NamedTuple

import pytest

from runs import DTYPES

AXES = {
    "stage": [0, 1, 2, 3],
    "world": [1, 2, 3, 4],
    "dtype": list(DTYPES),
    "accumulate": [1, 4],
    "user_backward": [False, True],
    "tensor": [2, 3, 4],
}


class Case(NamedTuple):
    """``user_backward``: the script calls ``loss.backward()``. ``zero`` and ``more``: further keys of the section of
    ZeRO and of the configuration. ``tensor``: the ranks of ``world`` that share layers; ``split``: further keys of the
    section ``tensor_parallel``."""

    stage: int = 0
    world: int = 1
    dtype: str = "fp32"
    accumulate: int = 1
    user_backward: bool = False
    zero: dict = {}
    more: dict = {}
    tensor: int = 1
    split: dict = {}

    @property
    def parts(self):
        """The micro-batches of a step, over all ranks."""
        return self.world // self.tensor * self.accumulate

    def config(self, program):
        """Buckets of a few parameters; at stage 3 biases stay gathered, weights come and go."""
        made = {
            "train_micro_batch_size_per_gpu": program.rows,
            "gradient_accumulation_steps": self.accumulate,
            "train_batch_size": program.rows * self.world * self.accumulate,
            "gradient_clipping": program.clip,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 400,
                "allgather_bucket_size": 300,
                "stage3_param_persistence_threshold": 4,
                **program.zero,
                **self.zero,
            },
            **DTYPES[self.dtype],
            **program.config,
        }
        if self.dtype == "fp16":
            made["fp16"] = {"enabled": True, "initial_scale_power": 7, "loss_scale_window": 1000}
        if self.tensor > 1:
            made["tensor_parallel"] = {"autotp_size": self.tensor, **self.split}
        if isinstance(program.optimizer, dict):
            made["optimizer"] = program.optimizer
        return {**made, **self.more}


def over(*axes, cover="values", at_least=0, **values):
    """A test that runs over the product of ``axes`` and of ``values``, which has values of an axis or of another
    parameter. `make test` runs a sample (tests/sampling.py)."""

    def decorate(test):
        for name in (*axes, *values):
            test = pytest.mark.parametrize(name, values.get(name) or AXES[name])(test)
        return pytest.mark.sample(cover, at_least)(test)

    return decorate
