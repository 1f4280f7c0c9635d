"""Import path that existing scripts use: elastic training, whose batch size many numbers of ranks can share."""

from deepspeed.config.elasticity import (  # noqa: F401
    ELASTICITY,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from deepspeed.elasticity.constants import ENABLED, ENABLED_DEFAULT  # noqa: F401
from deepspeed.elasticity.elasticity import compute_elastic_config  # noqa: F401
from deepspeed.elasticity.utils import is_torch_elastic_compatible  # noqa: F401
from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__, where={"DSElasticAgent": "deepspeed.elasticity.elastic_agent"})
