"""NCCL called directly, for what torch's process group has no way to say: registered user buffers and many calls as one
launch. The calls are those of a native communicator (csrc/comm/transports/nccl_communicator), as engines of NCCL jobs
make them.

    from deepspeed.comm.nccl import NcclCommunicator

    comm = NcclCommunicator()                       # collective over the job's ranks, or those of a group
    grads = comm.registered_empty(1 << 20, torch.bfloat16)
    comm.all_reduce(grads)                          # on the current stream, as torch's own operations

Nothing of NCCL is loaded before the first communicator is made. The library is the one that torch has brought along,
else the file that ``DS_NCCL_LIBRARY`` names, else that of the package nvidia-nccl, else the system's.
"""

import contextlib
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.nccl_join import find, find_library, introduce, join, on_device  # noqa: F401
from deepspeed.comm.reduce_op import ReduceOp, to_name
from deepspeed.comm.timeouts import default_timeout

_NAP_S = 1e-4
_TYPES = {getattr(torch, name) for name in _native._C.nccl_types() if hasattr(torch, name)}


class NcclCommunicator:
    """The ranks of a torch process group, talking through a communicator of NCCL's own.

    Tensors lie on ``device``, are contiguous and are not touched elsewhere until the stream is done with them: every
    call starts after the work that the current stream has, and the current stream's later work waits for it. Ranks
    (``src``, ``dst``) are those of the group. All ranks make the same calls in the same order.

    Two communicators at work on one GPU at once can wait for each other's: ``wait()`` for handles of torch's own
    collectives (``async_op=True``) before calling this one.

    Errors of the caller (TypeError, ValueError) leave the communicator as it is. What NCCL reports, at once or later,
    and ranks that do not come within ``timeout`` are a RuntimeError with the communicator's name, the rank and the
    call, and abort it: streams no longer wait for it, and all further calls raise the same error.

    Args:
        group: a torch process group, of any backend; None is the whole job. Used once, to exchange NCCL's id.
        device: a ``torch.device`` or its name; None takes the accelerator's current one.
        name: for messages; None takes the ranks.
        timeout: ``timedelta`` or seconds that a rank waits for others to join, to call and to leave; None takes the
            timeout of ``deepspeed.comm``.
        library: path of a library with NCCL's interface to use instead (tests use one without a GPU); ``device``
            must then be given, and is not required to be a GPU.
    """

    def __init__(self, group=None, device=None, name=None, timeout=None, library=None):
        if library is not None and device is None:
            raise ValueError("NcclCommunicator got a library but no device: say which memory that library moves.")
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "an NcclCommunicator needs a process group to exchange NCCL's id: call deepspeed.init_distributed() "
                "first (one process alone becomes a job of one rank)."
            )
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                "this rank is not a member of the group that was given to NcclCommunicator: only members make one."
            )
        waits = default_timeout() if timeout is None else timeout
        waits = waits if isinstance(waits, timedelta) else timedelta(seconds=waits)
        if waits <= timedelta(0):
            raise ValueError(f"NcclCommunicator got timeout {timeout!r}; it must be more than 0 seconds.")
        self.name = name or ("all ranks" if group is None else f"a group of {self.size}")
        target, found, problem = find(device, library)
        id = introduce(group, self.name, self.rank, found, problem)
        self.device, self.version, self.library = target, found.version_text, found.path
        self._seconds = waits.total_seconds()
        self._grouping = False
        self._native = join(found, id, self.name, self.rank, self.size, waits, self.device)
        # Before the interpreter ends: afterwards the device may be gone.
        self._at_end = weakref.finalize(self, self._native.leave)

    def __repr__(self):
        return (
            f"NcclCommunicator({self.name!r}, rank {self.rank} of {self.size}, {self.device}, NCCL {self.version} at "
            f"{self.library})"
        )

    # ---- collectives -----------------------------------------------------------------------------------------------
    def all_reduce(self, tensor, op=ReduceOp.SUM, out=None):
        """``out`` (``tensor`` itself if None; same dtype and number of elements) becomes the reduction of all ranks'
        ``tensor``. ``op``: SUM, PRODUCT, MIN, MAX or AVG."""
        self._native.all_reduce(tensor, tensor if out is None else out, to_name(op))

    def reduce(self, tensor, dst, op=ReduceOp.SUM):
        """``tensor`` of rank ``dst`` becomes the reduction; those of the others stay."""
        self._native.reduce(tensor, dst, to_name(op))

    def broadcast(self, tensor, src):
        """``tensor`` of every rank becomes that of rank ``src``."""
        self._native.broadcast(tensor, src)

    def all_gather(self, output, tensor):
        """Row r of ``output`` (``size`` rows of ``tensor.numel()``) becomes rank r's ``tensor``, possibly that row."""
        self._native.all_gather(output, tensor)

    def reduce_scatter(self, output, tensor, op=ReduceOp.SUM):
        """``output`` becomes the reduction of row ``rank`` of all ranks' ``tensor`` (``size`` rows of
        ``output.numel()``). It may be that row."""
        self._native.reduce_scatter(output, tensor, to_name(op))

    def send(self, tensor, dst):
        """Gives ``tensor`` to rank ``dst``, which calls ``recv``. A send and a receive of the same two ranks belong
        into one ``group()``, or each waits for the other's."""
        self._native.send(tensor, dst)

    def recv(self, tensor, src):
        """``tensor`` becomes what rank ``src`` sends: as many elements of the same dtype."""
        self._native.recv(tensor, src)

    def all_to_all(self, output, tensor, output_splits=None, input_splits=None):
        """Part r of ``tensor`` goes to rank r, part r of ``output`` comes from there. The splits are elements of each
        part, one for each rank; None: equal parts. ``output`` and ``tensor`` do not overlap."""
        self._native.all_to_all(output, tensor, output_splits, input_splits)

    # ---- groups and the end of work --------------------------------------------------------------------------------
    @contextlib.contextmanager
    def group(self):
        """The calls inside become one launch when the block ends, on the stream that is current then. If the block
        raises, none of them is made. Groups nest; one thread at a time."""
        if self._grouping:
            yield
            return
        self._grouping = True
        self._native.begin_group()
        try:
            yield
        except BaseException:
            self._native.end_group(launch=False)
            raise
        finally:
            self._grouping = False
        self._native.end_group(launch=True)

    def wait(self, timeout=None):
        """Lets the host wait for the current stream, and asks NCCL for errors while it does. After ``timeout`` seconds
        (the communicator's own if None) the communicator is aborted: RuntimeError."""
        seconds = self._seconds if timeout is None else timeout
        event = _event(self.device)
        deadline = time.monotonic() + seconds
        while event is not None and not event.query():
            self._native.check()
            if time.monotonic() > deadline:
                self._native.abort(
                    f"what it had put on the stream did not end within {seconds:g} s: another rank has not come, or is "
                    f"at another call"
                )
            time.sleep(_NAP_S)
        self._native.check()

    def check(self):
        """Raises what NCCL has found out since the last call, which asks, too."""
        self._native.check()

    def abort(self, reason="its owner says so"):
        """Ends it here and now, from any thread: streams stop waiting for it, calls raise RuntimeError."""
        self._native.abort(reason)

    def close(self):
        """Takes leave of the other ranks, which do the same; again: nothing happens. Tensors of ``registered_empty``
        stay what they are. Without it the communicator goes with its last reference, not waiting for anybody."""
        self._native.close()

    # ---- user buffers ----------------------------------------------------------------------------------------------
    def registered_empty(self, numel, dtype=torch.float32):
        """A tensor of ``numel`` elements, not filled, in memory that NCCL has allocated and this communicator knows:
        collectives on it need no copies into NCCL's own buffers. Useful if every rank makes it.

        The memory lives as long as the tensor, a view or a slice of it does, with or without the communicator; giving
        it back waits for the device, so it is something to keep. RuntimeError where NCCL is older than 2.19."""
        if not isinstance(dtype, torch.dtype) or dtype not in _TYPES:
            raise TypeError(f"registered_empty got dtype {dtype!r}; NCCL knows {', '.join(sorted(map(str, _TYPES)))}.")
        if isinstance(numel, bool) or not isinstance(numel, int) or numel < 0:
            raise ValueError(f"registered_empty got numel {numel!r}; it must be a whole number, 0 or more.")
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self.device)
        width = torch.empty(0, dtype=dtype).element_size()
        with on_device(self.device):
            return self._native.allocate(bytes=numel * width, device=str(self.device)).view(dtype)

    def register(self, tensor):
        """Makes the memory of a tensor from elsewhere known to the communicator, for example one of another
        communicator's ``registered_empty``. Returns a handle with ``release()``, which waits for the device; the handle
        keeps the tensor, and going out of scope releases it."""
        with on_device(self.device):
            native = self._native.register_memory(tensor)
        return _Registration(tensor, native)


class _Registration:
    """A tensor's memory, known to a communicator until ``release()``."""

    def __init__(self, tensor, native):
        self.tensor, self._native = tensor, native

    def release(self):
        """Idempotent; waits for the device."""
        self._native.release()


def _event(device):
    """An event behind the work that the current stream has so far; None on the CPU."""
    if device.type == "cpu":
        return None
    event = get_accelerator().Event()
    event.record(get_accelerator().current_stream(device.index))
    return event
