"""The native ops, one row each: builders, the report and the build read them here. Imports nothing of the package."""

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Op:
    """One op.

    name: the op's short name, key of ``deepspeed.ops.__compatible_ops__``.
    class_name: its builder in ``deepspeed.ops.op_builder``.
    what: what it does, for people.
    api: the module that ``load()`` returns; None while the op is not written.
    rule: the native optimizer that it is made of; None: torch, or the extension module (``native``), is enough.
    native: its functions lie in the extension module.
    devices: kinds of device its kernels run on.
    kernels: their sources below csrc/kernels, each as <file>.cpp in ref/ and cpu/ and <file>.cu in cuda/.
    system: system libraries it needs: (header, library, Debian package).
    build_var: the environment variable that asks the build for it; by default DS_BUILD_<NAME>.
    base: the builder's parent in ``deepspeed.ops.op_builder.builder``.
    takes_name: whether the builder's constructor has the argument ``name``.
    """

    name: str
    class_name: str
    what: str
    api: Optional[str] = None
    rule: Optional[str] = None
    native: bool = False
    devices: tuple = ("cpu",)
    kernels: tuple = ()
    system: tuple = ()
    build_var: str = ""
    base: str = "OpBuilder"
    takes_name: bool = False

    def __post_init__(self):
        if not self.build_var:
            object.__setattr__(self, "build_var", f"DS_BUILD_{self.name.upper()}")


def _cpu(name, class_name, what, **more):
    return Op(name, class_name, what, base="TorchCPUOpBuilder", **more)


def _both(name, class_name, what, **more):
    return Op(name, class_name, what, devices=("cpu", "cuda"), base="CUDAOpBuilder", **more)


def _cuda(name, class_name, what, takes_name=True, **more):
    return Op(name, class_name, what, devices=("cuda",), base="CUDAOpBuilder", takes_name=takes_name, **more)


LIBRARIES = {"cpu": "libds_kernels_cpu.so", "cuda": "libds_kernels_cuda.so"}
SOURCES = {"cpu": "cpp", "cuda": "cu"}  # the endings of the files in csrc/kernels

OPS = (
    # Optimizers
    _cpu("cpu_adam", "CPUAdamBuilder", "Adam and AdamW on the CPU", api="cpu_adam", rule="adam",
         kernels=("adam",)),
    _cpu("cpu_adagrad", "CPUAdagradBuilder", "Adagrad on the CPU", api="cpu_adagrad", rule="adagrad",
         kernels=("adagrad",)),
    _cpu("cpu_lion", "CPULionBuilder", "Lion on the CPU", api="cpu_lion", rule="lion", kernels=("lion",)),
    _both("fused_adam", "FusedAdamBuilder", "Adam and AdamW over lists of tensors", api="fused_adam",
          rule="adam", kernels=("adam",)),
    _both("fused_lion", "FusedLionBuilder", "Lion over lists of tensors", api="fused_lion", rule="lion",
          kernels=("lion",)),
    _both("fused_lamb", "FusedLambBuilder", "LAMB", api="fused_lamb", rule="lamb", kernels=("lamb",)),
    # Memory and files
    Op("utils", "UtilsBuilder", "flattens lists of tensors and back", api="utils", devices=("cpu", "cuda")),
    _cpu("async_io", "AsyncIOBuilder", "reads and writes files beside the computation", api="async_io", native=True,
         system=(("libaio.h", "aio", "libaio-dev"),), build_var="DS_BUILD_AIO"),
    Op("gds", "GDSBuilder", "moves files to and from GPU memory", api="gds", native=True, devices=("cuda",),
       base="AsyncIOBuilder",
       system=(("libaio.h", "aio", "libaio-dev"), ("cufile.h", "cufile", "libcufile-dev"))),
    Op("pin_memory", "PinMemoryBuilder", "page-locked memory without a driver", api="pin_memory", native=True),
    # Communication
    _cpu("deepspeed_ccl_comm", "CCLCommBuilder", "collectives through oneCCL", build_var="DS_BUILD_CCL_COMM"),
    _cpu("deepspeed_shm_comm", "ShareMemCommBuilder", "collectives in shared memory", build_var="DS_BUILD_SHM_COMM"),
    _cpu("packbits", "PackbitsBuilder", "packs signs into bits", api="packbits", native=True,
         build_var="DS_BUILD_PACK_BITS"),
    # Transformers
    Op("transformer", "TransformerBuilder", "fused transformer layers for training", api="transformer", native=True,
       devices=("cpu", "cuda"), base="CUDAOpBuilder", takes_name=True),
    Op("stochastic_transformer", "StochasticTransformerBuilder", "the same; the kernels are the reproducible ones",
       api="transformer", native=True, devices=("cpu", "cuda"), base="TransformerBuilder"),
    Op("sparse_attn", "SparseAttnBuilder", "block-sparse attention", api="sparse_attn", native=True,
       devices=("cpu", "cuda")),
    _cuda("transformer_inference", "InferenceBuilder", "fused transformer layers for inference"),
    _cuda("inference_core_ops", "InferenceCoreBuilder", "norms, activations and products for inference"),
    _cuda("cutlass_ops", "InferenceCutlassBuilder", "grouped and mixed-precision products for inference"),
    _cuda("ragged_ops", "RaggedUtilsBuilder", "batches of sequences of unequal length, on the host"),
    _cuda("ragged_device_ops", "RaggedOpsBuilder", "the same, on the device"),
    _cuda("spatial_inference", "SpatialInferenceBuilder", "fused operators of diffusion models"),
    Op("evoformer_attn", "EvoformerAttnBuilder", "attention of protein models", api="evoformer_attn", native=True,
       devices=("cpu", "cuda"), base="CUDAOpBuilder", takes_name=True),
    _cuda("flash_attn", "FlashAttentionBuilder", "attention that does not store its matrix", takes_name=False),
    # Data and precision
    Op("quantizer", "QuantizerBuilder", "integer quantization", api="quantizer", native=True, devices=("cpu", "cuda"),
       base="CUDAOpBuilder", takes_name=True),
    Op("fp_quantizer", "FPQuantizerBuilder", "quantization to small floats", api="fp_quantizer", native=True,
       devices=("cpu", "cuda"), base="CUDAOpBuilder", takes_name=True),
    Op("random_ltd", "RandomLTDBuilder", "random layer-wise token dropping", api="random_ltd", native=True,
       devices=("cpu", "cuda"), base="CUDAOpBuilder", takes_name=True),
    _cuda("dc", "DeepCompileBuilder", "ZeRO inside compiled graphs", takes_name=False,
          build_var="DS_BUILD_DEEP_COMPILE"),
)  # fmt: skip

NOT_IMPLEMENTED = Op("deepspeed_not_implemented", "NotImplementedBuilder", "stands for ops that a device does not have")


def find_op(name):
    """The row of the op called ``name``; KeyError where there is none."""
    return next(row for row in (*OPS, NOT_IMPLEMENTED) if row.name == name)
