"""The position of a stage: three numbers in memory that other processes of the host can read, see
csrc/comm/boards/position_page.h."""

INSTRUCTION, MICRO_BATCH, LAYER = range(3)


class Position:
    """``words``: numbers from 1 on of the instruction, the micro-batch and the layer; 0: none."""

    def __init__(self):
        self.words = [0, 0, 0]

    def share(self, page):
        """Into the native ``PositionPage``."""
        self.words = memoryview(page)

    def __reduce__(self):  # a copy of a module is somewhere else
        return Position, ()
