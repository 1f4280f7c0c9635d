"""``ds_report``: what this installation can do on this machine, and why not where it cannot."""

from deepspeed.env_report.report import cli_main, main

__all__ = ["cli_main", "main"]
