"""Import path that existing scripts use; the code is in deepspeed.config."""

from deepspeed.config.errors import (  # noqa: F401
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
