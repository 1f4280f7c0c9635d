"""The wrapper of tensor constructors, and that a library may exchange it at the published path."""

import pytest
import torch

from deepspeed.runtime.zero import partition_parameters as published


@pytest.mark.parametrize("name", ["empty", "zeros", "ones", "full", "arange", "eye", "randn", "tensor"])
def test_originals(name):
    assert getattr(published, f"_orig_torch_{name}") is getattr(torch, name)


def test_floating_point_results_get_the_dtype():
    ones = published.zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.bfloat16)
    assert ones(2, 3).dtype == torch.bfloat16 and ones(2, 3).shape == (2, 3)
    assert ones(2, dtype=torch.float64).dtype == torch.bfloat16 and ones(2, dtype=torch.int64).dtype == torch.int64
    assert published.zero_wrapper_for_fp_tensor_constructor(torch.ones, None)(2).dtype == torch.float32


def test_the_device_is_where_the_call_names_none():
    zeros = published.zero_wrapper_for_fp_tensor_constructor(torch.zeros, torch.float16, target_device="meta")
    assert zeros(2).is_meta and zeros(2).dtype == torch.float16
    assert zeros(2, device="cpu").device == torch.device("cpu")
