"""Every accelerator file against the abstract interface, and every verb on the accelerators that work here."""

import glob
import importlib
import inspect
import os
import pathlib
import re
from unittest import mock

import pytest
import torch

import deepspeed.accelerator
from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator, torch_module
from deepspeed.accelerator.real_accelerator import accelerators
from deepspeed.host.vendors import VENDORS
from processes import run_after_torch
from refusals import refused

FOLDER = os.path.dirname(deepspeed.accelerator.__file__)
FILES = [
    os.path.basename(path)[:-3]
    for path in sorted(glob.glob(os.path.join(FOLDER, "*_accelerator.py")))
    if not path.endswith(("abstract_accelerator.py", "real_accelerator.py"))
]
INTERFACE = [name for name in vars(DeepSpeedAccelerator) if not name.startswith("_")]
# The published list, so that nothing disappears from the interface itself.
PUBLISHED = """
is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure device_name device
set_device current_device current_device_name device_count synchronize random set_rng_state get_rng_state manual_seed
manual_seed_all initial_seed default_generator stream current_stream default_stream empty_cache memory_allocated
max_memory_allocated reset_max_memory_allocated memory_cached max_memory_cached reset_max_memory_cached memory_stats
reset_peak_memory_stats memory_reserved max_memory_reserved total_memory available_memory is_bf16_supported
is_fp16_supported supported_dtypes is_available range_push range_pop lazy_call communication_backend_name
is_triton_supported prefer_triton_grouped_mm create_graph capture_to_graph replay_graph pin_memory is_pinned
unpin_memory on_accelerator op_builder_dir create_op_builder get_op_builder build_extension export_envs
visible_devices_envs set_visible_devices_envs get_compile_backend set_compile_backend Stream Event BFloat16Tensor
ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor supports_nvtx_domain
""".split()


def class_of(name):
    module = importlib.import_module(f"deepspeed.accelerator.{name}")
    found = [value for key, value in vars(module).items() if key.endswith("_Accelerator") and inspect.isclass(value)]
    assert len(found) == 1, f"{name}.py must hold exactly one class named *_Accelerator, it holds {found}"
    return found[0]


def test_interface_is_the_published_one():
    assert not set(PUBLISHED) - set(INTERFACE)
    assert "cpu_accelerator" in FILES and "cuda_accelerator" in FILES


@pytest.mark.parametrize("name", FILES)
def test_file_implements_the_whole_interface_and_is_registered(name):
    accelerator = class_of(name)
    assert accelerators.get(name[: -len("_accelerator")]) is accelerator
    assert issubclass(accelerator, DeepSpeedAccelerator) and not accelerator.__abstractmethods__
    for member in INTERFACE:
        theirs, ours = getattr(accelerator, member), getattr(DeepSpeedAccelerator, member)
        assert isinstance(theirs, property) == isinstance(ours, property), member
        if inspect.isfunction(ours):
            wanted, found = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
            assert list(found) == list(wanted), member
            assert [found[key].default for key in wanted] == [wanted[key].default for key in wanted], member
    vendor = VENDORS[name[: -len("_accelerator")]]
    if vendor.package == "torch" and hasattr(torch, vendor.verbs.removeprefix("torch.")) or not vendor.verbs:
        accelerator()  # needs no device and no driver
    else:
        refused(ValueError, f"'{vendor.name}' cannot work here, because .*{vendor.package}", accelerator)


def working():
    return [name for name in accelerators.names() if not accelerators.why_not(name)]


@pytest.fixture(params=working())
def accelerator(request):
    return accelerators.get(request.param)()


def test_devices(accelerator):
    assert accelerator.is_available() and accelerator.device_count() >= 1
    assert accelerator.device_name() == accelerator._name and isinstance(accelerator.current_device(), int)
    assert torch.device(accelerator.current_device_name()).type == accelerator._name
    assert torch.ones(1, device=accelerator.device_name(0)).device.type == accelerator._name
    with accelerator.device(0):
        accelerator.set_device(0)
    accelerator.synchronize()
    accelerator.synchronize(0)
    here = torch.ones(2, device=accelerator.current_device_name())
    assert accelerator.on_accelerator(here) and not accelerator.on_accelerator(torch.ones(2, device="meta"))
    flags = (
        accelerator.is_synchronized_device, accelerator.use_host_timers, accelerator.resolves_data_dependency,
        accelerator.handles_memory_backpressure, accelerator.is_triton_supported, accelerator.prefer_triton_grouped_mm,
    )  # fmt: skip
    assert {type(flag()) for flag in flags} == {bool}
    assert accelerator.communication_backend_name() in ("gloo", "nccl", "ccl")


def test_random_numbers(accelerator):
    device = accelerator.current_device_name()
    accelerator.manual_seed(7)
    assert accelerator.initial_seed() == 7
    state = accelerator.get_rng_state()
    assert state.dtype == torch.uint8 and state.device.type == "cpu"
    first = torch.rand(4, device=device)
    accelerator.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device=device))
    accelerator.manual_seed_all(7)
    assert torch.equal(first, torch.rand(4, device=device))
    assert isinstance(accelerator.default_generator(0), torch.Generator) and accelerator.random() is torch.random


def test_streams_events_graphs(accelerator):
    if accelerator.Stream is None:
        assert accelerator.Event is None and accelerator.create_graph() is None
        assert accelerator.current_stream() is None and accelerator.default_stream() is None
        assert accelerator.is_synchronized_device() and accelerator.use_host_timers()
        stream = None
    else:
        stream = accelerator.Stream()
        assert accelerator.current_stream() is not None and accelerator.default_stream() is not None
        event = accelerator.Event(enable_timing=True)
        event.record()
        event.synchronize()
    with accelerator.stream(stream):
        total = torch.ones(3, device=accelerator.current_device_name()).sum()
    accelerator.synchronize()
    assert total.item() == 3
    graph = accelerator.create_graph()
    x = torch.ones(2, device=accelerator.current_device_name())
    with accelerator.capture_to_graph(graph):
        y = x + 1
    accelerator.replay_graph(graph)
    accelerator.synchronize()
    assert y.tolist() == [2.0, 2.0]


def test_memory(accelerator):
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    kept = torch.ones(32 << 20, dtype=torch.uint8, device=accelerator.current_device_name())
    assert accelerator.memory_allocated() >= before + (24 << 20)
    assert accelerator.max_memory_allocated() >= accelerator.memory_allocated() - (1 << 20)
    del kept
    peak = accelerator.max_memory_allocated()
    assert peak >= before + (24 << 20)
    accelerator.empty_cache()  # on the CPU malloc may keep it, and what is resident counts
    accelerator.reset_max_memory_allocated()
    assert accelerator.max_memory_allocated() < peak
    accelerator.reset_max_memory_cached()
    stats = accelerator.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] * 0.9
    total, available = accelerator.total_memory(), accelerator.available_memory()
    assert 0 < available <= total and total > 1 << 28
    figures = ("memory_reserved", "max_memory_reserved", "memory_cached", "max_memory_cached")
    assert {type(getattr(accelerator, figure)()) for figure in figures} == {int}


def test_freed_memory_goes_back_to_the_system(accelerator):
    if accelerator._name != "cpu":
        pytest.skip("a question of malloc: the CPU only")
    blocks = [b"x" * 100_000 for _ in range(1000)]
    pin = b"y" * 100_000  # so that the C library does not give the space before it back by itself
    del blocks
    before = accelerator.memory_allocated()
    accelerator.empty_cache()
    assert accelerator.memory_allocated() < before - (64 << 20)
    assert len(pin) == 100_000


def test_dtypes_run(accelerator):
    dtypes = accelerator.supported_dtypes()
    assert torch.float32 in dtypes and (torch.bfloat16 in dtypes) == accelerator.is_bf16_supported()
    assert (torch.float16 in dtypes) == accelerator.is_fp16_supported()
    for dtype in dtypes:
        layer = torch.nn.Linear(4, 4).to(accelerator.current_device_name(), dtype)
        layer(torch.ones(2, 4, device=accelerator.current_device_name(), dtype=dtype)).sum().backward()
        assert torch.isfinite(layer.weight.grad).all()


def test_tensor_classes(accelerator):
    for name, dtype in (
        ("BFloat16Tensor", torch.bfloat16), ("ByteTensor", torch.uint8), ("DoubleTensor", torch.float64),
        ("FloatTensor", torch.float32), ("HalfTensor", torch.float16), ("IntTensor", torch.int32),
        ("LongTensor", torch.int64),
    ):  # fmt: skip
        made = getattr(accelerator, name)([1, 2])
        assert made.dtype == dtype and made.tolist() == [1, 2] and accelerator.on_accelerator(made)


def test_pinned_memory(accelerator):
    source = torch.arange(6.0).reshape(2, 3)
    pinned = accelerator.pin_memory(source)
    assert torch.equal(pinned, source) and pinned.device.type == "cpu"
    assert accelerator.pin_memory(source, make_copy=False).shape == source.shape
    assert accelerator.pin_memory(source, match_shape=False).shape == (6,)
    assert isinstance(accelerator.is_pinned(pinned), bool)
    accelerator.unpin_memory(pinned)


def test_profiler_lazy_call_and_ops(accelerator):
    accelerator.range_push("step")
    accelerator.range_pop()
    accelerator.range_push("step", domain="DeepSpeed", category="fwd")
    accelerator.range_pop(domain="DeepSpeed")
    called = []
    accelerator.lazy_call(lambda: called.append(1))
    torch.ones(1, device=accelerator.current_device_name())
    assert called == [1]
    assert (
        accelerator.get_op_builder("NoSuchBuilder") is None
        or not accelerator.get_op_builder("NoSuchBuilder")().is_compatible()
    )
    assert accelerator.build_extension().__name__ == "BuildExtension"
    assert isinstance(accelerator.op_builder_dir(), str)


def test_environment(accelerator):
    env = {}
    accelerator.set_visible_devices_envs(env, [1, 3])
    assert env == {name: "1,3" for name in accelerator.visible_devices_envs()}
    assert isinstance(accelerator.export_envs(), list)


def test_compile_backend(accelerator):
    assert accelerator.get_compile_backend() == "inductor"
    refused(ValueError, "no-such-backend", accelerator.set_compile_backend, "no-such-backend")
    if hasattr(torch, "compile"):
        accelerator.set_compile_backend("eager")
        assert accelerator.get_compile_backend() == "eager"


# ---- choosing one -------------------------------------------------------------------------------------------------
CHOSEN = "from deepspeed.accelerator import get_accelerator as g; print(g()._name, g() is g())"


@pytest.mark.slow
def test_the_environment_chooses():
    assert run_after_torch(CHOSEN, DS_ACCELERATOR="cpu").stdout.strip() == "cpu True"
    asked = run_after_torch(CHOSEN, DS_ACCELERATOR="cdua")
    assert asked.returncode != 0 and "DS_ACCELERATOR is 'cdua'" in asked.stderr and "cpu, cuda" in asked.stderr
    chosen = run_after_torch(CHOSEN, DS_ACCELERATOR="cuda").stdout
    assert chosen.splitlines()[-1] == "cuda True"
    if "cuda" not in working():
        assert "does not seem to work here" in chosen
        assert run_after_torch(CHOSEN, DS_ACCELERATOR="").stdout.strip() == "cpu True"


@pytest.fixture
def chosen():
    """Restores the accelerator of this process."""
    real = importlib.import_module("deepspeed.accelerator.real_accelerator")
    before = real._current
    yield real
    real._current = before


def test_set_accelerator(chosen):
    class Toy_Accelerator(class_of("cpu_accelerator")):
        _name = "toy"

    toy = Toy_Accelerator()
    deepspeed.accelerator.set_accelerator(toy)
    assert get_accelerator() is toy
    assert not deepspeed.accelerator.is_current_accelerator_supported()
    refused(TypeError, "str is not an accelerator", deepspeed.accelerator.set_accelerator, "cpu")
    chosen._current = None
    get_accelerator()
    assert deepspeed.accelerator.is_current_accelerator_supported()


def test_counts_of_the_cpu(monkeypatch):
    cpu = class_of("cpu_accelerator")()
    monkeypatch.setenv("LOCAL_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert (cpu.device_count(), cpu.current_device(), cpu.device_name(5)) == (3, 2, "cpu")
    monkeypatch.delenv("LOCAL_SIZE")
    assert cpu.device_count() >= 1
    with cpu.device(0) as nothing:
        assert nothing is None


def test_cuda_names_need_no_gpu():
    cuda = class_of("cuda_accelerator")()
    assert (cuda.device_name(), cuda.device_name(1), cuda.communication_backend_name()) == ("cuda", "cuda:1", "nccl")
    assert (cuda.export_envs(), cuda.visible_devices_envs()) == (["NCCL"], ["CUDA_VISIBLE_DEVICES"])
    assert not cuda.is_synchronized_device() and not cuda.use_host_timers() and not cuda.on_accelerator(torch.ones(1))
    if "cuda" not in working():
        assert not cuda.is_available() and cuda.supported_dtypes() == [torch.float32]


def test_cuda_asks_torch_for_what_torch_has():
    files = map(inspect.getsourcefile, (class_of("cuda_accelerator"), torch_module))
    text = "".join(pathlib.Path(file).read_text(encoding="utf-8") for file in files)
    pattern = r"(?:torch\.cuda\.|self\.module\.|_of_device\(\"|_call\(\"|_seed\(\"|_class\(\")(\w+)"
    names = set(re.findall(pattern, text))
    names |= {name for name in INTERFACE if name.endswith("Tensor")}
    assert len(names) > 30 and not [name for name in names if not hasattr(torch.cuda, name)]


def test_cuda_passes_arguments_on(monkeypatch):
    calls = mock.Mock(**{"current_device.return_value": 7})
    monkeypatch.setattr(torch, "cuda", calls)
    cuda = class_of("cuda_accelerator")()
    for call in (
        "synchronize", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
        "memory_stats", "reset_peak_memory_stats", "current_stream", "default_stream", "set_device", "device",
        "manual_seed", "manual_seed_all", "stream",
    ):  # fmt: skip
        assert getattr(cuda, call)(3) in (getattr(calls, call).return_value, None)
        assert calls.mock_calls[-1] == getattr(mock.call, call)(3)
    assert cuda.memory_cached(1) is calls.memory_reserved.return_value
    assert cuda.max_memory_cached(1) is calls.max_memory_reserved.return_value
    assert cuda.current_device_name() == "cuda:7"
    for state in (("state", 2), ("state",)):
        cuda.set_rng_state(*state)
        calls.set_rng_state.assert_called_with(*state)


def test_unknown_pinning_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "other")
    refused(ValueError, "DS_PIN_MEMORY_BACKEND is 'other'", class_of("cuda_accelerator")().pin_memory, torch.ones(1))


def test_no_other_file_calls_torch_cuda():
    guilty = [
        f"{path}:{number}: {line.strip()}"
        for path in pathlib.Path(FOLDER).parent.rglob("*.py")
        if path.name not in ("cuda_accelerator.py", "torch_facts.py", "torch_nccl.py")  # the last two: versions only
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"torch\.cuda\.", line.split("#")[0]) and "``" not in line and '"""' not in line
    ]
    assert not guilty, "call deepspeed.accelerator instead of torch.cuda:\n" + "\n".join(guilty)
