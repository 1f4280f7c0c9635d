"""Faults in the order of operations, planted on the stand-in device: each is found for every seed, and the same code
without the fault raises no alarm. tests/device/standin.py says how the stand-in is used."""

import pytest
import standin
import torch

from harness import run_ranks
from sampling import every_case

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")

SEEDS = range(1, 21)
SIZE = 3000


def wait_left_out(fault):
    side = torch.standin.Stream()
    values = torch.ones(SIZE, device="standin") * 2
    if not fault:
        side.wait_stream(torch.standin.current_stream())
    with side:
        total = values.sum()
    torch.standin.current_stream().wait_stream(side)
    assert fault or total.item() == 2 * SIZE


def event_recorded_too_early(fault):
    side, ready = torch.standin.Stream(), torch.standin.Event()
    values = torch.zeros(SIZE, device="standin")
    if fault:
        ready.record()
    values.add_(1)
    if not fault:
        ready.record()
    side.wait_event(ready)
    with side:
        total = values.sum()
    torch.standin.current_stream().wait_stream(side)
    assert fault or total.item() == SIZE


def host_read_too_early(fault):
    values, host = torch.ones(SIZE, device="standin"), torch.empty(SIZE, pin_memory=True)
    host.copy_(values, non_blocking=True)
    if not fault:
        torch.standin.current_stream().synchronize()
    total = host.sum()
    assert fault or total == SIZE


def pinned_buffer_written_too_early(fault):
    host, values = torch.ones(SIZE).pin_memory(), torch.empty(SIZE, device="standin")
    values.copy_(host, non_blocking=True)
    copied = torch.standin.Event()
    copied.record()
    assert host.sum() == SIZE  # a copy that reads leaves the buffer open to reads
    if not fault:
        copied.synchronize()
    host.fill_(3)
    assert fault or values.sum().item() == SIZE


def record_stream_lost(fault):
    side = torch.standin.Stream()
    values = torch.ones(SIZE, device="standin")
    side.wait_stream(torch.standin.current_stream())
    with side:
        total = values.sum()
    if not fault:
        values.record_stream(side)
    del values
    other = torch.zeros(SIZE, device="standin")  # takes the memory of `values` where nothing holds it back
    torch.standin.current_stream().wait_stream(side)
    assert fault or (total.item() == SIZE and other.sum().item() == 0)


def view_of_a_row_without_wait(fault):
    rows, side = torch.zeros(4, SIZE, device="standin"), torch.standin.Stream()
    side.wait_stream(torch.standin.current_stream())
    with side:
        rows[1].fill_(2)
    rows[1 if fault else 2].fill_(3)  # another row is not a fault
    torch.standin.current_stream().wait_stream(side)


def two_devices_without_wait(fault):
    first = torch.ones(SIZE, device="standin:0")
    copied = first.to("standin:1", non_blocking=True)
    side = torch.standin.Stream(1)
    if not fault:
        side.wait_stream(torch.standin.current_stream(1))
    with side:
        total = copied.sum()
    torch.standin.current_stream(1).wait_stream(side)
    assert fault or total.item() == SIZE


def kernel_without_wait(fault):
    values, side = torch.zeros(SIZE, device="standin"), torch.standin.Stream()
    standin.launch(lambda: standin.fill(values, 5.0), "fill")
    if not fault:
        side.wait_stream(torch.standin.current_stream())
    with side:
        total = values.sum()
    torch.standin.current_stream().wait_stream(side)
    assert fault or total.item() == 5 * SIZE


PLANTED = [
    wait_left_out,
    event_recorded_too_early,
    host_read_too_early,
    pinned_buffer_written_too_early,
    record_stream_lost,
    view_of_a_row_without_wait,
    two_devices_without_wait,
    kernel_without_wait,
]


def run_each_seed(rank, world, name, seeds):
    """The faults that are found for each seed: with the planted one, and without it, in both modes."""
    body = next(function for function in PLANTED if function.__name__ == name)
    found = []
    for seed in seeds:
        for lazy in (False, True):
            standin.choose(seed, lazy)
            texts = []
            for fault in (True, False):
                standin.faults(clear=True)
                body(fault)
                for device in range(standin.DEVICES):
                    torch.standin.synchronize(device)
                texts.append(standin.faults(clear=True))
            found.append(texts)
    return found


def load_and_run(rank, world, name, seeds):
    standin.load()
    return run_each_seed(rank, world, name, seeds)


@pytest.mark.parametrize("name", [function.__name__ for function in PLANTED])
def test_planted_fault_is_found_for_every_seed_and_nothing_else(name):
    (found,) = run_ranks(
        1,
        load_and_run,
        name,
        list(range(1, 201) if every_case() else SEEDS),
        fresh=True,
        timeout=1200 if every_case() else 180,
        env={"DS_STANDIN_STACKS": "python"},
    )
    for planted, clean in found:
        assert planted, "the fault is not found"
        assert clean == []
        assert planted[0].count(f"in {name}") >= 2, f"both stacks name the test: {planted[0]}"


def wrong_devices(rank, world):
    standin.load()
    first, second = torch.ones(3, device="standin:0"), torch.ones(3, device="standin:1")
    for call in (
        lambda: first + second,
        lambda: first + torch.ones(3),
        lambda: torch.addmm(first, second[:, None], first[None]),
        lambda: torch.add(first, first, out=torch.empty(3)),
        lambda: first.normal_(generator=torch.Generator()),
    ):
        with pytest.raises(RuntimeError, match="device|generator|output"):
            call()
    with pytest.raises(RuntimeError, match="while standin:1 is the current device"):
        stream = torch.standin.current_stream(0)
        with torch.standin.device(1):
            standin.launch(lambda: None, "kernel", stream)
    standin.faults(clear=True)
    standin.launch(lambda: standin.fill(second, 1.0), "fill")
    torch.standin.synchronize()
    assert any(
        "kernel fill on standin:0 touches memory of another device" in text for text in standin.faults(clear=True)
    )


def test_tensor_of_another_device_is_an_error():
    run_ranks(1, wrong_devices, fresh=True)


def limits(rank, world):
    standin.load()
    standin.limit(1 << 20)
    side = torch.standin.Stream()
    for seed in SEEDS:
        standin.choose(seed, lazy=seed % 2 == 0)
        with standin.no_faults():
            kept = torch.ones(100_000, device="standin")
            with pytest.raises(torch.OutOfMemoryError, match="800000 bytes are asked for.*limit is 1048576"):
                torch.ones(200_000, device="standin")
            assert torch.standin.memory_allocated() == 400_384  # multiples of 512
            side.wait_stream(torch.standin.current_stream())
            with side:
                other = torch.ones(150_000, device="standin")
            kept.record_stream(side)
            del kept  # its memory is free when the work of `side` has ended, which a full device waits for
            kept = torch.ones(100_000, device="standin")
            del other, kept
        assert torch.standin.memory_allocated() == 0


def test_memory_limit_is_an_error_and_nothing_stays():
    run_ranks(1, limits, fresh=True)


def touch(rank, world):
    standin.load()
    standin.fill(torch.ones(3, device="standin"), 1.0)


def test_host_access_to_memory_of_a_device_ends_the_process_with_a_stack():
    with pytest.raises(RuntimeError) as caught:
        run_ranks(1, touch, fresh=True)
    text = f"{caught.value} {caught.value.__cause__}"
    assert "SIGSEGV" in text and "in fill" in text
