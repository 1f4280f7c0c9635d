"""Import path of existing scripts."""

from deepspeed.data.analyzer import DataAnalyzer, DistributedDataAnalyzer  # noqa: F401
