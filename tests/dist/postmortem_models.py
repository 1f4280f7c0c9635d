"""The model of the tests of post-mortems, which ``ds_postmortem --model`` loads by the path of this file."""

import functools
import gc
import glob
import os
import time

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.diagnosis.cli import main
from deepspeed.module_inject.layers import exchange_of
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from hf_like_moe import model_of
from moe_models import moe_net
from mpu import two_by_two
from runs import with_fp16
from sequence_models import attend, mean_loss, tiny

# Seconds: comm.timeout of jobs that hang, in which ranks open their groups on a busy machine, too, and the sleep of the
# rank that is late.
TIMEOUT, LATE = 6, 10.0
BROKEN = {"once": False, "raises": False, "sleeps": 0.0}  # of this process: a replay runs in another one


def only(folder):
    """The folder of the one bundle in ``folder``."""
    (found,) = glob.glob(os.path.join(folder, "*-step*"))
    return found


def said(capsys, *arguments):
    """The exit code of ``ds_postmortem`` and what it prints."""
    gc.collect()  # engines of earlier tests log when they end
    capsys.readouterr()
    code = main(list(arguments))
    out, error = capsys.readouterr()
    return code, out + error


class Layer(nn.Module):
    """No matrix product, so that fp16 runs on every CPU."""

    def __init__(self, number, width=8):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(width, generator=generator))
        self.bias = nn.Parameter(0.1 * torch.randn(width, generator=generator))

    def forward(self, x, gain=1.0):
        return (x * self.weight + self.bias) * gain


class Steep(nn.Module):
    """An operator that is inf where it is asked to be, or at one time in one process."""

    def forward(self, x, steep):
        if BROKEN["raises"]:
            raise RuntimeError("the disk of this script is full")
        if BROKEN["once"]:
            return x / 0.0
        return torch.exp(x * x + 1000.0) if steep else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(3))
        self.steep = Steep()
        self.centers = nn.Parameter(0.1 * torch.ones(4, 8))

    def forward(self, x, y, steep=False, gain=1.0):
        x = self.layers[0](x.to(self.centers.dtype))
        x = self.layers[1](self.steep(x, steep), gain)
        x = self.layers[2](x) + 0.01 * torch.rand(8).to(x.dtype)
        return (x.float() - self.centers[y].float()).square().mean()


def factory():
    return Net()


def with_labels(model, x, y, **more):
    """The loss as a script computes it that keeps its labels to itself."""
    return model(x, y, **more)


class Cut(nn.Module):
    """``net``, of which this rank has a part or computes a part; its loss is ``loss(net, x, *more)``."""

    def __init__(self, net, loss):
        super().__init__()
        self.net, self.steep, self.loss = net, Steep(), loss

    def forward(self, x, *more, steep=False, gain=1.0):
        return gain * self.loss(lambda *given: self.steep(self.net(*given), steep), x, *more)


def sequence_model():
    """Ranks share a sequence: attention exchanges tokens for heads."""

    @functools.cache
    def attention():  # once there is a group
        return DistributedAttention(lambda q, k, v: attend(q, k, v, "causal"), groups._get_sequence_parallel_group())

    net = tiny(4, 2, lambda q, k, v: attention()(q, k, v, 0))
    return Cut(net, lambda net, tokens, places, labels: mean_loss(net(tokens, places), labels))


def experts_model():
    """Each of two ranks has two of four experts."""
    return Cut(moe_net(dist.get_rank() % 2, 4, 2, 2, True, False), lambda net, x: net(x))


class Sliced(nn.Module):
    """Two of four ranks share its layers."""

    def __init__(self, group, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.group = group
        for param in self.parameters():
            param.tensor_model_parallel = True

    def forward(self, x):
        return exchange_of(self.group).sum_out(self.down(torch.tanh(self.up(exchange_of(self.group).copy_in(x)))))


def tensor_model():
    """Each of two ranks has a half of each layer; two copies."""
    mpu = two_by_two(dist.get_rank())
    net = Sliced(mpu.get_model_parallel_group(), mpu.get_model_parallel_rank())
    return Cut(net, lambda net, x: net(x).square().mean()), mpu


class Block(nn.Module):
    """A layer of a pipeline. An element above 1,000 is steep; ``faulty``: this one asks what is ``BROKEN``."""

    def __init__(self, number, faulty):
        super().__init__()
        self.layer, self.steep, self.faulty = Layer(number), Steep(), faulty

    def forward(self, x):
        if self.faulty:
            time.sleep(BROKEN["sleeps"])
            x = self.steep(x, x.abs().max() > 1000)
        return self.layer(x) + 0.1 * torch.sin(x) + 0.01 * torch.rand(8, device=x.device).to(x.dtype)


def piped(**options):
    """Four layers on two stages, of which the last one may be broken."""
    layers = [LayerSpec(Block, number, number == 3) for number in range(4)]
    return PipelineModule(
        layers, num_stages=2, loss_fn=nn.functional.cross_entropy, partition_method="uniform", **options
    )


class Scaled(Layer):
    def __init__(self, number, gain):
        super().__init__(number)
        self.gain = gain

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype), self.gain)


def piped_fp16():
    """Layers that run in fp16 on every CPU; the last one makes large numbers."""
    with_fp16().start()
    layers = [LayerSpec(Scaled, number, 100.0 if number == 3 else 1.0) for number in range(4)]
    loss = lambda out, labels: nn.functional.cross_entropy(out.float(), labels)  # noqa: E731
    return PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")


def piped_parts():
    """Two parts on each stage, recomputed."""
    return piped(virtual_stages=2, activation_checkpoint_interval=1)


def piped_v():
    """Two parts on each stage: the first stage has the first and the last part."""
    return piped(virtual_stages=2, placement="v")


def piped_tied():
    """The first and the last layer are one matrix."""
    torch.manual_seed(4)
    ends = [TiedLayerSpec("ends", nn.Linear, 8, 8, bias=False) for _ in range(2)]
    layers = [ends[0], LayerSpec(Block, 1, False), LayerSpec(nn.Linear, 8, 8), ends[1]]
    return PipelineModule(layers, num_stages=2, loss_fn=nn.functional.cross_entropy, partition_method="uniform")


def auto_ep_model():
    """A model of which the engine makes one whose experts are spread over ranks."""
    made = Cut(model_of("mixtral"), lambda net, x: net(x))
    made.config = made.net.config
    return made
