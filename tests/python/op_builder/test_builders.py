"""The builders of the table: the published names and signatures, and what the loaded ops compute."""

import importlib
import inspect
import json
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepspeed import git_version_info, ops
from deepspeed.accelerator import get_accelerator
from deepspeed.ops import op_builder
from deepspeed.ops.op_builder import ALL_OPS, OpBuilder, toolchain
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, TorchCPUOpBuilder
from deepspeed.ops.op_table import NOT_IMPLEMENTED, OPS
from refusals import refused

PUBLISHED = json.loads(pathlib.Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_builder(name):
    """Constructor, base, methods with their parameters, and constants, as scripts and test suites use them."""
    facts = PUBLISHED[name]
    cls = getattr(op_builder.builder if name in ("CUDAOpBuilder", "TorchCPUOpBuilder") else op_builder, name)
    assert signature(cls.__init__)[1:] == parameters(facts["signature"])
    assert facts["base"] in [base.__name__ for base in cls.__mro__]
    for method, text in facts["methods"].items():
        static = text.startswith("staticmethod")
        assert isinstance(inspect.getattr_static(cls, method), staticmethod) == static, method
        assert signature(getattr(cls, method))[0 if static else 1 :] == parameters(text), method
    assert {member: getattr(cls, member) for member in facts["members"]} == facts["members"]


def parameters(text):
    return [part.strip() for part in text[text.index("(") + 1 : text.rindex(")")].split(",") if part.strip()]


def signature(function):
    return [str(parameter).replace(": ", ":") for parameter in inspect.signature(function).parameters.values()]


def test_rows_and_builders():
    names = [row.name for row in OPS]
    assert len(set(names)) == len(names) == len(ALL_OPS)
    for row in OPS:
        builder = getattr(op_builder, row.class_name)()
        assert (builder.name, builder.NAME, builder.BUILD_VAR) == (row.name, row.name, row.build_var)
        assert isinstance(builder, OpBuilder) and row.what in type(builder).__doc__
        assert getattr(importlib.import_module(type(builder).__module__), row.class_name) is type(builder)
        assert all(isinstance(text, str) for text in builder.sources() + builder.include_paths())
        for kernel in row.kernels if row.api and builder.is_installed() else ():
            assert os.path.exists(os.path.join(git_version_info.ROOT, "csrc", "kernels", "ref", f"{kernel}.cpp"))


def test_modules_in_which_scripts_look():
    for module, name in (
        ("op_builder.evoformer_attn", "EvoformerAttnBuilder"), ("op_builder.cpu_adam", "CPUAdamBuilder"),
        ("op_builder.async_io", "AsyncIOBuilder"), ("op_builder.ragged_utils", "RaggedUtilsBuilder"),
        ("op_builder.transformer_inference", "InferenceBuilder"), ("op_builder.builder", "OpBuilder"),
        ("op_builder.all_ops", "ALL_OPS"), ("aio", "AsyncIOBuilder"), ("gds", "GDSBuilder"),
        ("pin_memory", "PinMemoryBuilder"),
    ):  # fmt: skip
        assert getattr(importlib.import_module(f"deepspeed.ops.{module}"), name) is getattr(op_builder, name), name


@pytest.mark.parametrize("row", OPS, ids=lambda row: row.name)
def test_every_op_loads_or_says_why_not(row, capsys):
    builder = getattr(op_builder, row.class_name)()
    compatible = builder.is_compatible()
    assert ops.__compatible_ops__[row.name] == compatible
    assert git_version_info.installed_ops[row.name] == builder.is_installed()
    if compatible:
        module = builder.load()
        assert module is importlib.import_module(builder.absolute_name()) and not builder.jit_mode
        assert builder.jit_load() is module
        return
    assert builder.why_not()
    refused(ValueError, f"the op {row.name} cannot be used here: .*ds_report", builder.load)
    assert not builder.is_compatible(verbose=True)
    assert f"[WARNING] {row.name}: {builder.why_not()}" in capsys.readouterr().out
    if row.api is None:
        assert builder.why_not() == "not in this build yet"


def test_not_implemented():
    builder = op_builder.NotImplementedBuilder()
    assert not builder.is_compatible() and ops.__compatible_ops__["deepspeed_not_implemented"] is False
    refused(ValueError, "no such op", builder.load)


def test_accelerators_give_builders():
    accelerator = get_accelerator()
    if accelerator._name == "cpu":
        assert accelerator.op_builder_dir() == "deepspeed.ops.op_builder.cpu"
        assert accelerator.get_op_builder("InferenceBuilder") is op_builder.NotImplementedBuilder
    assert accelerator.get_op_builder("CPUAdamBuilder") is op_builder.CPUAdamBuilder
    assert isinstance(accelerator.create_op_builder("FusedAdamBuilder"), op_builder.FusedAdamBuilder)
    assert accelerator.get_op_builder("no such thing") is None
    cuda = importlib.import_module("deepspeed.accelerator.cuda_accelerator").CUDA_Accelerator()
    assert cuda.get_op_builder("InferenceBuilder") is op_builder.InferenceBuilder
    assert cuda.create_op_builder("NoSuchBuilder") is None


def test_prebuilt_ops_name_their_extension():
    assert op_builder.CPUAdamBuilder().builder().name == "deepspeed._C"


# ---- what the ops compute ----------------------------------------------------------------------------------------
def adam_reference(p, g, m, v, lr, beta1, beta2, eps, decay, step, adamw):
    p, g, m, v = (t.double() for t in (p, g, m, v))
    g = g if adamw else g + decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    if adamw:
        p = p * (1 - lr * decay)
    return p - lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps), m, v


def agree(found, wanted, atol=1e-6):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=atol)


@pytest.fixture
def values():
    torch.manual_seed(3)
    p, g, m = (torch.randn(1001) for _ in range(3))
    return p, g, m, torch.rand(1001)


@pytest.mark.parametrize("adamw", [True, False])
def test_cpu_adam(values, adamw):
    op = op_builder.CPUAdamBuilder().load()
    op.create_adam(5, 1e-3, 0.9, 0.999, 1e-8, 0.01, adamw, False)
    p, g, m, v = (t.clone() for t in values)
    given = (0.01, 0.9, 0.95, 1e-8, 0.1, True, p, g, m, v)
    op.adam_update(5, 3, *given)
    agree((p, m, v), adam_reference(*values, 0.01, 0.9, 0.95, 1e-8, 0.1, 3, adamw))
    op.adam_rollback(5, 3, *given)
    torch.testing.assert_close((p, m, v), (values[0], values[2], values[3]), rtol=1e-4, atol=1e-5)
    refused(ValueError, "count from 1", op.adam_rollback, 5, 0, *given)
    g[7] = float("nan")
    op.adam_update(5, 3, *given)
    before = p.clone()
    refused(RuntimeError, "cannot be rolled back", op.adam_rollback, 5, 3, *given)
    assert torch.equal(before, p) or torch.isnan(before).any()
    op.destroy_adam(5)
    refused(ValueError, r"no CPU Adam optimizer number 5.*create_adam\(5, ...\)", op.adam_update, 5, 3, *given)


@pytest.mark.parametrize("mode", [0, 1])
def test_fused_adam(values, mode):
    op = op_builder.FusedAdamBuilder().load()
    p, g, m, v = (t.clone() for t in values)
    lists = [[t[:300], t[300:]] for t in (g, p, m, v)]
    args = (0.01, 0.9, 0.95, 1e-8, 2, mode, 1, 0.1)
    op.multi_tensor_adam(2048, torch.ones(1, dtype=torch.int), lists, *args)
    assert torch.equal(p, values[0])  # the flag says: not this time
    op.multi_tensor_adam(2048, torch.zeros(1, dtype=torch.int), lists, *args)
    agree((p, m, v), adam_reference(*values, 0.01, 0.9, 0.95, 1e-8, 0.1, 2, mode == 1))
    refused(ValueError, "takes 4 lists", op.multi_tensor_adam, 2048, None, lists[:3], *args)


def test_threads_of_one_process_do_not_mix():
    op = op_builder.FusedAdamBuilder().load()

    def train(seed):
        size = 200_000
        p, m, v = torch.full((size,), float(seed))[::2], torch.zeros(size)[::2], torch.zeros(size)[::2]
        for step in range(1, 30):
            op.multi_tensor_adam(0, None, [[p * 0.5], [p], [m], [v]], 0.01, 0.9, 0.99, 1e-8, step, 1, 1, 0.0)
        return p

    alone = [train(seed) for seed in range(1, 5)]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, alone, pool.map(train, range(1, 5))))


def need(name):
    builder = getattr(op_builder, name)()
    if not builder.is_compatible():
        pytest.skip(builder.why_not())
    return builder.load()


def test_cpu_adagrad(values):
    op = need("CPUAdagradBuilder")
    p, g, _, s = (t.clone() for t in values)
    op.create_adagrad(1, 0.01, 1e-10, 0.1, False)
    op.adagrad_update(1, 1, 0.01, 1e-10, 0.1, p, g, s)
    grad = values[1].double() + 0.1 * values[0].double()
    sums = values[3].double() + grad * grad
    agree((s, p), (sums, values[0] - 0.01 * grad / (sums.sqrt() + 1e-10)))
    op.destroy_adagrad(1)


def lion_reference(p, g, m, lr, beta1, beta2, decay):
    p, g, m = p.double(), g.double(), m.double()
    return p * (1 - lr * decay) - lr * (beta1 * m + (1 - beta1) * g).sign(), beta2 * m + (1 - beta2) * g


def test_cpu_lion(values):
    op = need("CPULionBuilder")
    p, g, m, _ = (t.clone() for t in values)
    op.create_lion(1, 0.01, 0.9, 0.99, 0.1, False)
    op.lion_update(1, 1, 0.01, 0.9, 0.99, 0.1, p, g, m)
    agree((p, m), lion_reference(*values[:3], 0.01, 0.9, 0.99, 0.1))
    op.destroy_lion(1)


def test_fused_lion(values):
    op = need("FusedLionBuilder")
    p, g, m, _ = (t.clone() for t in values)
    op.multi_tensor_lion(2048, torch.zeros(1), [[g], [p], [m]], 0.01, 0.9, 0.99, 1, 0.1)
    agree((p, m), lion_reference(*values[:3], 0.01, 0.9, 0.99, 0.1))


@pytest.mark.parametrize("mode", [0, 1])
def test_fused_lamb(values, mode):
    op = need("FusedLambBuilder")
    p, g, m, v = (t.clone() for t in values)
    copy = torch.empty(1001, dtype=torch.bfloat16)
    ratio = op.lamb(p, copy, m, v, g * 4, 0.1, 0.9, 0.99, 10.0, 0.01, 1e-3, 4.0, 2, mode, 1, 0.1)
    p0, g0, m0, v0 = (t.double() for t in values)
    m1, v1 = 0.9 * m0 + 0.1 * g0, 0.99 * v0 + 0.01 * g0 * g0
    update = m1 / ((v1 + 1e-3).sqrt() if mode == 0 else v1.sqrt() + 1e-3) + 0.1 * p0
    rate = 0.1 * (1 - 0.99**2) ** 0.5 / (1 - 0.9**2)  # bias correction is a factor of the rate, outside the ratio
    wanted = p0.norm() / update.norm()
    torch.testing.assert_close(ratio.double(), wanted.reshape(1), rtol=1e-5, atol=0)
    agree((p, m, v), (p0 - rate * wanted * update, m1, v1), 1e-5)
    assert torch.equal(copy, p.bfloat16())
    zero = torch.zeros(3)
    args = (0.1, 0.9, 0.99, 10.0, 0.01, 1e-3, 1.0, 1, mode, 1, 0.0)
    assert op.lamb(zero, torch.empty(0), zero.clone(), zero.clone(), torch.ones(3), *args).tolist() == [1.0]


def test_utils():
    op = op_builder.UtilsBuilder().load()
    tensors = [torch.arange(6.0).reshape(2, 3), torch.ones(1)]
    flat = op.flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 1]
    assert all(torch.equal(a, b) for a, b in zip(op.unflatten(flat, tensors), tensors))


# ---- questions a builder answers ---------------------------------------------------------------------------------
class Anything(CUDAOpBuilder):
    def absolute_name(self):
        return "nobody.anything"

    def sources(self):
        return ["a.cpp"]


def test_small_questions(capsys):
    builder = Anything("anything")
    assert builder.strip_empty_entries(["", "-O2", ""]) == ["-O2"]
    assert builder.cpu_arch() in ("-march=native", "-mcpu=native")
    assert builder.simd_width() in ("-D__AVX512__", "-D__AVX256__", "-D__SCALAR__")
    assert builder.get_cuda_compile_flag() in ("-D__ENABLE_CUDA__", "-D__DISABLE_CUDA__")
    assert builder.command_exists("sh") and builder.command_exists(["no-such-program", "sh"])
    assert not builder.command_exists("no-such-program")
    assert "[WARNING] anything needs the program no-such-program" in capsys.readouterr().out
    assert "no-such-program" in builder.error_log and builder.deepspeed_src_path("/a/b.cpp") == "/a/b.cpp"
    assert builder.deepspeed_src_path("ops/b.cpp").endswith("/deepspeed/ops/b.cpp")
    assert builder.has_function("sqrt", ["m"]) and not builder.has_function("no_such_function", ["m"])
    assert OpBuilder.is_rocm_pytorch() is False and OpBuilder.installed_rocm_version() == (0, 0)
    assert OpBuilder.get_rocm_gpu_arch() == "" and OpBuilder.get_rocm_wavefront_size() == "32"
    assert isinstance(OpBuilder.is_sycl_enabled(), bool)
    assert {"-mcpu=native", "-march=native"} & {*TorchCPUOpBuilder.cxx_args(builder)}


def test_torch_of_the_build():
    here = ".".join(torch.__version__.split(".")[:2])
    OpBuilder.validate_torch_version({"version": here})
    words = f"compiled for torch 0.4, but this process runs torch {here}"
    refused(RuntimeError, words, OpBuilder.validate_torch_version, {"version": "0.4"})
    OpBuilder.validate_torch_op_version({"cuda_version": "0.0", "hip_version": "0.0"})
    other = {"cuda_version": "7.5", "hip_version": "0.0"}
    refused(RuntimeError, "compiled with CUDA 7.5", OpBuilder.validate_torch_op_version, other)


def test_functions_about_the_toolkit(monkeypatch):
    interface = op_builder.builder
    toolkit = interface.cuda_toolkit
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: "/opt/nvcc")
    monkeypatch.setattr(toolkit, "nvcc_version", lambda nvcc=None: (12, 4))
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    assert interface.installed_cuda_version() == (12, 4) and interface.assert_no_cuda_mismatch("toy")
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    words = "of CUDA 12.4, but torch was built for CUDA 11.8"
    refused(interface.CUDAMismatchException, words, interface.assert_no_cuda_mismatch, "toy")
    monkeypatch.setattr(toolkit, "nvcc_version", lambda nvcc=None: None)
    refused(interface.MissingCUDAException, "the op toy needs nvcc", interface.installed_cuda_version, "toy")
    here = ".".join(torch.__version__.split(".")[:2])
    interface.assert_torch_info({"version": here, "cuda_version": "0.0", "hip_version": "0.0"})
    refused(RuntimeError, "torch 0.4", interface.assert_torch_info, {"version": "0.4"})


def test_cutlass_path(monkeypatch):
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    assert op_builder.EvoformerAttnBuilder().include_paths() == []
    monkeypatch.setenv("CUTLASS_PATH", "/opt/cutlass")
    assert op_builder.EvoformerAttnBuilder().include_paths() == [
        "/opt/cutlass/include", "/opt/cutlass/tools/util/include"
    ]  # fmt: skip


def test_setuptools_extension(monkeypatch):
    builder = Anything("anything")
    builder.build_for_cpu = True
    extension = builder.builder()
    assert extension.name == "nobody.anything" and extension.sources == ["a.cpp"]


def test_compute_capabilities(monkeypatch):
    builder = Anything("anything")
    builder.build_for_cpu = False
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    flags = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90",
             "-gencode=arch=compute_90,code=compute_90"]  # fmt: skip
    assert builder.compute_capability_args() == flags and builder.enable_bf16
    assert set(flags) < set(builder.nvcc_args())
    seen = []
    monkeypatch.setattr(builder, "filter_ccs", lambda ccs: seen.append(ccs) or ccs[:1])
    assert builder.compute_capability_args() == flags[:1]
    assert seen == [[["8", "0"], ["9", "0+PTX"]]]
    monkeypatch.setattr(builder, "filter_ccs", lambda ccs: [])
    refused(RuntimeError, "no code for compute capability", builder.compute_capability_args)


def test_float_formats():
    assert [op_builder.FPQuantizerBuilder.get_quant_range(bits) for bits in (6, 8, 12)] == [28, 480, 510]
    refused(ValueError, "q_bits is 9", op_builder.FPQuantizerBuilder.get_quant_range, 9)


def test_missing_libaio_is_told(monkeypatch, capsys):
    monkeypatch.setattr("deepspeed.host.libraries.find_header", lambda name: None)
    op_builder.AsyncIOBuilder().is_compatible(verbose=True)
    out = capsys.readouterr().out
    assert "[WARNING] async_io requires the dev libaio .so object and headers but these were not found." in out
    assert "[WARNING] async_io: please install the libaio-dev package with apt" in out and "CFLAGS and LDFLAGS" in out


def test_the_stand_in_is_in_no_list():
    assert NOT_IMPLEMENTED.name not in ALL_OPS


def test_the_standard_follows_torch(monkeypatch):
    monkeypatch.setattr(toolchain, "CXX_STANDARD", 20)
    assert toolchain.with_standard(["-O3"]) == ["-O3", "-std=c++20"]
    assert toolchain.with_standard(["-std=c++17", "-g0"]) == ["-std=c++20", "-g0"]
    assert toolchain.with_standard(["-std=gnu++14"]) == ["-std=c++20"]
    assert toolchain.with_standard(["-std=c++23"]) == ["-std=c++23"]
