"""The state of a training run as a value: all that saving reads of a run, and all that loading fills and gives back.

``RunState`` goes in. A load writes weights, masters and optimizer states through it, and returns the rest as a
``LoadedRun``. ``deepspeed.engine.parts.checkpoints`` makes the first and applies the second, so this room needs no
engine.
"""

import dataclasses
import functools
from typing import Any, Callable, Optional

import torch

from deepspeed._compat import named_parameters
from deepspeed.checkpoint.constants import CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE


@dataclasses.dataclass(frozen=True)
class RunRanks:
    """This rank's position on the axes of the mesh, and their sizes.

    dp:      the ranks that train the same parameters; ``dp_ranks`` are their numbers among all ranks.
    mp:      the ranks that have other parts of the model, each of which writes files of its own.
    holders: the number of ranks that share one copy of parameters in slices (ZeRO stage 3).
    degrees: sizes of the pipeline and of the tensor-parallel axis under their published names.
    """

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_world_size: int = 1
    dp_ranks: tuple = (0,)
    mp_rank: int = 0
    mp_world_size: int = 1
    holders: int = 1
    degrees: dict = dataclasses.field(default_factory=lambda: {CHECKPOINT_PP_DEGREE: 1, CHECKPOINT_TP_DEGREE: 1})


@dataclasses.dataclass
class Counters:
    """The progress of a run. ``micro_steps`` is counted to the begin of the accumulation window, of which
    ``in_window`` micro-batches are done. ``sparse_names``: embeddings whose gradients travel as touched rows."""

    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    micro_steps: int = 0
    in_window: int = 0
    sparse_names: set = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class RunState:
    """One rank's part of a run.

    module:            names the parameters and buffers. At ZeRO stage 3 a parameter knows its slice.
    policy:            the row of the ZeRO stage (``_C.stage_policy``), which says what is sharded.
    config, ds_config: the ``DeepSpeedConfig``, and the dict that the user gave.
    core:              the owner of masters and optimizer states. It lists the extents of this rank
                       (``pieces``) and lends their elements. None where nothing is trained or sharded.
    stepping:          names, optimizer and loss scaler of the trained parameters; None without an optimizer.
    trained_groups:    lists of parameters, one for each group of the optimizer.
    given_groups:      hyperparameters of these groups as the configuration gave them.
    optimizer:         the object that wraps the optimizer; its ``state_dict`` is what files of torch.save hold.
    scheduler:         of learning rates, or None.
    writer:            the checkpoint engine, which writes files.
    client_state:      the values that the caller saves.
    loaded_values:     values of the run itself that the last load gave to the caller.
    memo:              a dict in which one save leaves facts for the next one of the same run.
    module_state:      ``module_state(keep_vars=, exclude_frozen_parameters=)`` gives the module's state dict.
    load_module:       ``load_module(state)`` loads such a dict, in which names may be missing.
    position:          ``position()`` gives the position in the training data, or None.
    """

    module: torch.nn.Module
    ranks: RunRanks = RunRanks()
    counters: Counters = dataclasses.field(default_factory=Counters)
    policy: Any = None
    config: Any = None
    ds_config: Optional[dict] = None
    core: Any = None
    stepping: Any = None
    trained_groups: list = dataclasses.field(default_factory=list)
    given_groups: list = dataclasses.field(default_factory=list)
    optimizer: Any = None
    scheduler: Any = None
    writer: Any = None
    device: torch.device = torch.device("cpu")
    client_state: dict = dataclasses.field(default_factory=dict)
    loaded_values: dict = dataclasses.field(default_factory=dict)
    memo: dict = dataclasses.field(default_factory=dict)
    module_state: Optional[Callable] = None
    load_module: Optional[Callable] = None
    position: Callable = lambda: None

    def __post_init__(self):
        self.module_state = self.module_state or functools.partial(module_state, self.module)
        self.load_module = self.load_module or functools.partial(self.module.load_state_dict, strict=False)

    def trained(self):
        """The trained parameters of all groups, end to end."""
        return [param for group in self.trained_groups for param in group]


@dataclasses.dataclass
class LoadedRun:
    """What a checkpoint says of a run beside weights and states. None: it says nothing, or nothing was asked.

    path, client_state: what ``load_checkpoint`` returns to the caller. own_values: those entries of the second that
    belong to the run. schedule: the state of the scheduler. dp_world_size: the data-parallel ranks that saved.
    counters: their ``micro_steps`` is what the run goes on with. strategy: what steps have put by. data: the position
    in the training data. learned_fires: for the core. rng: states of the random number generators.
    """

    path: str
    client_state: dict
    own_values: dict
    schedule: Optional[dict] = None
    dp_world_size: Optional[int] = None
    counters: Optional[Counters] = None
    strategy: Optional[dict] = None
    data: Optional[dict] = None
    learned_fires: Optional[list] = None
    rng: Optional[dict] = None


def module_state(module, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
    """The module's state dict, without parameters that are not trained when asked so."""
    state = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    if exclude_frozen_parameters:
        for name, param in named_parameters(module):
            if not param.requires_grad:
                state.pop(prefix + name, None)
    return state
