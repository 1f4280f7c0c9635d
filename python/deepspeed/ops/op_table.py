"""The native ops of this build, for the environment report. A new op is one line here. Imports nothing.

Each row: name, the library that holds it (in ``deepspeed/_lib``), the device its kernels run on, what it does.
"""

OPS = [
    ("cpu_adam", "libds_kernels_cpu.so", "cpu", "Adam and AdamW on the CPU"),
    ("fused_adam", "libds_kernels_cuda.so", "cuda", "Adam and AdamW on GPUs"),
]
