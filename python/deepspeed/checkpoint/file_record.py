"""What is known of a written file: its size and checksum, and those of every tensor in it."""

from dataclasses import asdict, dataclass, field


@dataclass
class TensorRecord:
    """A tensor in a file: ``bytes`` of them at ``offset`` from the start of the file, with their CRC-32.

    ``dtype`` is a name of torch (``float32``); tensors that share memory share the bytes. The bytes are the elements
    in the order of the tensor's memory (``write_torch``) or in row-major order (``write_safetensors``).
    """

    name: str
    dtype: str
    shape: list
    offset: int
    bytes: int
    crc32: int

    def to_dict(self):
        return asdict(self)

    @classmethod
    def from_dict(cls, values):
        return cls(**{**values, "shape": list(values["shape"])})


@dataclass
class FileRecord:
    """A file: its name without the folder, its size, the CRC-32 of all of it, its tensors."""

    name: str
    bytes: int
    crc32: int
    tensors: list = field(default_factory=list)

    def to_dict(self):
        """Plain dicts, lists, texts and numbers, as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values):
        return cls(**{**values, "tensors": [TensorRecord.from_dict(tensor) for tensor in values.get("tensors", ())]})
