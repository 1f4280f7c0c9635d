"""The import path under which scripts know the core splitter; it lives in ``deepspeed.host.numa``."""

from deepspeed.host.numa import (
    check_for_numactl_pkg,
    get_numa_cores,
    get_numactl_cmd,
    parse_range,
    parse_range_list,
)

__all__ = ["check_for_numactl_pkg", "get_numa_cores", "get_numactl_cmd", "parse_range", "parse_range_list"]
