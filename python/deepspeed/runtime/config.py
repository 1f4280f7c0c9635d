"""Import path that existing scripts use; the code is in deepspeed.config."""

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError  # noqa: F401
from deepspeed.config.config import BUILTIN_OPTIMIZERS
from deepspeed.config.getters import get_gradient_clipping, get_log_level, get_train_batch_size  # noqa: F401

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
ADAGRAD_OPTIMIZER = "adagrad"
LAMB_OPTIMIZER = "lamb"
ONEBIT_ADAM_OPTIMIZER = "onebitadam"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUSGD_OPTIMIZER = "musgd"
DEEPSPEED_OPTIMIZERS = [name.lower() for name in BUILTIN_OPTIMIZERS]
