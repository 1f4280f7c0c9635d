"""An engine that nobody holds any more, though ``destroy`` was not called, lets go of its optimizer and process groups.

The native core holds the parameters it trains. What parameters know of their engine (``_ds_link``, ``ds_access``,
``_z3_optimizer``, the hooks of modules) must therefore not hold it: that would be a circle through C++, which Python's
collector cannot see. They hold it weakly; what cannot be weak is taken off them here. The parameters themselves are not
held either, nor referred to weakly, which torch 1.13 gets wrong.
"""

import weakref

from deepspeed.comm import held

_OWNED = ("_hp_mapping", "_dp_group")  # views of the core's buffers, and a group


def unlink_when_dropped(engine):
    """From the end of ``engine`` on its parameters lead to no optimizer any more. Keeps nothing of it alive."""
    owned = [param.__dict__ for param in engine.module.parameters() if "_dp_group" in param.__dict__]
    weakref.finalize(engine, _cut, owned).atexit = False
    if engine.core is not None:
        # Files of a program that ends without destroying it; the model's parameters may have some without an engine.
        weakref.finalize(engine.module, engine.core.exit_guard())
        steps = engine.stepping or engine  # an optimizer that somebody holds can step, and holds it
        weakref.finalize(steps, _leave, held.held_by(engine.core)).atexit = False


def _cut(owned):
    for attributes in owned:
        for name in _OWNED:
            attributes.pop(name, None)


def _leave(communicators):
    for communicator in communicators:
        communicator.leave()
