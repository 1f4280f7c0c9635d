"""An engine that nobody holds any more, though ``destroy`` was not called, lets go of its optimizer and process groups.

The native core holds the parameters, and parameters know the optimizer that holds the core (``safe_get_*`` ask them):
a circle through C++, which Python's collector cannot see. It ends where the engine does. The links are cut, not taken
off the parameters: that would need weak references to tensors, which torch 1.13 gets wrong.
"""

import weakref

from deepspeed.comm import comms_log


def unlink_when_dropped(engine):
    """From the end of ``engine`` on its parameters lead to no optimizer any more. Keeps nothing of it alive."""
    params = list(engine.module.parameters())
    links = [param._ds_link for param in params if hasattr(param, "_ds_link")]
    weaks = [param._z3_optimizer for param in params if hasattr(param, "_z3_optimizer")]
    owned = [param.__dict__ for param in params if "_dp_group" in param.__dict__]
    weakref.finalize(engine, _cut, links, weaks, owned).atexit = False
    # Parameters of stage 3 can be gathered without the engine, so they keep their groups.
    if engine.core is not None and engine.zero_optimization_stage() < 3:
        steps = engine.stepping or engine  # an optimizer that somebody holds can step, and holds it
        weakref.finalize(steps, _leave, comms_log.watched(engine.core)).atexit = False


def _cut(links, weaks, owned):
    for link in links:
        link.owner = None
    for weak in weaks:
        weak.__dict__["_optimizer"] = None
    for attributes in owned:
        attributes.pop("_dp_group", None)


def _leave(communicators):
    for communicator in communicators:
        communicator.leave()
