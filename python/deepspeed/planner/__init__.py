"""Forecasts of memory, traffic and time: one planner, which runs the real engine on tensors without memory.

``deepspeed.plan`` and the program ``ds_plan`` are its front; ``engine.plan()`` and the tuner ask it, too.
"""

from deepspeed.registry import lazy_package

_WHERE = {
    "plan": "deepspeed.planner.plans",
    "Plan": "deepspeed.planner.plans",
    "PlanError": "deepspeed.planner.child",
    "Machine": "deepspeed.planner.machine",
}
__getattr__, __dir__ = lazy_package(__name__, _WHERE)
