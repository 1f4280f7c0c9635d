"""Import path of existing scripts."""

from deepspeed.data.indexed import (  # noqa: F401
    MMapIndexedDatasetBuilder,
    code,
    data_file_path,
    dtypes,
    find_fit_int_dtype,
    index_file_path,
)
from deepspeed.published.indexed_dataset import MMapIndexedDataset  # noqa: F401
