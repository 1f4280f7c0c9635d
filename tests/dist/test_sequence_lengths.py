"""What ``deepspeed.sequence.explain`` predicts beside the peak that a rank has measured."""

import ctypes

import pytest
import torch

import deepspeed
import toy_transformers
from deepspeed.comm.mesh import made_here
from deepspeed.sequence.lengths import _Setup
from harness import run_ranks

TOKENS, MAPPED = 512, -3  # M_MMAP_THRESHOLD


def status(key):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def measured(step):
    """Bytes of this process beyond what it had when the step began, at the most."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak begins anew
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def body_peaks(rank, world, cases, folder):
    ctypes.CDLL(None).mallopt(MAPPED, 1 << 16)  # what is freed goes at once
    deepspeed.log.logger.setLevel("WARNING")
    found = []
    for heads, layers, vocabulary, recompute, stage, section in cases:
        section = {**section, "size": world, **({"folder": folder} if section.get("offload") == "file" else {})}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 100000},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
            "sequence_parallel": section,
        }
        with toy_transformers.installed():
            shape = {"hidden": 128, "layers": layers, "vocabulary": vocabulary, "intermediate": 512}
            model = toy_transformers.ToyForCausalLM(heads, heads, **shape)
            if recompute:
                model.gradient_checkpointing_enable()
            peak = _Setup(model, config, world, None, None).curve().peak(TOKENS)  # as explain does
            engine = deepspeed.initialize(model=model.train(), config=config)[0]
            tokens = torch.randint(0, vocabulary, (1, TOKENS // world))

            def step():
                engine.backward(engine(tokens, labels=tokens).loss)  # noqa: B023
                engine.step()  # noqa: B023

            step()  # buffers of the engine
            found.append((peak.bytes - peak.parts["states"], measured(step)))
            engine.destroy()
            made_here().stores.clear()
        deepspeed.utils.groups.clear()
    return found


CASES = [
    (4, 2, 1000, False, 0, {}),
    (2, 3, 8000, False, 1, {}),
    (2, 3, 2000, True, 1, {"tile_loss": True}),
    (2, 3, 1000, True, 0, {"chunk": 128, "tile_mlp": True, "offload": "file"}),
]


@pytest.mark.parametrize("world", [1, 2])
def test_predictions_are_near_what_is_measured(world, tmp_path):
    cases = CASES if world == 1 else CASES[:2]
    for found in run_ranks(world, body_peaks, cases, str(tmp_path), fresh=True, timeout=120):
        for case, (predicted, peak) in zip(cases, found):
            assert abs(predicted - peak) < 0.1 * peak, (case, predicted >> 10, peak >> 10)


TWELVE = [
    *CASES,
    (4, 2, 1000, True, 0, {}),
    (8, 2, 1000, False, 0, {}),
    (4, 4, 1000, False, 2, {}),
    (4, 2, 8000, True, 0, {"tile_loss": True, "tile_mlp": True}),
    (2, 2, 1000, False, 0, {"chunk": 128}),
    (4, 2, 2000, True, 1, {"chunk": 128, "tile_loss": True, "offload": "file"}),
    (4, 2, 4000, False, 0, {"tile_loss": True}),
    (1, 3, 500, False, 1, {"tile_mlp": True}),
]


@pytest.mark.every("12 engines, each measured by itself")
def test_predictions_for_twelve_configurations(tmp_path):
    gaps = []
    for index, case in enumerate(TWELVE):
        folder = tmp_path / str(index)
        folder.mkdir()
        predicted, peak = run_ranks(1, body_peaks, [case], str(folder), fresh=True, timeout=120)[0][0]
        gaps.append(predicted / peak - 1)
        print(f"{case}: predicted {predicted / 2**20:.1f} MB, measured {peak / 2**20:.1f} ({gaps[-1]:+.1%})")
    assert max(map(abs, gaps)) < 0.1, gaps
