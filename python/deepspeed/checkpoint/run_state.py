"""The state of a training run as a value: all that saving reads of a run, and all that loading gives back.

``RunState`` goes in. A load writes weights, masters and optimizer states through a ``LoadTarget``, and returns the rest
as a ``LoadedRun``. ``deepspeed.engine.parts.checkpoints`` makes the first two and applies the third, so this room needs
no engine.
"""

import contextlib
import dataclasses
from typing import Any, Callable, Optional

import torch

from deepspeed.checkpoint.constants import CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE
from deepspeed.zero.parameters.param_ranks import ModuleTensors
from deepspeed.zero.states.named_states import OwnedStates


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
    ``in_window`` micro-batches are done. ``sparse_names``: embeddings whose gradients travel as touched rows.
    ``consumed_tokens``: of all ranks; None where they are not counted. ``random_ltd``: the state of the scheduler of
    random-LTD, None without one."""

    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    micro_steps: int = 0
    in_window: int = 0
    sparse_names: set = dataclasses.field(default_factory=set)
    consumed_tokens: Optional[int] = None
    random_ltd: Optional[dict] = None


@dataclasses.dataclass
class RunState:
    """One rank's part of a run.

    weights:           parameters and buffers by name (``ModuleTensors``). At ZeRO stage 3 they lend slices.
    policy:            the row of the ZeRO stage (``_C.stage_policy``), which says what is sharded.
    config, ds_config: the ``DeepSpeedConfig``, and the dict that the user gave.
    states:            leases of masters and optimizer states (``OwnedStates``); None without an optimizer.
    group_names:       names of the trained parameters, a list for each group of the optimizer.
    trained_groups:    lists of these parameters.
    options:           hyperparameters of these groups, dicts.
    given_groups:      the same as the configuration gave them.
    optimizer_values:  values of the optimizer as a whole, see ``SavedState.extra``.
    resumed:           ``learned_fires`` and ``step_strategy``: with them the same run goes on.
    scheduler:         of learning rates, or None.
    writer:            the checkpoint engine, which writes files.
    client_state:      the values that the caller saves.
    loaded_values:     values of the run itself that the last load gave to the caller.
    memo:              a dict in which one save leaves facts for the next one of the same run.

    optimizer_facts:   what files of optimizer states say of the ranks, by key.

    Four values are made late, by functions, since they may be large and since all ranks must learn of an error:
    module_state:      ``module_state(keep_vars=, exclude_frozen_parameters=)`` gives the module's state dict.
    optimizer_state:   ``optimizer_state()`` gives the optimizer's, as files of torch.save hold it; or None.
    position:          ``position()`` gives the position in the training data, or None.
    tensor_facts:      ``tensor_facts()`` gives what model files say of layers that ranks share, by key.
    """

    weights: ModuleTensors
    module_state: Callable
    ranks: RunRanks = RunRanks()
    counters: Counters = dataclasses.field(default_factory=Counters)
    policy: Any = None
    config: Any = None
    ds_config: Optional[dict] = None
    states: Optional[OwnedStates] = None
    group_names: list = dataclasses.field(default_factory=list)
    trained_groups: list = dataclasses.field(default_factory=list)
    options: list = dataclasses.field(default_factory=list)
    given_groups: list = dataclasses.field(default_factory=list)
    optimizer_values: dict = dataclasses.field(default_factory=dict)
    resumed: dict = dataclasses.field(default_factory=lambda: {"learned_fires": [], "step_strategy": {}})
    scheduler: Any = None
    writer: Any = None
    device: torch.device = torch.device("cpu")
    client_state: dict = dataclasses.field(default_factory=dict)
    loaded_values: dict = dataclasses.field(default_factory=dict)
    memo: dict = dataclasses.field(default_factory=dict)
    optimizer_state: Optional[Callable] = None
    position: Callable = lambda: None
    tensor_facts: Callable = dict
    optimizer_facts: dict = dataclasses.field(default_factory=dict)

    def trained(self):
        """``[(name, parameter)]`` of all groups, end to end."""
        return [pair for pairs in map(zip, self.group_names, self.trained_groups) for pair in pairs]

    def trained_ids(self):
        return {id(param) for group in self.trained_groups for param in group}


class LoadTarget:
    """The receiver of a load. This class serves a ``module`` with whole parameters and no optimizer."""

    def __init__(self, module):
        self.module = module

    def load_module(self, state):
        """Loads a state dict, in which names may be missing, into the module."""
        self.module.load_state_dict(state, strict=False)

    def load_by(self, custom_load_fn, state):
        """Calls ``custom_load_fn(src=state, dst=module)``; the parameters of the module are whole meanwhile."""
        custom_load_fn(src=state, dst=self.module)

    def writing(self):
        """A context in which all ranks change weights, masters and states."""
        return contextlib.nullcontext()

    def take_weights(self):
        """The weights have changed: masters follow."""

    def publish(self):
        """The masters have changed: weights follow."""

    def restoring(self, saved, options=None):
        """The ``Restore`` of a ``SavedState``, None without an optimizer."""

    def rehearse(self, schedule):
        """Raises what loading ``schedule`` into the scheduler would raise, and changes nothing."""


@dataclasses.dataclass
class LoadedRun:
    """Facts of a checkpoint about a run beside weights and states. None: it says nothing, or nothing was asked.

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
