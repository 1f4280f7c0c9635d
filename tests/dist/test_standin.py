"""The stand-in device: models that train on it are those of the CPU bit for bit, for every seed and in both modes, and
memory, streams and events do what those of CUDA do. tests/device/standin.py says how the stand-in is used."""

import copy

import pytest
import standin
import torch

from harness import run_ranks
from sampling import every_case

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")

SEEDS = 200 if every_case() else 5


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(20, 16)
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.1))
        self.norm = torch.nn.LayerNorm(32)
        self.out = torch.nn.Linear(32, 20)

    def forward(self, tokens):
        return self.out(self.norm(self.inner(self.tokens(tokens))))


def train(device, dtype, foreach):
    """Losses and parameters of some steps, with input that is copied on a stream of its own."""
    torch.manual_seed(7)
    model = Model().to(dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=foreach)
    inputs = torch.randint(0, 20, (4, 6, 5), generator=torch.Generator().manual_seed(1))
    losses = []
    for step in inputs:
        tokens = loaded(step, device)
        # torch.nn.functional.dropout draws other numbers for devices that have a kernel of their own for it
        loss = torch.nn.functional.cross_entropy(model.eval()(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert torch.stack(losses).isfinite().all()
    return torch.stack(losses).cpu(), [parameter.detach().cpu() for parameter in model.parameters()]


def loaded(step, device):
    """A batch on the device, as a loader that is ahead brings it."""
    if device == "cpu":
        return step
    side = torch.standin.Stream(torch.device(device).index)
    with side:
        tokens = step.pin_memory().to(device, non_blocking=True)
    now = torch.standin.current_stream(device)
    now.wait_stream(side)
    tokens.record_stream(now)
    return tokens


def equal_for_each_seed(rank, world, dtype, foreach):
    standin.load()
    expected = train("cpu", dtype, foreach)
    for seed in range(SEEDS):
        standin.choose(seed, lazy=seed % 2 == 1)
        with standin.no_faults():
            losses, parameters = train(f"standin:{seed % 2}", dtype, foreach)
        assert torch.equal(losses, expected[0])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(parameters, expected[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("foreach", [False, True])
def test_training_equals_the_cpu_for_every_seed(dtype, foreach):
    run_ranks(1, equal_for_each_seed, dtype, foreach, fresh=True, timeout=600)


def operations(rank, world):
    standin.load()
    with standin.no_faults():
        host = torch.arange(24.0).reshape(4, 6)
        device = host.to("standin")
        calls = {
            "views": lambda x: x.t()[1:, ::2].reshape(-1).unfold(0, 4, 2),
            "copies": lambda x: torch.cat([x, x.clone().double().float()]).contiguous(),
            "in place": lambda x: x.clone().mul_(2)[1].add_(x[0]).clamp_(max=9),
            "a size that depends on values": lambda x: torch.nonzero(x > 7),
            "a mask": lambda x: x[x > 5],
            "sorted": lambda x: torch.sort(x, descending=True)[1],
            "an output that grows": lambda x: torch.mm(x, x.t(), out=torch.empty(0, device=x.device)),
            "an index of the host": lambda x: x[torch.tensor([2, 0])],
            "assigned": lambda x: x.clone().index_put_((torch.tensor([1]).to(x.device),), x[0]),
            "a list": lambda x: torch.stack(torch._foreach_mul(list(x), 3.0)),
            "a storage that grows": lambda x: x.clone().resize_(5, 6)[:4] * 1,
            "set": lambda x: torch.empty(0, device=x.device).set_(x.untyped_storage(), 2, (3,), (4,)),
            "norm": lambda x: torch.nn.functional.layer_norm(x, (6,)),
            "attention": lambda x: torch.softmax(x @ x.t(), -1),
        }
        for name, call in calls.items():
            assert torch.equal(call(device).cpu(), call(host)), name
        torch.manual_seed(3)
        drawn = torch.randn(50)
        torch.manual_seed(3)
        assert torch.equal(torch.randn(50, device="standin").cpu(), drawn)
        state = torch.standin.get_rng_state()
        first = torch.rand(3, device="standin").cpu()
        torch.standin.set_rng_state(state)
        assert torch.equal(torch.rand(3, device="standin").cpu(), first)
        assert torch.empty(9, device="standin").isnan().all().item(), "fresh memory holds no numbers"
        with pytest.raises(RuntimeError, match="index 9 is out of|out of range"):  # found when the operation runs
            torch.nn.functional.embedding(torch.tensor([9], device="standin"), device).cpu()


def test_operations_equal_those_of_the_cpu():
    run_ranks(1, operations, fresh=True)


def streams(rank, world):
    standin.load()
    standin.choose(1, lazy=True)
    with standin.no_faults():
        values = torch.zeros(1000, device="standin")
        values.add_(1)
        assert not torch.standin.current_stream().query(), "nothing runs while nobody waits"
        start, end = (torch.standin.Event(enable_timing=True) for _ in range(2))
        start.record()
        values.add_(1)
        end.record()
        end.synchronize()
        assert start.query() and start.elapsed_time(end) >= 0
        assert values[0].item() == 2
        used = {torch.standin.Stream().stream_id for _ in range(64)}
        assert len(used) == 32, "a pool of 32"
        with torch.standin.device(1):
            assert torch.ones(1, device="standin").device.index == 1
        before = values.data_ptr()
        del values
        assert torch.empty(1000, device="standin").data_ptr() == before, "freed memory is used again at once"
        pinned = torch.empty(1000, pin_memory=True)
        assert pinned.is_pinned() and not torch.empty(3).is_pinned()
        storage = torch.ones(5000, device="standin").untyped_storage()
        used = torch.standin.memory_allocated()
        storage.resize_(0)
        assert torch.standin.memory_allocated() == used - 20_480
        torch.standin.empty_cache()
        assert torch.standin.memory_reserved() < 20_480


def test_streams_events_and_memory():
    run_ranks(1, streams, fresh=True)


def accelerator(rank, world):
    from deepspeed.accelerator import get_accelerator, set_accelerator

    set_accelerator(standin.Standin_Accelerator())
    ours = get_accelerator()
    assert ours.device_name(1) == "standin:1" and ours.device_count() == standin.DEVICES
    tensor = torch.ones(3, device=ours.current_device_name())
    assert ours.on_accelerator(tensor) and not ours.on_accelerator(tensor.cpu())
    assert ours.is_pinned(ours.pin_memory(torch.ones(3)))
    with ours.stream(ours.Stream()):
        assert ours.current_stream() != ours.default_stream()
    ours.synchronize()
    assert ours.memory_allocated() == 512 and ours.available_memory() == ours.total_memory() - 512
    ours.manual_seed_all(4)
    assert ours.initial_seed() == 4


def test_accelerator_of_deepspeed():
    run_ranks(1, accelerator, fresh=True)


def graphs(rank, world):
    standin.load()
    accelerator = standin.Standin_Accelerator()
    standin.choose(1, lazy=True)
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    model, gaps = copy.deepcopy(plain).to("standin"), []
    with standin.no_faults():
        x = torch.zeros(2, 8, device="standin", requires_grad=True)
        graph, grads = accelerator.create_graph(), [torch.zeros_like(param) for param in model.parameters()]
        assert not accelerator.is_current_stream_capturing()
        with accelerator.capture_to_graph(graph):
            assert accelerator.is_current_stream_capturing()
            y = model(x)
            for kept, grad in zip(grads, torch.autograd.grad(y.square().sum(), list(model.parameters()))):
                kept.copy_(grad)
        assert all(not kept.cpu().any() for kept in grads), "what is recorded does not run"
        for seed in (1, 2):
            new = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                x.copy_(new)
            accelerator.replay_graph(graph)
            out = plain(new)
            wanted = torch.autograd.grad(out.square().sum(), list(plain.parameters()))
            gaps += [float((a.cpu() - b).detach().abs().max()) for a, b in zip([y, *grads], [out, *wanted])]
        for call in (lambda: x.sum().item(), lambda: x.cpu()):
            with pytest.raises(RuntimeError, match="a graph is being recorded"):
                with accelerator.capture_to_graph(accelerator.create_graph()):
                    call()
        assert not accelerator.is_current_stream_capturing()
    return max(gaps)


def test_graphs_are_recorded_and_replayed():
    assert run_ranks(1, graphs, fresh=True)[0] < 1e-5
