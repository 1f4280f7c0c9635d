"""deepspeed.utils: lazy exports, OnDevice, profiler ranges, torch versions, enumerations, version information."""

import re
from unittest import mock

import pytest
import torch

import deepspeed.utils
from deepspeed import git_version_info
from deepspeed._compat import VERSION
from deepspeed.host.torch_nccl import nccl_version
from deepspeed.utils import OnDevice, nvtx
from deepspeed.utils.torch import required_torch_version
from deepspeed.utils.types import ActivationFuncType
from deepspeed.version import __version__
from processes import run_python
from refusals import refused


def test_exports_are_lazy_and_complete():
    assert None not in [getattr(deepspeed.utils, name) for name in deepspeed.utils.__all__]
    assert deepspeed.utils.groups.get_data_parallel_group
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        deepspeed.utils.nothing  # noqa: B018
    asked = run_python("import sys; import deepspeed.utils; print('torch' in sys.modules)")
    assert asked.stdout.strip() == "False", asked.stderr


# ---- OnDevice -----------------------------------------------------------------------------------------------------
def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Embedding(5, 3))


def test_meta_costs_no_memory_and_has_the_dtype():
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        made = model()
        huge = torch.empty(1 << 40)
        old_style = torch.Tensor(2, 3)
    assert all(one.is_meta and one.dtype == torch.bfloat16 for one in (*made.parameters(), huge, old_style))
    assert old_style.shape == (2, 3)


def test_device_and_integers():
    with OnDevice(dtype=torch.float16, device="cpu"):
        assert torch.zeros(2).dtype == torch.float16
        assert torch.arange(3).dtype == torch.int64
        assert torch.tensor([True]).dtype == torch.bool
        assert torch.ones(2, dtype=torch.float64).dtype == torch.float64
        assert torch.full((2,), 1.5, device="meta").device.type == "meta"
        assert torch.Tensor([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_everything_is_as_before_afterwards():
    before = {name: getattr(torch, name) for name in ("empty", "zeros", "randn", "arange")}
    with pytest.raises(KeyError):
        with OnDevice(dtype=torch.float16, device="meta"):
            with OnDevice(dtype=torch.bfloat16, device="meta"):
                assert torch.empty(1).dtype == torch.bfloat16
            assert torch.empty(1).dtype == torch.float16
            raise KeyError("out")
    assert all(getattr(torch, name) is function for name, function in before.items())
    assert torch.Tensor(2, 3).device.type == "cpu" and torch.Tensor([1, 2]).tolist() == [1.0, 2.0]
    assert torch.nn.Parameter(torch.ones(2)).dtype == torch.float32


def test_disabled_changes_nothing():
    with OnDevice(dtype=torch.float16, device="meta", enabled=False):
        assert torch.empty(1).device.type == "cpu" and torch.empty(1).dtype == torch.float32


def test_one_object_is_not_entered_twice():
    context = OnDevice(dtype=torch.float16)
    with context:
        refused(RuntimeError, "open already", context.__enter__)
    assert torch.empty(1).device.type == "cpu"


@pytest.mark.skipif(VERSION < (2, 12), reason="for a torch whose initializers import its compiler on meta")
def test_the_compiler_of_torch_is_there_before_functions_are_replaced():
    code = "with OnDevice(torch.float32, 'meta'): nn.Embedding(4, 4)"
    ran = run_python(f"import torch\nfrom torch import nn\nfrom deepspeed.utils import OnDevice\n{code}")
    assert ran.returncode == 0, ran.stderr


# ---- profiler ranges ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("domains, name", [(False, None), (True, "DeepSpeed")])
def test_ranges_close_in_their_domain_even_after_an_error(domains, name, monkeypatch):
    recorder = mock.Mock(supports_nvtx_domain=domains)
    monkeypatch.setattr(nvtx, "get_accelerator", lambda: recorder)

    @nvtx.instrument_w_nvtx
    def work(x, *, fail=False):
        """Doubles."""
        if fail:
            raise OSError("no")
        return 2 * x

    assert work(3) == 6 and work.__name__ == "work" and work.__doc__ == "Doubles."
    refused(OSError, "", work, 3, fail=True)
    assert [call[0] for call in recorder.mock_calls] == ["range_push", "range_pop"] * 2
    assert all(call.kwargs.get("domain") == name for call in recorder.mock_calls)
    assert recorder.range_push.call_args.args[0].endswith("work") and nvtx.DEEPSPEED_NVTX_DOMAIN == "DeepSpeed"


# ---- versions and enumerations ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "version, bounds, answer",
    [
        ("2.11.0+cu130", dict(min_version=2.1), True),
        ("2.11.0+cu130", dict(min_version="2.2"), True),
        ("2.11.0+cu130", dict(max_version="2.9"), False),
        ("1.13.0a0", dict(min_version=1.13), True),
        ("1.13.0a0", dict(min_version=2.0), False),
        ("2.1.2", dict(min_version=2.1, max_version=2.1), True),
        ("2.1.2", dict(min_version=1.8, max_version=2.0), False),
    ],
)
def test_torch_versions(version, bounds, answer, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert required_torch_version(**bounds) is answer


def test_torch_version_needs_a_bound():
    refused(ValueError, "", required_torch_version)
    refused(ValueError, "'new'", required_torch_version, min_version="new")


def test_activation_numbers():
    names = ["UNKNOWN", "GELU", "ReLU", "GATED_GELU", "GATED_SILU"]
    assert [ActivationFuncType[name].value for name in names] == [0, 1, 2, 3, 4]


def test_version_information():
    assert git_version_info.version == __version__ and __version__.count(".") >= 2
    assert isinstance(git_version_info.git_hash, str) and isinstance(git_version_info.git_branch, str)
    assert set(git_version_info.torch_info) == {"version", "cuda_version", "hip_version", "nccl_version"}
    assert all(re.fullmatch(r"\d+\.\d+", value) for value in git_version_info.torch_info.values())
    if torch.version.cuda is None:
        assert git_version_info.torch_info["nccl_version"] == "0.0"
    else:
        assert git_version_info.torch_info["nccl_version"] == ".".join(map(str, torch.cuda.nccl.version()[:2]))


def test_the_nccl_beside_a_torch_is_found(tmp_path):
    (tmp_path / "torch").mkdir()
    assert nccl_version(str(tmp_path / "torch")) == nccl_version("") == "0.0"
    for name in ("nvidia_nccl_cu12-2.9.6.dist-info", "nvidia_nccl_cu13-2.28.9.dist-info", "nvidia_nccl_cu13"):
        (tmp_path / name).mkdir()
    assert nccl_version(str(tmp_path / "torch")) == "2.28"
