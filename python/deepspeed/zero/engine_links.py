"""Links from parameters and modules of a model to their engine."""

import weakref


class NotCopied:
    """Copied and pickled models have no engine: they have None instead of such an object."""

    def __reduce__(self):
        return (type(None), ())


class EngineLink(NotCopied):
    """A link to ``target``, which is None after it has ended. The link does not keep it: it holds the core, which holds
    the parameters. ``index``: the number by which the target knows what has the link."""

    def __init__(self, target, index=None):
        self._target, self.index = weakref.ref(target), index

    @property
    def target(self):
        return self._target()
