"""A layer that is cut over ranks, beside experts, on ranks that share batches, sequences and layers, against one
process with all of them. Ranks as threads, all grids of 1 to 8 and of 16 ranks: tests/cpp/zero/norm_test.cpp."""

import pytest
import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm import mesh_views
from deepspeed.module_inject.layers import exchange_of
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_grad
from harness import run_ranks
from models import Parts
from moe_models import ADAM, WIDTH, batch, fill, moe_net, plain_name, plain_net, plain_run
from mpu import Mpu
from runs import engine_of, settings

HIDDEN, TP, SP, STEPS, CLIP = 8, 2, 2, 3, 0.3
EXPERTS = (4, 2, False, False, 1.0)  # number, k, drop, residual, factor: moe_models
CUT = {"up": 0, "down": 1}  # dimensions of the weights


def forward_cut(net, x):
    if net.group is None:
        return net.down(torch.tanh(net.up(x))) + net.bias
    x = net.down(torch.tanh(net.up(exchange_of(net.group).copy_in(x))))
    return exchange_of(net.group).sum_out(x) + net.bias


def cut(group=None, rank=0, size=1):
    """Columns of ``up`` and rows of ``down`` on each rank of ``group``, whole without one; all ranks have the bias."""
    net = Parts(
        forward_cut,
        group=group,
        up=nn.Linear(WIDTH, HIDDEN, bias=False),
        down=nn.Linear(HIDDEN, WIDTH, bias=False),
        bias=nn.Parameter(torch.zeros(WIDTH)),
    )
    fill(net, 1)
    for name, dim in CUT.items() if group is not None else ():
        layer = getattr(net, name)
        layer.weight = nn.Parameter(layer.weight.detach().chunk(size, dim)[rank].clone())
        layer.weight.tensor_model_parallel = True
    return net


def mpu_of(dp):
    """The mpu of a grid of ``dp`` x SP x TP ranks, the last axis innermost."""
    mesh = mesh_views.numbered(mesh_views.of_job(dp=(dp, ""), sp=(SP, ""), tp=(TP, "")))
    axes = {"data": ["dp"], "model": ["tp"], "sequence": ["sp"], "sequence_data": ["dp", "sp"]}
    members = {name: mesh_views.make(f"test {name}", mesh, along) for name, along in axes.items()}
    mpu = Mpu(members["data"].group, members["model"].group)
    for name in ("sequence", "sequence_data"):
        mpu._answer(f"get_{name}_parallel_", members[name].group)
    return mpu


def trained(rank, world, dp, stage, ep_size):
    """``(norms, gradients of the first step, parameters)``, the last two by names and pieces of the whole model."""
    groups.clear()
    mpu = mpu_of(dp)
    slice_, first = mpu.get_model_parallel_rank(), rank % ep_size * (4 // ep_size)
    net = moe_net(rank % ep_size, 4, ep_size, *EXPERTS[1:])
    net.first = cut(mpu.get_model_parallel_group(), slice_, TP)
    section = settings(stage, 8, optimizer={"type": "AdamW", "params": ADAM}, gradient_clipping=CLIP)
    engine = engine_of(net, section, mpu=mpu)
    assert {axis: engine.parallel.mesh.size([axis]) for axis in ("pp", "dp", "sp", "tp")} == {
        "pp": 1, "dp": dp, "sp": SP, "tp": TP
    }  # fmt: skip
    norms, grads = [], {}
    for step in range(STEPS):
        engine.backward(engine(batch(step, mpu.get_sequence_data_parallel_rank())))
        if step == 0:
            grads = {plain_name(n, first): safe_get_full_grad(p).clone() for n, p in net.named_parameters()}
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    found = {plain_name(n, first): safe_get_full_fp32_param(p).clone() for n, p in net.named_parameters()}
    engine.destroy()
    groups.clear()
    dist.barrier()
    return slice_, norms, grads, found


def plain_of(parts):
    """The same of one process with the tokens of ``parts`` ranks."""
    net = plain_net(*EXPERTS)
    net.first = cut()
    return plain_run(net, parts, STEPS, clip=CLIP)


def piece(name, value, rank):
    layer = name.split(".")[1]
    return value.chunk(TP, CUT[layer])[rank] if name.startswith("first.") and layer in CUT else value


def body(rank, world, dp, cases):
    return [trained(rank, world, dp, *case) for case in cases]


# Stage, ranks that share the experts.
@pytest.mark.parametrize("dp, cases", [(1, [(0, 4), (1, 2), (2, 4)]), (2, [(1, 4), (2, 2)])])
def test_equals_one_process(dp, cases):
    plain = plain_of(dp * SP)
    seen = set()
    for results in run_ranks(dp * SP * TP, body, dp, cases, init="gloo", timeout=120):
        for case, (rank, own_norms, own_grads, own_params) in zip(cases, results):
            assert own_norms == pytest.approx(plain.norms, rel=1e-6), case
            for own, whole in ((own_grads, plain.grads[0]), (own_params, plain.params)):
                for name, value in own.items():
                    assert torch.allclose(value, piece(name, whole[name], rank), rtol=1e-6, atol=1e-6), (case, name)
            seen |= set(own_params)
    assert seen == set(plain.params)
