"""The difficulty of each step of a curriculum."""

import math

from deepspeed.log import warning_once

SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")
_SETTINGS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class CurriculumScheduler:
    """The maximum difficulty of each step, which grows from ``min_difficulty`` to ``max_difficulty``.

    config: a mapping with the keys of a curriculum: ``min_difficulty``, ``max_difficulty``, ``schedule_type`` and
    ``schedule_config``. The types are

    - ``fixed_linear``, ``fixed_root``: (step / total_curriculum_step) ^ (1 / root_degree) of the way from minimum to
      maximum (linear: degree 1), rounded down to a whole number and to a multiple of ``difficulty_step``, but not below
      the minimum, and at most the maximum.
    - ``fixed_discrete``: ``difficulty[i]`` up to and including step ``max_step[i]``, the last one from then on. The
      list is taken as it is; a warning says which of its difficulties are above the maximum, and which come after it.
    - ``custom``: the value of the function of ``set_custom_get_difficulty``.

    ``get_state`` returns ``state``: the settings and ``current_difficulty``, as plain values.
    Wrong settings raise ValueError with the name of the key.
    """

    def __init__(self, config):
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if config.get(key) is None:
                raise ValueError(f"a curriculum needs {key!r}, and the configuration has no such key.")
        low, high, kind = config["min_difficulty"], config["max_difficulty"], config["schedule_type"]
        if low > high:
            raise ValueError(
                f"min_difficulty {low} is above max_difficulty {high}, and a curriculum goes from easy to hard. "
                "Make max_difficulty at least min_difficulty."
            )
        if kind not in SCHEDULES:
            raise ValueError(f"schedule_type {kind!r} is not one of {', '.join(SCHEDULES)}.")
        self.state = {
            "min_difficulty": low,
            "max_difficulty": high,
            "current_difficulty": low,
            "schedule_type": kind,
            "schedule_config": _checked_settings(kind, config.get("schedule_config") or {}, high),
        }
        self.custom_get_difficulty = None

    def get_current_difficulty(self):
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty):
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function):
        """For ``schedule_type`` "custom": ``schedule_function(global_steps)`` returns the difficulty of a step."""
        self.custom_get_difficulty = schedule_function

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state

    def get_difficulty(self, global_steps):
        """The difficulty that the schedule gives a step. It does not change ``current_difficulty``."""
        kind, settings = self.state["schedule_type"], self.state["schedule_config"]
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise RuntimeError(
                    "schedule_type is 'custom', and no function gives the difficulty: call "
                    "engine.set_custom_curriculum_learning_schedule, or the scheduler's set_custom_get_difficulty."
                )
            return self.custom_get_difficulty(global_steps)
        if kind == "fixed_discrete":
            for difficulty, last in zip(settings["difficulty"], settings["max_step"]):
                if global_steps <= last:
                    return difficulty
            return settings["difficulty"][-1]
        low, high = self.state["min_difficulty"], self.state["max_difficulty"]
        degree = settings["root_degree"] if kind == "fixed_root" else 1
        share = (float(global_steps) / settings["total_curriculum_step"]) ** (1.0 / degree)
        difficulty = math.floor(share * (high - low) + low)
        return min(max(difficulty - difficulty % settings["difficulty_step"], low), high)

    def update_difficulty(self, global_steps):
        """Sets the current difficulty to that of a step, and returns it. Once it has reached the maximum, it stays."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]


def _checked_settings(kind, given, high):
    """The settings of one type of schedule as plain values. ValueError if they give no difficulty."""
    settings = {}
    for key in _SETTINGS[kind]:
        value = given.get(key)
        if value is None:
            raise ValueError(f"schedule_config.{key} is missing: schedule_type {kind!r} needs it.")
        settings[key] = list(value) if isinstance(value, (list, tuple)) else value
    for key in ("total_curriculum_step", "difficulty_step", "root_degree"):
        if key in settings and settings[key] <= 0:
            raise ValueError(f"schedule_config.{key} is {settings[key]}: it must be above 0.")
    if "difficulty_step" in settings and settings["difficulty_step"] > high:
        raise ValueError(
            f"schedule_config.difficulty_step {settings['difficulty_step']} is above max_difficulty {high}: no "
            "multiple of it is a difficulty. Make it smaller."
        )
    if kind == "fixed_discrete":
        levels, steps = settings["difficulty"], settings["max_step"]
        if len(levels) != len(steps) + 1:
            raise ValueError(
                f"schedule_config.max_step has {len(steps)} items, and schedule_config.difficulty has {len(levels)}: "
                "max_step must have one item less, because the last difficulty has no end."
            )
        if steps != sorted(steps):
            raise ValueError(
                f"schedule_config.max_step {steps} does not rise: each item is the last step of its difficulty."
            )
        _warn_of_maximum(levels, high)
    return settings


def _warn_of_maximum(levels, high):
    """The published arithmetic takes the difficulties of a list as they are, and stops at the first that reaches the
    maximum."""
    reached = next((i for i, level in enumerate(levels) if level >= high), len(levels))
    above, after = levels[reached : reached + 1], levels[reached + 1 :]
    if above and above[0] > high:
        warning_once(
            f"schedule_config.difficulty {levels} has {above[0]}, which is above max_difficulty {high}: steps do take "
            f"this difficulty. If that is intended, set max_difficulty to {above[0]}."
        )
    if after:
        warning_once(
            f"schedule_config.difficulty {levels} reaches max_difficulty {high} with {above[0]}, and a maximum that is "
            f"reached is kept: the difficulties {after} after it are never used. Raise max_difficulty to use them."
        )
