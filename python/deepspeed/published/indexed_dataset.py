"""The published indexed data set."""

from deepspeed.data.indexed import IndexedDataset


class MMapIndexedDataset(IndexedDataset):
    """Documents that are read where they lie.

    The base class tells of them. ``skip_warmup``: accepted for older scripts; files are mapped and never read ahead.
    """

    def __init__(self, path, skip_warmup=False):
        super().__init__(path)
