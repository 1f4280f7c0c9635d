"""Models whose operations are known, and the fields of a report."""

import re

from torch import nn

LENET_FLOPS, LENET_MACS = 866_076_672, 426_516_480  # for 1,024 images of 32 by 32, as published


def lenet(classes=10):
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes),
        nn.Softmax(1),
    )  # fmt: skip


def alexnet(classes=1000):
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d((6, 6)), nn.Flatten(),
        nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True),
        nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, classes),
    )  # fmt: skip


_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "ms": 1e-3, "us": 1e-6, "s": 1.0}


def fields(text):
    """``{name: value}`` of the summary of a report, in its order."""
    summary = text.split("sum of fwd, bwd and step latency)\n")[1].split("\n---")[0]
    return dict(re.fullmatch(r"(.+?): +(.*)", line).groups() for line in summary.splitlines() if line)


def field(value):
    """A value of the report as a number: ``"3.5 GFLOPS"`` is 3.5e9."""
    number, unit = (*value.split(), "")[:2]
    return float(number) * _UNITS.get(unit.replace("FLOPS", ""), 1.0)
