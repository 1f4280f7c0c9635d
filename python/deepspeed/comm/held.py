"""Native communicators and the native objects that use them, for as long as those exist."""

import weakref

_held = weakref.WeakKeyDictionary()  # native engine, gatherer or exchange -> its communicators


def hold(owner, communicators):
    """Notes that ``owner``, a native object, uses the native ``communicators``; None among them is left out."""
    _held[owner] = [communicator for communicator in communicators if communicator is not None]


def held_by(owner):
    """The communicators of ``owner``."""
    return list(_held.get(owner, ()))


def leave_all():
    """Lets every communicator release its process group, because the process ends."""
    for communicator in [one for communicators in _held.values() for one in communicators]:
        communicator.leave()
