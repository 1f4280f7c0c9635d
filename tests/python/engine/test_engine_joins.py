"""An engine that is made without ``deepspeed.initialize`` can join the job."""

from unittest import mock

import pytest
import torch

import deepspeed
from refusals import refused


class Joined(Exception):
    pass


@pytest.mark.parametrize("wanted", [True, False, None])
def test_dist_init_required(wanted):
    engine = deepspeed.DeepSpeedEngine
    config = {"train_batch_size": 1}
    with mock.patch("deepspeed.comm.init_distributed", side_effect=Joined):
        if wanted:
            refused(Joined, "", engine, None, torch.nn.Linear(1, 1), config=config, dist_init_required=wanted)
        else:
            made = engine(None, torch.nn.Linear(1, 1), config=config, dist_init_required=wanted)
            assert made.world_size == 1
            made.destroy()
