"""DeepNVMe: the published handle, its functions, page-locked memory, and what goes wrong."""

import errno
import os
import pathlib
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder, PinMemoryBuilder
from deepspeed.utils.pin_memory import NativePinnedMemory, get_active_native_pinned_memory
from deepspeed.utils.pin_memory_tracker import _fmt_bytes, _tracker, pinned_memory_summary, track_pinned_memory
from places import ROOT
from processes import run_after_torch, succeeded
from refusals import refused
from threads import started

SIZES = [0, 1, 511, 4096, 4097, 1_000_003]
HERE = get_accelerator().current_device_name()  # buffers of the device, which pass through the host


@pytest.fixture
def op():
    return AsyncIOBuilder().load()


@pytest.fixture
def fault():
    yield _C.aio.inject
    _C.aio.inject("")


def data(size):
    return (torch.arange(size) * 7 % 251).to(torch.uint8).to(HERE)


def arrives(tensor, read, wait=None):
    """Whether ``read(buffer)`` and ``wait()`` fill a buffer with what ``tensor`` has."""
    back = torch.zeros_like(tensor, requires_grad=False)
    assert read(back) == (0 if wait else 1) and (wait is None or wait() == 1)
    return torch.equal(back, tensor)


def test_defaults_and_getters(op):
    getters = ["block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism"]
    values = [8192, 4, True, True, 3]
    for handle, wanted in (
        (op.aio_handle(), [1 << 20, 128, False, False, 1]),
        (op.aio_handle(**dict(zip(getters, values))), values),
        (op.aio_handle(4096, 2, True, True, 2), [4096, 2, True, True, 2]),
    ):
        assert [getattr(handle, f"get_{name}")() for name in getters] == wanted and handle.get_alignment() == 4096


@pytest.mark.any_device
@pytest.mark.sample("values")
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("backend", ["io_uring", "libaio", "threads"])
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_every_method_reads_and_writes_any_size(op, monkeypatch, tmp_path_factory, folder, backend, threads):
    if backend == "io_uring" and _C.aio.backend("/tmp") != "io_uring":
        pytest.skip("this machine refuses io_uring")
    monkeypatch.setenv("DS_IO_BACKEND", backend)
    handle = op.aio_handle(65536, 8, False, True, threads)
    path = os.path.join(folder, f"ds_test_aio_{os.getpid()}")
    try:
        for size in SIZES:
            tensor = data(size)
            for write, read in (
                (lambda t: handle.write(t, path, True), lambda t: handle.read(t, path, True)),
                (lambda t: handle.sync_pwrite(t, path), lambda t: handle.sync_pread(t, path)),
                (lambda t: handle.pwrite(t, path, True, False), lambda t: handle.pread(t, path, True, False)),
            ):
                assert write(tensor) == 1 and arrives(tensor, read)
                os.unlink(path)
            for write, read in (
                (lambda t: handle.async_pwrite(t, path), lambda t: handle.async_pread(t, path)),
                (lambda t: handle.pwrite(t, path, False, True), lambda t: handle.pread(t, path, False, True)),
            ):
                assert write(tensor) == 0 and handle.wait() == 1
                assert arrives(tensor, read, handle.wait) and os.path.getsize(path) == size
                os.unlink(path)
    finally:
        if os.path.exists(path):
            os.unlink(path)


@pytest.mark.any_device
def test_arguments_by_keyword_offsets_and_descriptors(op, tmp_path):
    handle, path = op.aio_handle(intra_op_parallelism=2), tmp_path / "x"
    parts = [data(5000) + i for i in range(4)]
    with open(path, "wb") as file:
        for i, part in enumerate(parts):
            assert handle.async_pwrite(buffer=part, fd=file.fileno(), file_offset=i * 5000) == 0
        assert handle.pending() == 4 and handle.wait() == 4 and handle.wait() == 0
    assert path.read_bytes() == b"".join(part.cpu().numpy().tobytes() for part in parts)
    back = torch.zeros_like(parts[0])
    for i, part in enumerate(parts):
        for call in (
            lambda at: handle.sync_pread(buffer=back, filename=str(path), file_offset=at),
            lambda at: handle.read(buffer=back, filename=path, validate=True, file_offset=at),
            lambda at: handle.pread(buffer=back, filename=str(path), validate=True, file_offset=at, **{"async": False}),
        ):
            back.zero_()
            assert call(i * 5000) == 1 and torch.equal(back, part)
    handle.pwrite(buffer=parts[0], filename=str(path), validate=False, file_offset=7, **{"async": True})
    handle.async_pwrite(buffer=parts[1], filename=str(path), file_offset=10000)
    handle.async_pread(buffer=back, filename=str(path), file_offset=15000)
    assert handle.wait() == 3 and torch.equal(back, parts[3])
    assert path.read_bytes()[7:5007] == parts[0].cpu().numpy().tobytes()


@pytest.mark.any_device
def test_tensors_of_any_dtype_and_layout(op, tmp_path):
    handle, path = op.aio_handle(), str(tmp_path / "x")
    for tensor in (torch.randn(33, 77).t(), torch.randn(9)[::2], torch.randn(5).bfloat16(), torch.tensor(3.5),
                   torch.randn(4, 4, requires_grad=True), torch.tensor([True, False])):  # fmt: skip
        tensor = tensor.to(HERE)
        assert handle.sync_pwrite(tensor, path) == 1
        assert os.path.getsize(path) == tensor.numel() * tensor.element_size()
        assert arrives(tensor, lambda back: handle.sync_pread(back, path))
        os.unlink(path)
    for wrong in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        refused(ValueError, "dense tensor with elements", handle.sync_pwrite, wrong, path)


@pytest.mark.any_device
def test_several_threads_share_a_handle(op, tmp_path):
    handle = op.aio_handle(8192, 4, False, False, 2)

    def work(number):
        path = str(tmp_path / str(number))
        for tensor in (data(30000 + number) + i for i in range(20)):
            assert handle.sync_pwrite(tensor, path) == 1 and arrives(tensor, lambda back: handle.sync_pread(back, path))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_the_interpreter_goes_on_while_a_handle_waits(op, tmp_path):
    handle, steps = op.aio_handle(4096, 1, True), 0
    handle.async_pwrite(torch.zeros(8 << 20, dtype=torch.uint8), str(tmp_path / "x"))
    waiting = started(handle.wait)
    while not waiting.done():
        steps += 1
    assert steps > 100


# ---- errors --------------------------------------------------------------------------------------------------------
def test_errors_are_os_errors_with_path_offset_and_bytes(op, tmp_path, fault):
    handle, path = op.aio_handle(8192, 2), str(tmp_path / "x")
    error = refused(FileNotFoundError, "", handle.sync_pread, torch.zeros(4), path)
    assert error.path == path and path in str(error)
    for order, code in (("write:2:enospc", errno.ENOSPC), ("write:1:eio", errno.EIO)):
        fault(order)
        error = refused(OSError, f"write of {path} failed", handle.sync_pwrite, torch.zeros(20000), path)
        assert error.errno == code and error.path == path and error.bytes == 8192
    fault("write:4:enospc")
    handle.async_pwrite(torch.zeros(20000), path)
    handle.async_pwrite(torch.zeros(20000), path)
    refused(OSError, "", handle.wait)
    fault("")
    assert handle.wait() == 0
    handle.sync_pwrite(torch.zeros(20000), path)
    fault("read:3:eio")
    refused(OSError, f"read of {path} failed", handle.sync_pread, torch.zeros(20000), path)
    fault("")
    os.truncate(path, 50000)
    error = refused(OSError, "the file ends at byte 50000", handle.sync_pread, torch.zeros(20000), path)
    assert error.errno == errno.ENODATA
    refused(OSError, "", handle.sync_pwrite, torch.zeros(4), str(tmp_path))
    refused(OSError, "", handle.async_pwrite, torch.zeros(4), 9999)


@pytest.mark.any_device
def test_short_transfers_and_interruptions_go_on(op, tmp_path, fault):
    handle, path, tensor = op.aio_handle(8192, 2), str(tmp_path / "x"), data(100_001)
    fault("write:2:short,write:4:eintr,read:1:short,read:3:eintr")
    handle.sync_pwrite(tensor, path)
    assert arrives(tensor, lambda back: handle.sync_pread(back, path))


@pytest.mark.any_device
def test_a_file_system_without_o_direct(op, tmp_path, fault):
    fault("direct:1+:einval")
    assert _C.aio.backend(str(tmp_path)) == "threads, without O_DIRECT"
    handle, path, tensor = op.aio_handle(8192, 2, False, False, 2), str(tmp_path / "x"), data(100_001)
    handle.sync_pwrite(tensor, path)
    assert arrives(tensor, lambda back: handle.pread(back, path, True))


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"block_size": 0}, "block_size must be from 1"),
        ({"queue_depth": 0}, "queue_depth must be from 1"),
        ({"queue_depth": 10000}, "queue_depth must be from 1 to 4096"),
        ({"intra_op_parallelism": 0}, "intra_op_parallelism must be from 1"),
    ],
)
def test_bad_arguments_are_named(op, arguments, text):
    refused(ValueError, text, op.aio_handle, **arguments)


def test_bad_backend_and_offset(op, monkeypatch, tmp_path):
    refused(ValueError, "file_offset", op.aio_handle().sync_pread, torch.zeros(1), str(tmp_path / "x"), -1)
    monkeypatch.setenv("DS_IO_BACKEND", "aio")
    refused(ValueError, "DS_IO_BACKEND.*io_uring, libaio, threads or auto", op.aio_handle)


def test_functions(op, tmp_path):
    path, tensor = str(tmp_path / "x"), data(77_777)
    assert op.aio_write(tensor, path, 4096, 8, False, False, True) == 1
    assert arrives(tensor, lambda back: op.aio_read(buffer=back, filename=path, validate=True))
    copy = torch.zeros_like(tensor)
    op.deepspeed_memcpy(copy, tensor)
    assert torch.equal(copy, tensor)
    refused(ValueError, "as many bytes", op.deepspeed_memcpy, copy[1:], tensor)


@pytest.mark.any_device
def test_a_dropped_handle_ends_what_it_started(op, tmp_path):
    handle, path = op.aio_handle(4096, 1, True, False, 2), tmp_path / "x"
    handle.async_pwrite(data(3_000_000), str(path))
    del handle
    assert path.read_bytes() == data(3_000_000).cpu().numpy().tobytes()


# ---- page-locked memory --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("numel", [2**62 + 16, 2**62, 2**61 + 1024])
def test_sizes_that_no_integer_holds_are_refused(op, numel):
    handle = op.aio_handle()
    # In bytes they are small, or more than there is.
    refused((ValueError, RuntimeError), "", handle.new_cpu_locked_tensor, numel, torch.empty(0))
    words, like = "page-locked tensor: .* x 8 is more than an integer here can hold", torch.empty(0).double()
    refused(ValueError, words, handle.new_cpu_locked_tensor, numel, like)
    refused(ValueError, "file_offset", handle.sync_pread, torch.zeros(16), __file__, 2**63 - 8)


def test_one_pool_of_page_locked_memory(op):
    handle, other, pin = op.aio_handle(), op.aio_handle(), PinMemoryBuilder().load().pin_handle()
    before = _C.aio.pool.locked_bytes
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.bfloat16))
    assert (tensor.shape, tensor.dtype) == ((1000,), torch.bfloat16)
    for who in (handle, other, pin, NativePinnedMemory()):
        assert who.is_pinned(tensor) and who.is_pinned(tensor.view(10, 100)[3]) and not who.is_pinned(torch.ones(3))
    assert _C.aio.pool.locked_bytes == before + 4096
    assert not other.free_cpu_locked_tensor(torch.ones(3))
    assert pin.free_cpu_locked_tensor(tensor) and not pin.free_cpu_locked_tensor(tensor)
    assert not handle.is_pinned(tensor) and _C.aio.pool.locked_bytes == before
    tensor.fill_(1)  # its memory is there
    native = NativePinnedMemory()
    source = torch.randn(3, 5)
    pinned = native.pin(source)
    assert torch.equal(pinned, source) and other.is_pinned(pinned)
    assert native.pin(source, make_copy=False).shape == (3, 5)
    assert native.pin(source, match_shape=False).shape == (15,)
    assert native.unpin(pinned) and not native.is_pinned(pinned)
    made = pin.new_cpu_locked_tensor(3, source)
    del made, pinned
    assert _C.aio.pool.locked_bytes == before


def test_the_backend_of_the_accelerator(monkeypatch):
    assert get_active_native_pinned_memory() is None
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    assert isinstance(get_active_native_pinned_memory(), NativePinnedMemory)
    accelerator, source = get_accelerator(), torch.randn(2, 3)
    pinned = accelerator.pin_memory(source)
    assert torch.equal(pinned, source) and pinned.data_ptr() != source.data_ptr() and accelerator.is_pinned(pinned)
    accelerator.unpin_memory(pinned)
    assert not accelerator.is_pinned(pinned)
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "other")
    refused(ValueError, "DS_PIN_MEMORY_BACKEND is 'other'", accelerator.pin_memory, source)


LIMIT = """
import os, resource
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
handle = AsyncIOBuilder().load().aio_handle()
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
if os.getuid() == 0:
    os.setuid(65534)
try:
    handle.new_cpu_locked_tensor(3 << 20, torch.empty(0, dtype=torch.uint8))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_memlock_limit_is_named_with_the_bytes_missing():
    out = succeeded(run_after_torch(LIMIT)).stdout
    assert "3145728 bytes of memory cannot be page-locked" in out and "may lock 1048576 bytes (ulimit -l)" in out
    used = int(re.search(r"has locked (\d+): ", out).group(1))
    assert f"{used + 2097152} bytes are missing. Raise the limit to {used + 3145728} bytes or more" in out


def test_tracker():
    _tracker.reset()
    track_pinned_memory(1536)
    track_pinned_memory(512)
    text = pinned_memory_summary("after init")
    assert text.startswith("after init: 2 page-locked allocations, 2.00 KB in all, the largest 1.50 KB")
    assert [_fmt_bytes(n) for n in (0, 1023, 1 << 30, 5 << 40)] == ["0 B", "1023 B", "1.00 GB", "5.00 TB"]
    refused(ValueError, "0 bytes or more", track_pinned_memory, -1)
    _tracker.reset()


# ---- gds -----------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(get_accelerator()._name == "cuda", reason="a machine with GPUs may have cuFile")
def test_gds_says_why_not(monkeypatch):
    assert not GDSBuilder().is_compatible()
    refused(ValueError, "the op gds cannot be used here: needs an NVIDIA GPU", GDSBuilder().load)
    monkeypatch.setenv("DS_CUFILE_LIBRARY", "/none/libcufile.so")
    refused(RuntimeError, "GPUDirect storage cannot be used: /none/libcufile.so.*aio_handle", _C.aio.gds_handle)
    refused(ValueError, "at least|must be from", _C.aio.aio_handle, intra_op_parallelism=-1)


def test_gds_handle_over_a_library_that_is_there(monkeypatch, tmp_path):
    """The tests' own cuFile, over memory of the host (tests/cpp/io/fake_cufile)."""
    library = next(pathlib.Path(ROOT, "build").rglob("bin/libfake_cufile.so"), None)
    if library is None:
        pytest.skip("the C++ tests are not built")
    monkeypatch.setenv("DS_CUFILE_LIBRARY", str(library))
    handle, path = _C.aio.gds_handle(intra_op_parallelism=2), str(tmp_path / "x")
    tensor = handle.new_pinned_device_tensor(2_500_000, torch.empty(0, dtype=torch.uint8))
    tensor.copy_(data(2_500_000))
    assert handle.sync_pwrite(tensor, path) == 1
    back = torch.zeros(2_500_000, dtype=torch.uint8)
    assert handle.pin_device_tensor(back) and not handle.pin_device_tensor(back)
    assert handle.async_pread(back, path) == 0 and handle.wait() == 1 and torch.equal(back, tensor)
    assert handle.unpin_device_tensor(back) and not handle.unpin_device_tensor(back)
    assert handle.free_pinned_device_tensor(tensor) and not handle.free_pinned_device_tensor(tensor)
    refused(FileNotFoundError, "", handle.sync_pread, back, str(tmp_path / "none"))
