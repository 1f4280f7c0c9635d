"""The peak of a device is measured once on a machine, and kept."""

import os

import pytest
import torch

from deepspeed._compat import TORCH2
from deepspeed.planner.machine import attention_here
from deepspeed.profiling import peak
from refusals import refused


def test_a_product_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cpu")
    first = peak.peak_flops(device, torch.float32)
    assert first > 1e8
    monkeypatch.setattr(peak, "_measured", None)
    folder = os.path.join(tmp_path, "deepspeed", "products")
    (name,) = os.listdir(folder)
    assert "float32" in name and abs(peak.peak_flops(device, torch.float32) / first - 1) < 1e-5
    with open(os.path.join(folder, name), "w", encoding="ascii") as file:
        file.write("123e9\n")
    assert peak.peak_flops(device, torch.float32) == 123e9


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr(peak, "_measured", lambda make, device, dtype: 5.0)
    assert peak.peak_flops(torch.device("cpu"), torch.float32) == 5.0


def test_a_slow_first_product_does_not_count(tmp_path, monkeypatch):
    # As the first one on a GPU, which loads a library for 100 ms: longer products had not been measured after it.
    took = iter([0.1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(peak, "_seconds", lambda run: next(took, len(run.args[0]) ** 3 * 1e-12))
    assert abs(peak.peak_flops(torch.device("cpu"), torch.float32) / 2e12 - 1) < 1e-6


def test_attention_has_a_rate_where_torch_has_a_fused_operator():
    found = peak.attention_flops(torch.device("cpu"), torch.float32)
    if TORCH2:
        assert 1e6 < found < 1e13
    else:
        assert found == 0.0


@pytest.mark.parametrize("missing", [True, False])
def test_only_an_operator_that_is_missing_has_no_rate(missing, tmp_path, monkeypatch):
    def attention(query, *args, **kwargs):
        if missing:  # as torch has none for a device
            return query.detach().to_sparse().flip(0)
        return query @ query[0, 0, 0, :1]

    device, folder = torch.device("cpu"), tmp_path / "deepspeed" / "attention"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention, raising=False)
    if missing:
        assert attention_here(device, torch.float32) == 0.0
        assert [file.read_text() for file in folder.iterdir()] == ["0\n"]
    else:  # and nothing is kept
        refused(RuntimeError, "size mismatch", attention_here, device, torch.float32)
        assert [file.read_text() for file in folder.iterdir()] == [""]


@pytest.mark.parametrize("foreign", ["owner", "mode"])
@pytest.mark.parametrize("below", ["deepspeed", "deepspeed/rates"])
def test_a_folder_that_others_may_write_is_not_used(foreign, below, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "deepspeed" / "rates").mkdir(parents=True)
    assert peak.measured_once("products", "one", lambda: 7.0) == 7.0 == peak.measured_once("products", "one", None)
    if foreign == "mode":
        (tmp_path / below).chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(tmp_path / below, 12345, -1)
    else:
        pytest.skip("only root makes folders of another user")
    assert peak.measured_once("products", "one", lambda: 9.0) == 9.0
