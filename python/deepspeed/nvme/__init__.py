"""Measures and tunes transfers between tensors and a folder: the programs ``ds_io`` and ``ds_nvme_tune``."""

from deepspeed.nvme.io_benchmark import ds_io_main
from deepspeed.nvme.perf_generate_param import generate_main
from deepspeed.nvme.perf_run_sweep import parse_sweep_arguments, sweep_main

__all__ = ["ds_io_main", "generate_main", "parse_sweep_arguments", "sweep_main"]
