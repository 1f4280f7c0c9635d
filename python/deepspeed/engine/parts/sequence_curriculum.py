"""The curriculum over sequence length, the section ``curriculum_learning`` of the configuration."""

import inspect

from deepspeed._native import DeepSpeedConfigError
from deepspeed.data.curriculum import CurriculumScheduler
from deepspeed.data.truncation import checked_dimensions, truncated
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import log_dist
from deepspeed.pipe.module import PipelineModule

KEYWORD = "curriculum_seqlen"
_INSTEAD = (
    'let the loader cut the batches: "curriculum_learning": {"truncate": {"input_ids": 1}} has the name of each '
    "tensor, "
    "or its position in the batch, and the dimension that counts tokens"
)


@engine_parts.add("_curriculum")
class SequenceCurriculum(Part):
    """A part of the engine. The schedule gives the length of the sequences of each step; the first step is 1. The model
    cuts the sequences at the keyword ``curriculum_seqlen``, or the loader cuts the tensors that ``truncate`` names. In
    a pipeline without ``truncate`` the script cuts them, and reads the length from
    ``engine.curriculum_scheduler_legacy``.
    """

    engine_attributes = ("curriculum_scheduler_legacy",)
    curriculum_scheduler_legacy = None  # its current difficulty is the length in the step under way
    passes = False  # whether the model gets the keyword
    dimensions = None  # {name or position of a tensor: dimensions to cut}

    def __init__(self, engine):
        super().__init__(engine)
        if not engine.curriculum_enabled_legacy():
            return
        section = engine.curriculum_params_legacy()
        try:
            if section["curriculum_type"] != "seqlen":
                raise ValueError("curriculum_type is missing: set it to 'seqlen', the only type")
            self.curriculum_scheduler_legacy = CurriculumScheduler(section)
            self.dimensions = checked_dimensions(section["truncate"] or {})
        except ValueError as error:
            raise DeepSpeedConfigError(f"curriculum_learning: {error}") from error

    def start(self):
        if self.curriculum_scheduler_legacy is None:
            return
        self._look_ahead()
        model = self.engine.module
        if isinstance(model, PipelineModule):
            if not self.dimensions:
                log_dist(
                    "curriculum_learning: in a pipeline your data iterator must cut the batches to the length "
                    f"engine.curriculum_scheduler_legacy.get_current_difficulty(). Or {_INSTEAD}",
                    ranks=[0],
                )
            return
        named, any_name = _takes(model.forward)
        self.passes = named or any_name and not self.dimensions
        if self.dimensions:
            return
        if not self.passes:
            raise DeepSpeedConfigError(
                f"curriculum_learning: {type(model).__name__}.forward does not take the keyword {KEYWORD}. Add it and "
                f"cut the sequences there, or {_INSTEAD}"
            )
        if self.engine.sequence_parallel_size > 1:
            raise DeepSpeedConfigError(
                f"curriculum_learning: {self.engine.sequence_parallel_size} ranks share each sequence, so a model "
                f"cannot cut its part at {KEYWORD}, which counts from the start of the whole sequence. Instead, "
                f"{_INSTEAD}"
            )

    @property
    def cuts_loaders(self):
        """Whether loaders cut batches. In a pipeline the engine cuts them, because its data may come from elsewhere."""
        return bool(self.dimensions) and not isinstance(self.engine.module, PipelineModule)

    def _length(self):
        step = self.engine.global_steps + 1
        length = self.curriculum_scheduler_legacy.update_difficulty(step)
        if length < 1:
            raise DeepSpeedConfigError(
                f"curriculum_learning: the schedule gives sequences of {length} tokens at step {step}. Raise "
                "min_difficulty, which must be at least schedule_config.difficulty_step where there is one"
            )
        return length

    def _look_ahead(self):
        """Sets the length of the next step, unless a custom schedule still has no function."""
        scheduler = self.curriculum_scheduler_legacy
        if scheduler.get_state()["schedule_type"] != "custom" or scheduler.custom_get_difficulty is not None:
            self._length()

    def add_keywords(self, kwargs):
        if self.passes and self.engine.module.training:
            kwargs[KEYWORD] = self._length()

    def cut(self, batch):
        """Cuts a training batch to the length of the step under way."""
        if not self.dimensions or not self.engine.module.training:
            return batch
        return truncated(batch, self.dimensions, self._length())

    def after_step(self):
        if self.curriculum_scheduler_legacy is not None:
            self._look_ahead()

    def after_load(self):
        """Computes the length anew, because the step may be an earlier one now."""
        scheduler = self.curriculum_scheduler_legacy
        if scheduler is not None:
            scheduler.set_current_difficulty(scheduler.get_state()["min_difficulty"])
            self._look_ahead()


def _takes(forward):
    """Returns whether a function names the keyword, and whether it takes any keyword."""
    try:
        parameters = inspect.signature(forward).parameters
    except (TypeError, ValueError):  # written in C
        return False, True
    return KEYWORD in parameters, any(one.kind is one.VAR_KEYWORD for one in parameters.values())
