"""Configurations as logs, reports, checkpoints and bundles may show them. The Field of a key says that it is a secret
(``csrc/config/secrets.h``)."""

from deepspeed._native import _C


def shown(config, root="training"):
    """A copy of a configuration dict with "***" for each secret; other values than dicts as they are."""
    return _C.config.masked(config, root=root) if isinstance(config, dict) else config
