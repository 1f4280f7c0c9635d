"""Names of the schedules and their parameters, and a schedule given on a script's command line.

``add_tuning_arguments`` adds one argument per parameter; ``get_config_from_args`` turns the parsed result into the
``scheduler`` section of a configuration.
"""

import inspect

from deepspeed.optim.lr_parameters import WARMUP_LINEAR_RATE, WARMUP_LOG_RATE
from deepspeed.optim.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
_CLASSES = dict(zip(VALID_LR_SCHEDULES, (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)))


def _flag(text):
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise ValueError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def _kind(parameter):
    """The function that reads a text of the command line: the type of the default; without one, a type by the name."""
    if isinstance(parameter.default, bool):
        return _flag
    if parameter.default in (parameter.empty, None):
        return float if parameter.name.endswith("_lr") else int
    return type(parameter.default)


# schedule -> parameter -> function that reads a text. The names are constants, too: WARMUP_MIN_LR = "warmup_min_lr".
_PARAMETERS = {
    schedule: {
        name: _kind(parameter)
        for name, parameter in inspect.signature(cls).parameters.items()
        if name not in ("optimizer", "last_batch_iteration", "unit", "warmup_unit")
    }
    for schedule, cls in _CLASSES.items()
}
globals().update({name.upper(): name for parameters in _PARAMETERS.values() for name in parameters})
# Defaults where the classes have none or another one, so that a script with only --lr_schedule OneCycle runs.
_COMMAND_LINE_DEFAULTS = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "warmup_max_lr": 0.001, "total_num_steps": None}


def add_tuning_arguments(parser):
    """Adds ``--lr_schedule`` and one argument per schedule parameter to an argparse parser; returns the parser.

    Parameters that are not given have the default of the schedule's class.
    """
    group = parser.add_argument_group("Convergence tuning", "learning-rate schedule and its parameters")
    group.add_argument("--" + LR_SCHEDULE, type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    users = {}
    for schedule, parameters in _PARAMETERS.items():
        for name, kind in parameters.items():
            users.setdefault(name, (kind, []))[1].append(schedule)
    for name, (kind, schedules) in users.items():
        extra = {"nargs": "?", "const": True} if kind is _flag else {}
        if name == "warmup_type":
            extra["choices"] = [WARMUP_LOG_RATE, WARMUP_LINEAR_RATE]
        group.add_argument(
            "--" + name,
            type=kind,
            default=_COMMAND_LINE_DEFAULTS.get(
                name, inspect.signature(_CLASSES[schedules[0]]).parameters[name].default
            ),
            help=f"parameter of {', '.join(schedules)}",
            **extra,
        )
    return parser


def get_config_from_args(args):
    """``({"type": ..., "params": {...}}, None)`` from parsed arguments, or ``(None, reason)``."""
    schedule = getattr(args, LR_SCHEDULE, None)
    if schedule is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if schedule not in VALID_LR_SCHEDULES:
        return None, f"{schedule} is not a known LR schedule; use one of {', '.join(VALID_LR_SCHEDULES)}"
    given = {name: getattr(args, name, None) for name in _PARAMETERS[schedule]}
    params = {name: value for name, value in given.items() if value is not None}
    return {"type": schedule, "params": params}, None


def get_lr_from_config(config):
    """``(rate, "")``: the rate that stands for a ``scheduler`` section, the largest of a cycle or warm-up and the
    smallest of a range test; or ``(None, reason)``."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    schedule, params = config["type"], config["params"]
    if schedule not in VALID_LR_SCHEDULES:
        return None, f"{schedule} is not a known LR schedule; use one of {', '.join(VALID_LR_SCHEDULES)}"
    key = {LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}.get(schedule, "warmup_max_lr")
    return (params[key], "") if key in params else (None, f"{key} of {schedule} not defined in config")
