"""The backend of ``deepspeed.comm``: one object for each process with the verbs of torch.distributed."""


class Backend:
    """Base class of backends. ``name`` appears in messages; ``initialized`` says whether the process group exists."""

    def __init__(self, name="backend", rank=0, size=1):
        self.name, self.rank, self.size = name, rank, size
        self.initialized = False

    def is_initialized(self):
        """True while the process group exists."""
        return self.initialized
