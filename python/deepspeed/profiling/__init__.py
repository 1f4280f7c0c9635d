"""Figures of models and runs: operations of models (``flops_profiler``), the costs of operators (``op_costs``)."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
