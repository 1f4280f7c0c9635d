"""Small objects of the published interface of ZeRO."""

from unittest import mock

import pytest
import torch

from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer, MultipleAllGatherHandles, print_rank_0
from deepspeed.runtime.zero.stage_1_and_2 import IPGBucket


def test_several_handles_are_one():
    inner = [mock.Mock(), mock.Mock(), mock.Mock()]
    handles = MultipleAllGatherHandles([inner[0], MultipleAllGatherHandles(inner[1:])])
    handles.wait()
    handles.wait(handle_dependency=False)
    assert [handle.wait.call_count for handle in inner] == [1, 1, 1]


def test_a_bucket_is_emptied_but_keeps_its_buffers():
    bucket = IPGBucket(buffer=[torch.zeros(4)], params=[1], grads=[2], elements=3, has_moe_params=True)
    bucket.copy_streams.add("stream")
    bucket.index = 1
    bucket.clear()
    assert bucket == IPGBucket(buffer=bucket.buffer, index=1) and IPGBucket().params is not IPGBucket().params


@pytest.mark.parametrize("shape, groups", [((8000,), 1), ((8001,), 3), ((100, 200), 4), ((7,), 1), ((0,), 1)])
def test_quantized_weights_are_off_by_half_a_step_at_most(shape, groups):
    torch.manual_seed(0)
    weight = torch.randn(shape) * 3
    quantizer = CUDAQuantizer()
    if weight.numel():
        small, scale = quantizer.quantize(weight)
        assert (small.dtype, small.shape, scale.numel()) == (torch.int8, weight.shape, groups)
        again = quantizer.dequantize(small, scale, torch.float32)
        step = scale.repeat_interleave(weight.numel() // groups).reshape(shape)
        assert bool(((again - weight).abs() <= step * 0.5001).all())
        assert quantizer.dequantize(small, scale).dtype == torch.float16


def test_quantization_of_zeros_and_of_given_groups():
    small, scale = CUDAQuantizer().quantize(torch.zeros(6), groups=3)
    assert small.tolist() == [0] * 6 and scale.tolist() == [0.0] * 3
    small, scale = CUDAQuantizer().quantize(torch.tensor([1.0, -127.0, 0.5, 0.25]), groups=2)
    assert small.tolist() == [1, -127, 127, 63] and scale.tolist() == pytest.approx([1.0, 0.5 / 127])


def test_a_message_of_rank_0(capsys):
    print_rank_0("quiet")
    print_rank_0("loud", force=True)
    text = capsys.readouterr().out
    assert "loud" in text and "quiet" not in text
