"""Questions about the torch in use."""

import re

import torch


def _major_minor(version):
    match = re.match(r"\s*(\d+)(?:\.(\d+))?", str(version))
    if not match:
        raise ValueError(f"{version!r} is not a version number such as 2.1.")
    return int(match[1]), int(match[2] or 0)


def required_torch_version(min_version=None, max_version=None):
    """True when torch's major.minor lies within the bounds, both included; numbers such as 2.1 or texts.

    ValueError without any bound. Patch levels and local parts (``+cu130``) are not compared.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version needs min_version, max_version or both.")
    have = _major_minor(torch.__version__)
    if min_version is not None and have < _major_minor(min_version):
        return False
    return max_version is None or have <= _major_minor(max_version)
