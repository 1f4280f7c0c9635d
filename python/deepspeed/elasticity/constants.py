"""Names and defaults of the keys of the section ``elasticity``: ``MIN_GPUS``, ``MIN_GPUS_DEFAULT``.

They are read from the schema in csrc/config, so that each has one definition.
"""

from deepspeed.config.elasticity import ELASTICITY, SCHEDULER_VARIABLE  # noqa: F401
from deepspeed.config.model import layout

DEEPSPEED_ELASTICITY_CONFIG = SCHEDULER_VARIABLE
MINIMUM_DEEPSPEED_VERSION = "0.3.8"  # the first that knew this section
LATEST_ELASTICITY_VERSION = 0.2

for _key, _facts in layout("training", ELASTICITY).items():
    globals()[_key.upper()] = _key
    globals()[_key.upper() + "_DEFAULT"] = _facts["default"]
