"""Engines whose kernels are operations of torch, as on a device without a kernel library (DS_DEVICE_BODY=any), against
plain training; and what users get to read where a device cannot be used."""

import os

import pytest
import torch

import deepspeed
from engine_models import config, make_net, net_engine, plain_net, train_engine
from harness import run_ranks
from refusals import refused
from runs import DTYPES, weights
from sampling import sample

STEPS = 10
ANY = {"DS_DEVICE_BODY": "any"}
OFFLOADS = {
    "none": {},
    "states": {"offload_optimizer": {"device": "cpu"}},
    "parameters": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def body(rank, world, stage, dtype, accumulate, offload):
    engine = net_engine(world, stage, accumulate, zero=OFFLOADS[offload], **DTYPES[dtype])
    losses, norms = train_engine(engine, STEPS, rank, world)
    return losses, norms, {name: value.float() for name, value in weights(engine).items()}


CASES = [
    (world, stage, dtype, accumulate, offload)
    for world in (1, 2)
    for stage in (0, 1, 2, 3)
    for dtype in DTYPES
    for accumulate in (1, 2)
    for offload in OFFLOADS
    if (offload == "none" or stage > 0) and (offload != "parameters" or stage == 3)
    if dtype != "fp16" or deepspeed.get_accelerator().is_fp16_supported()
]


@pytest.mark.parametrize("world, stage, dtype, accumulate, offload", [CASES[index] for index in sample(CASES)])
def test_training_is_that_of_the_library(world, stage, dtype, accumulate, offload):
    given = (stage, dtype, accumulate, offload)
    # Sums are rounded in another order. The last digit of a norm may round a 16-bit weight to its neighbour.
    near = {"fp32": 1e-6, "bf16": torch.finfo(torch.bfloat16).eps, "fp16": torch.finfo(torch.float16).eps}[dtype]
    results = run_ranks(world, body, *given, env=ANY)
    for rank, (found, expected) in enumerate(zip(results, run_ranks(world, body, *given))):
        assert found[0] == pytest.approx(expected[0], rel=near), rank
        assert found[1] == pytest.approx(expected[1], rel=near), rank
        for name, value in expected[2].items():
            assert torch.allclose(found[2][name], value, rtol=near, atol=near), (rank, name)
    if dtype == "fp32":
        plain = dict(plain_net(STEPS).model.named_parameters())
        for name, value in results[0][2].items():
            assert torch.allclose(value, plain[name].detach().float(), rtol=1e-6, atol=1e-6), name


def start(rank, world, words, device=None):
    model = make_net()
    if device is not None and rank == world - 1:
        model.register_parameter("away", torch.nn.Parameter(torch.ones(2, device=device)))
    refused(RuntimeError, words, deepspeed.DeepSpeedEngine, None, model, config=config(world), dont_change_device=True)


def start_on_one(rank, world, variables):
    if rank == world - 1:
        os.environ.update(variables)
    start(rank, world, "data-parallel rank 1: .*DS_DEVICE_BODY is 'fast'")


@pytest.mark.parametrize("world", [1, 2])
def test_an_unknown_body_is_an_error_on_every_rank(world):
    run_ranks(world, start, "DS_DEVICE_BODY is 'fast'.*'any'", env={"DS_DEVICE_BODY": "fast"}, init=True)


def test_what_one_rank_cannot_do_is_an_error_on_all():
    run_ranks(2, start_on_one, {"DS_DEVICE_BODY": "fast"}, init=True, fresh=True)


def test_parameters_on_two_devices_are_an_error_on_every_rank():
    run_ranks(2, start, "rank 1: Parameters lie on 2 devices: .*'away' on meta.*Move the model", "meta", init=True)
