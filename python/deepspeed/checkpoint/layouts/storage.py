"""Reads one file of a checkpoint, with an error that names it. ``write/file_writer.py`` writes files."""

import contextlib
import contextvars
import pickle
import zipfile

import torch

from deepspeed.formats import torch_archive
from deepspeed.host.recorded_names import open_regular
from deepspeed.zero.nested import replace
from deepspeed.zero.parameters.tensor_of_pieces import TensorOfPieces


def compact(value, device="cpu"):
    """``value`` with every tensor detached, on ``device`` and in memory of its own: a view of a flat buffer would drag
    the whole buffer into the file."""

    def own(tensor):
        if type(tensor) is TensorOfPieces:
            return tensor.whole().to(device)
        return tensor.detach().to(device, copy=True)

    return replace(value, lambda item: torch.is_tensor(item) or type(item) is TensorOfPieces, own, keep=False)


_trusted = contextvars.ContextVar("trusted", default=None)


@contextlib.contextmanager
def trusting(trust):
    """Inside, ``read`` runs whatever pickles ask for (``trust``), or leaves that to the environment (None)."""
    token = _trusted.set(trust)
    try:
        yield
    finally:
        _trusted.reset(token)


# Errors that damage causes in a reader.
_DAMAGED = (
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    KeyError,
    ValueError,
    TypeError,
)


@contextlib.contextmanager
def naming(path):
    """Errors of reading ``path`` inside name it: FileNotFoundError; OSError for one that may not be read; RuntimeError
    for one that is damaged."""
    try:
        yield
    except torch_archive.RefusedClass:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the checkpoint has no file {path}: it is incomplete or was written by another kind of run; load an older "
            "tag"
        ) from error
    except (PermissionError, IsADirectoryError) as error:
        raise OSError(
            error.errno, f"cannot read the checkpoint file {path}: {error.strerror}. Check its permissions."
        ) from error
    except _DAMAGED as error:
        raise RuntimeError(
            f"the checkpoint file {path} is damaged or no checkpoint ({error}); load an older tag"
        ) from error


def read(path, lazy=False):
    """Loads ``path`` to the CPU; with ``lazy``, tensors stay in the file (``LazyTensor``).

    Tensors and plain data only: RefusedClass for anything that could run code, see ``deepspeed.formats.torch_archive``.
    """
    with naming(path):
        open_regular(path).close()
        return torch_archive.load(path, lazy, trust=_trusted.get())
