"""Parameters, MACs, flops and latency of a model and of each of its modules."""

from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
