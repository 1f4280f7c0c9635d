"""Import path that existing scripts use; the code is in deepspeed.config.elasticity."""

from deepspeed.config.elasticity import (  # noqa: F401
    ELASTICITY,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from deepspeed.elasticity.constants import ENABLED, ENABLED_DEFAULT  # noqa: F401
from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
