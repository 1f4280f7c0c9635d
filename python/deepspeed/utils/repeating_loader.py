"""A loader that never ends: at the end of the data it starts over."""


class RepeatingLoader:
    """Wraps an iterable, usually a data loader, in an iterator that begins again where the wrapped one ends.

    loader: anything that can be iterated more than once. One that yields nothing ends the iteration at once.
    """

    def __init__(self, loader):
        self.loader = loader
        self.data_iter = iter(self.loader)

    def state_dict(self):
        """The position of the wrapped loader, None for one that tells none."""
        return self.loader.state_dict() if hasattr(self.loader, "state_dict") else None

    def load_state_dict(self, state):
        """Goes on from there."""
        self.loader.load_state_dict(state)
        self.data_iter = iter(self.loader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
