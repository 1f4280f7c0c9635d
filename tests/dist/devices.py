"""The device on which tests run their engines: DS_TEST_DEVICE, which is the CPU where it is not set.

`make test` runs on the CPU on machines with GPUs, too, where deepspeed would choose a GPU; `make test-gpu` sets
DS_TEST_DEVICE=cuda. More ranks than GPUs share them; NCCL refuses two ranks on one GPU, so such ranks use gloo.
"""

import contextlib
import gc
import os
import sys

import held_memory

NAME = os.environ.get("DS_TEST_DEVICE") or "cpu"


def select():
    """Makes NAME the accelerator of this process and of those that it starts, unless DS_ACCELERATOR names another."""
    os.environ.setdefault("DS_ACCELERATOR", NAME)
    add_package(NAME)


def add_package(name):
    """Makes Python find the package that brings the accelerator ``standin`` by an entry point. Unless
    DS_STANDIN_KERNELS names others or none, it has the CUDA kernels: tests run there what they run on a GPU."""
    if name == "standin":
        tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        sys.path.append(os.path.join(tests, "device", "package"))
        import standin_kernels

        os.environ.setdefault("DS_STANDIN_KERNELS", standin_kernels.library_path())


def _gpus():
    from deepspeed.host.devices import nvidia_device_count

    return nvidia_device_count()


def local_rank(rank):
    """The index of the device that a rank of this host uses, which is its LOCAL_RANK."""
    if NAME == "standin":
        return rank % 2
    return rank % max(_gpus(), 1) if NAME == "cuda" else rank


def choose_backend(world_size):
    """In a rank process: the backend that `init_distributed` takes by default."""
    if NAME == "cuda":
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        CUDA_Accelerator._communication_backend_name = "gloo" if world_size > _gpus() else "nccl"


@contextlib.contextmanager
def unordered():
    """A context for operations that a user should have put in order: on the stand-in device they are found."""
    yield
    if NAME == "standin":
        import standin

        assert standin.faults_at_end(), "the operations have an order"


@contextlib.contextmanager
def checked():
    """A context for the code of a rank. On the stand-in device it raises where operations have no order."""
    if NAME != "standin":
        yield
        return
    import standin

    standin.choose(int(os.environ.get("DS_STANDIN_SEED", "1")), os.environ.get("DS_STANDIN_MODE") == "lazy")
    with standin.no_faults():
        yield


def check_freed():
    """Raises where a test whose code has returned on this rank still holds memory of the stand-in device. A later test
    of this process would find it in its peaks."""
    if NAME != "standin":
        return
    import standin

    held = standin.allocated()
    if held:
        gc.collect()
        held = held_memory.settled(standin.allocated, 0)
    assert held == 0, f"the test has ended, and {held} bytes of the stand-in device are still allocated"
