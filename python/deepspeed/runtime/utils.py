"""Import path of existing scripts; the code is in the rooms that use it."""

from deepspeed.engine.memory import see_memory_usage  # noqa: F401
from deepspeed.pipe.instructions import call_to_str  # noqa: F401
from deepspeed.published.partitioned_tensor import PartitionedTensor  # noqa: F401
from deepspeed.utils.backward import count_used_parameters_in_backward, register_output_backward_hooks  # noqa: F401
from deepspeed.utils.flat_groups import all_gather_dp_groups  # noqa: F401
from deepspeed.utils.norms import (  # noqa: F401
    clip_grad_norm_,
    get_global_norm,
    get_grad_norm,
    get_weight_norm,
    is_model_parallel_parameter,
)
from deepspeed.utils.overflow import CheckOverflow  # noqa: F401
from deepspeed.utils.partition import partition_balanced, partition_uniform, prefix_sum_inc  # noqa: F401
from deepspeed.utils.seeds import set_random_seed  # noqa: F401
from deepspeed.zero.gathers.linear import noop_decorator  # noqa: F401
from deepspeed.zero.nested import move_to_device  # noqa: F401
