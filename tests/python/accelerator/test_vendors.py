"""The accelerators of the table of vendors, with modules that stand for those of their packages."""

import argparse
import importlib
import importlib.machinery
import itertools
import os
import sys
import time
import types
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.real_accelerator import accelerators
from deepspeed.comm import process_group
from deepspeed.host.vendors import VENDORS, Vendor, registering_module
from deepspeed.inference.engine import init_inference
from deepspeed.launcher import device_count
from deepspeed.launcher.environment import exports, visible_variable
from deepspeed.launcher.plan import local_slots
from processes import run_after_torch
from refusals import refused

OTHERS = [name for name in VENDORS if name not in ("cuda", "cpu")]  # no machine of the tests has one
LIKE_CUDA = ["xpu", "npu", "sdaa", "mlu", "supa"]


def class_of(name):
    return accelerators.get(name)


@pytest.fixture
def fake(monkeypatch):
    """A function that makes the package of a vendor, with a module of verbs that records calls, which it returns."""

    def make(name, devices=2):
        vendor = VENDORS[name]
        calls = mock.Mock()
        calls.is_available.return_value, calls.device_count.return_value = devices > 0, devices
        calls.current_device.return_value = 1
        if vendor.package != "torch":
            package = types.ModuleType(vendor.package)  # without a __spec__
            package.__path__ = []
            monkeypatch.setitem(sys.modules, vendor.package, package)
        if vendor.verbs.startswith("torch."):
            monkeypatch.setattr(torch, name, calls, raising=False)
        else:
            for path in ("habana_frameworks.torch", vendor.verbs, "habana_frameworks.torch.utils"):
                monkeypatch.setitem(sys.modules, path, calls)
            half = mock.Mock()
            half._is_fp16_supported.return_value = True
            monkeypatch.setitem(sys.modules, "habana_frameworks.torch.utils.experimental", half)
        return calls

    before = torch.are_deterministic_algorithms_enabled()
    yield make
    if torch.are_deterministic_algorithms_enabled() != before:
        torch.use_deterministic_algorithms(before)


# ---- the table ----------------------------------------------------------------------------------------------------


def test_the_order_is_that_of_the_table():
    found = [name for name in accelerators.in_order() if name in VENDORS]
    assert found == ["xpu", "npu", "sdaa", "mps", "hpu", "mlu", "supa", "cuda", "cpu"]


def test_backends_and_their_modules():
    backends = {name: [backend for backend, _ in row.backends] for name, row in VENDORS.items()}
    assert backends["hpu"] == backends["npu"] == ["hccl"] and backends["mps"] == []
    assert (backends["mlu"], backends["sdaa"], backends["supa"]) == (["cncl"], ["tccl"], ["bccl"])
    assert backends["xpu"] == ["xccl", "ccl"] and backends["cuda"] == ["nccl"]
    assert registering_module("hccl", "hpu") == "habana_frameworks.torch.distributed.hccl"
    assert registering_module("hccl", "npu") == "torch_npu" and registering_module("gloo", "hpu") == ""
    assert registering_module("ccl", "cpu") == "oneccl_bindings_for_pytorch" and registering_module("mine", "cpu") == ""


def test_variables_of_devices_and_of_other_hosts():
    assert visible_variable({"DS_ACCELERATOR": "hpu"}) == "HABANA_VISIBLE_MODULES"
    assert visible_variable({}) == visible_variable({"DS_ACCELERATOR": "mine"}) == "CUDA_VISIBLE_DEVICES"
    given = {
        "TENSORS_KEEP_ALLOCATED": "0",
        "PT_HPU_X": "1",
        "NCCL_X": "1",
        "ENABLE_EXPERIMENTAL_FLAGS": "true",
        "HOME": "/",
    }
    assert exports({**given, "DS_ACCELERATOR": "hpu"}, {}) == {
        "TENSORS_KEEP_ALLOCATED": "0", "PT_HPU_X": "1", "ENABLE_EXPERIMENTAL_FLAGS": "true", "DS_ACCELERATOR": "hpu",
    }  # fmt: skip
    everything = {name: value for name, value in given.items() if name != "HOME"}
    assert exports(given, {}) == everything, "ranks choose by the packages of their host"
    assert exports(given, {"DS_ACCELERATOR": "cpu"}) == {"DS_ACCELERATOR": "cpu"}


# ---- classes ------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_each_class_is_imported_in_two_milliseconds():
    for name in VENDORS:
        best, path = 1.0, f"deepspeed.accelerator.{name}_accelerator"
        kept = sys.modules.pop(path, None)
        for _ in range(5):
            sys.modules.pop(path, None)
            start = time.perf_counter()
            importlib.import_module(path)
            best = min(best, time.perf_counter() - start)
        if kept is not None:
            sys.modules[path] = kept
        assert best < 2e-3, f"{path}: {best * 1e3:.1f} ms"


def test_importing_the_package_imports_no_class():
    code = "import sys, deepspeed; print([name for name in sys.modules if name.endswith('_accelerator')])"
    listed = run_after_torch(code).stdout
    assert not [name for name in VENDORS if f"{name}_accelerator" in listed]


@pytest.mark.parametrize("name", OTHERS)
def test_without_its_package_a_class_is_refused(name):
    if VENDORS[name].package != "torch":
        refused(ValueError, f"'{name}'.*the Python package {VENDORS[name].package} is not installed", class_of(name))
        assert accelerators.why_not(name) == f"the Python package {VENDORS[name].package} is not installed"


@pytest.mark.parametrize("name", LIKE_CUDA)
def test_verbs_are_the_functions_of_the_module(name, fake):
    calls = fake(name)
    made = class_of(name)()
    for verb in (
        "synchronize", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
        "memory_stats", "reset_peak_memory_stats", "current_stream", "default_stream", "set_device", "device",
        "manual_seed", "manual_seed_all", "stream", "get_rng_state", "set_rng_state",
    ):  # fmt: skip
        assert getattr(made, verb)(3) in (getattr(calls, verb).return_value, None), verb
        assert calls.mock_calls[-1] == getattr(mock.call, verb)(3), verb
    for verb in ("current_device", "device_count", "initial_seed", "empty_cache", "is_current_stream_capturing"):
        assert getattr(made, verb)() in (getattr(calls, verb).return_value, True), verb
    calls.mem_get_info.return_value = (10, 20)
    calls.memory_reserved.return_value, calls.memory_allocated.return_value = 5, 3
    calls.get_device_properties.return_value.total_memory = 20
    assert made.available_memory() == 12 and made.total_memory(0) == 20
    assert made.Stream is calls.Stream and made.Event is calls.Event
    assert (made.device_name(), made.device_name(2), made.current_device_name()) == (name, f"{name}:2", f"{name}:1")
    assert made.is_available() and made.is_bf16_supported() and made.is_fp16_supported()
    assert made.create_graph() is getattr(calls, f"{name.upper()}Graph").return_value
    assert made.capture_to_graph("graph", "pool", "stream") is calls.graph.return_value
    graph = mock.Mock()
    made.replay_graph(graph)
    graph.replay.assert_called_once_with()
    assert made.communication_backend_name() in dict(VENDORS[name].backends)
    env = {}
    made.set_visible_devices_envs(env, [1, 3])
    assert env == {VENDORS[name].visible: "1,3"} and made.export_envs() == list(VENDORS[name].prefixes)
    assert not made.is_synchronized_device() and not made.resolves_data_dependency()


def test_modules_that_lack_functions_have_answers(fake, monkeypatch):
    calls = mock.Mock(spec=["is_available", "device_count", "current_stream", "get_device_properties",
                                 "memory_allocated", "current_device"])  # fmt: skip
    fake("npu")
    monkeypatch.setattr(torch, "npu", calls)
    made = class_of("npu")()
    calls.get_device_properties.return_value.total_memory, calls.memory_allocated.return_value = 20, 3
    assert made.available_memory() == 17 and made.default_stream() is calls.current_stream.return_value
    assert made.create_graph() is None and not made.is_current_stream_capturing() and made.is_bf16_supported()
    with made.capture_to_graph(None):
        made.replay_graph(None)
    seen = []
    made.lazy_call(lambda: seen.append(1))
    assert seen == [1]


def test_gaudi_is_as_its_page_says(fake, monkeypatch):
    monkeypatch.delenv("PT_HPU_LAZY_ACC_PAR_MODE", raising=False)
    monkeypatch.setenv("PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES", "1")  # the user's
    calls = fake("hpu")
    made = class_of("hpu")()
    assert os.environ["PT_HPU_LAZY_ACC_PAR_MODE"] == "0" and os.environ["PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES"] == "1"
    assert made.hpu is calls and torch.are_deterministic_algorithms_enabled()
    flags = (made.is_synchronized_device(), made.resolves_data_dependency(), made.handles_memory_backpressure())
    assert flags == (False, True, True)
    assert {made.device_name(), made.device_name(5), made.current_device_name()} == {"hpu"}
    assert made.device(3) == torch.device("hpu")
    assert (made._name, made.communication_backend_name(), made.get_compile_backend()) == ("hpu", "hccl", "hpu_backend")
    assert made.is_bf16_supported() and made.is_fp16_supported()
    calls.memory_stats.return_value, calls.memory_allocated.return_value = {"Limit": 100}, 30
    assert made.total_memory() == 100 and made.available_memory() == 70
    assert made.create_graph() is calls.HPUGraph.return_value
    made.capture_to_graph("graph", stream="stream")
    assert calls.mock_calls[-1] == mock.call.graph("graph", stream="stream")
    made.set_device(0)
    made.synchronize()
    assert calls.mock_calls[-2:] == [mock.call.set_device(0), mock.call.synchronize()]


def test_apples_gpu(fake):
    calls = fake("mps")
    made = class_of("mps")()
    calls.current_allocated_memory.return_value = 5
    calls.recommended_max_memory.return_value = 9
    assert made.memory_allocated() == made.max_memory_allocated() == 5 and made.total_memory() == 9
    assert made.memory_stats()["allocated_bytes.all.peak"] == 5 and made.Stream is None
    assert made.communication_backend_name() is None and made.current_device_name() == "mps:0"
    with made.device(0), made.stream(None):
        made.synchronize()
    assert torch.equal(made.pin_memory(torch.ones(2), match_shape=False), torch.ones(2))


def test_host_memory_of_the_base_class():
    cpu = class_of("cpu")()
    assert cpu.pin_memory_alignment() >= 4096 and not cpu.register_host_memory(torch.ones(1))
    assert not cpu.unregister_host_memory(torch.ones(1)) and not cpu.is_current_stream_capturing()


# ---- choice -------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch):
    """No other device than the CPU is seen, not even those of the machine and of other packages."""
    for name in accelerators.names():
        if name not in VENDORS or name in ("xpu", "mps", "cuda"):
            entry = accelerators.entry(name)
            monkeypatch.setitem(accelerators._entries, name, entry._replace(probe=lambda: "not in this test"))


PACKAGES = ["npu", "sdaa", "hpu", "mlu", "supa"]


@pytest.mark.parametrize("names", [*itertools.combinations(PACKAGES, 2), *zip(PACKAGES)], ids="-".join)
def test_packages_are_found_in_order(names, fake, alone):
    assert accelerators.detect() == "cpu"
    for name in names:
        fake(name)
    assert accelerators.detect() == names[0]


def test_a_package_without_a_device_is_not_chosen(fake, alone):
    fake("hpu", devices=0)
    assert (
        accelerators.detect() == "cpu" and accelerators.why_not("hpu") == "habana_frameworks.torch.hpu sees no device"
    )


@pytest.mark.slow
def test_an_absent_package_is_refused_by_name():
    asked = run_after_torch("from deepspeed.accelerator import get_accelerator as g; g()", DS_ACCELERATOR="hpu")
    assert asked.returncode != 0 and "the Python package habana_frameworks is not installed" in asked.stderr
    asked = run_after_torch("from deepspeed.accelerator import get_accelerator as g; g()", DS_ACCELERATOR="hpuu")
    assert "Did you mean 'hpu'?" in asked.stderr


# ---- the launcher -------------------------------------------------------------------------------------------------


def test_the_launcher_asks_where_another_device_may_be(monkeypatch):
    asked = []

    def answer(environment):
        asked.append(environment.get("DS_ACCELERATOR"))
        return answers.pop()

    monkeypatch.setattr("deepspeed.launcher.plan.ask", answer)
    answers = [("hpu", 3, "")]
    env = {"DS_ACCELERATOR": "hpu"}
    assert local_slots(env, []) == ([0, 1, 2], True)
    answers, env = [("hpu", 2, "")], {"DS_ACCELERATOR": "hpu", "HABANA_VISIBLE_MODULES": "4,6"}
    assert local_slots(env, []) == (["4", "6"], True)
    answers, notes = [("", 0, "it is broken")], []
    assert local_slots({"DS_ACCELERATOR": "mine"}, notes) == ([0], False)
    assert "cannot count devices of DS_ACCELERATOR=mine" in notes[0] and "it is broken" in notes[0]
    monkeypatch.setattr(Vendor, "missing", lambda self: "" if self.name in ("hpu", "cpu") else "absent")
    answers, env = [("hpu", 2, "")], {}
    assert local_slots(env, []) == ([0, 1], True) and env == {"DS_ACCELERATOR": "hpu"}
    assert asked == ["hpu", "hpu", "mine", None]
    assert not device_count.is_asked("cpu") and not device_count.is_asked("cuda")


@pytest.mark.slow
def test_a_process_of_its_own_counts_devices():
    assert device_count.ask({**os.environ, "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "3"}) == ("cpu", 3, "")
    name, count, why_not = device_count.ask({**os.environ, "DS_ACCELERATOR": "hpu"})
    assert (name, count) == ("", 0) and "habana_frameworks" in why_not


# ---- spellings of guides ------------------------------------------------------------------------------------------


def test_flags_behind_the_name_of_the_script(monkeypatch):
    parser = argparse.ArgumentParser()
    parser.add_argument("--use_hpu", action="store_true")  # the script's own
    args = deepspeed.add_config_arguments(parser).parse_args(["--deepspeed_mpi", "--use_hpu"])
    assert args.deepspeed_mpi and args.use_hpu
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    refused(RuntimeError, "--deepspeed_mpi: mpirun has not started this process", deepspeed.initialize, args=args,
            model=torch.nn.Linear(1, 1))  # fmt: skip


def test_args_device_of_inference():
    args = types.SimpleNamespace(device="hpu")
    refused(ValueError, "args.device is 'hpu'.*DS_ACCELERATOR=hpu", init_inference, torch.nn.Linear(1, 1), args=args)
    args.device = real_accelerator.get_accelerator()._name
    assert init_inference(torch.nn.Linear(1, 1), args=args, dtype=torch.float32).module is not None


def test_a_device_without_a_backend_has_one_rank(monkeypatch):
    monkeypatch.setattr(process_group, "get_accelerator", lambda: types.SimpleNamespace(_name="mps"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(RuntimeError, "'mps' has no communication backend.*the job has 2", process_group._backend_of_one_rank, -1)
    assert process_group._backend_of_one_rank(1) == "gloo"


def test_backends_need_their_modules(monkeypatch):
    monkeypatch.setattr(process_group, "get_accelerator", lambda: types.SimpleNamespace(_name="hpu"))
    refused(RuntimeError, "dist_backend is 'hccl', but the Python package habana_frameworks is not installed",
            process_group.init_deepspeed_backend, "hccl", None, None)  # fmt: skip
