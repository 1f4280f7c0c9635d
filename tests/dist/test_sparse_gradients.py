"""``sparse_gradients``: of embeddings only touched rows travel, and training equals one dense plain process."""

import functools

import pytest
import torch

import deepspeed
from harness import on_ranks
from models import Parts, seeded
from plain import Plain
from refusals import refused
from runs import engine_of, take_step, together

ROWS, WIDTH, STEPS = 40, 4, 3


def forward_bags(net, tokens):
    if not len(tokens):  # this rank touches no row
        return net.out(torch.ones(1, WIDTH, dtype=net.out.weight.dtype)).sum()
    words = net.words(tokens) * net.padded(tokens) + net.again(tokens.flip(0))
    return net.out(torch.tanh(words.mean(0) + net.bag(tokens[:2][None])[0])).sum()


def bags(sparse):
    """One embedding that two modules share, one with a padding row, a bag, and one that no step touches."""
    net = Parts(
        forward_bags,
        words=torch.nn.Embedding(ROWS, WIDTH, sparse=sparse),
        again=torch.nn.Embedding(ROWS, WIDTH, sparse=sparse),
        padded=torch.nn.Embedding(ROWS, WIDTH, padding_idx=0, sparse=sparse),
        bag=torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse),
        idle=torch.nn.Embedding(ROWS, WIDTH, sparse=sparse),
        out=torch.nn.Linear(WIDTH, 1),
    )
    net.again.weight = net.words.weight
    return net


def tokens_of(step, part):
    """A few numbers, some twice, some in the padding row; nothing for every third part."""
    generator = torch.Generator().manual_seed(10 * step + part)
    return torch.randint(0, 6, (0 if part % 3 == 1 else 3,), generator=generator)


class Lazy(torch.optim.Optimizer):
    """SparseAdam for embeddings, which takes sparse gradients only, and Adam for the rest, which is last."""

    def __init__(self, params):
        *rare, weight, bias = params
        super().__init__([{"params": [weight, bias]}, {"params": rare}], {"lr": 1e-2})
        self.parts = [torch.optim.Adam([weight, bias], lr=1e-2), torch.optim.SparseAdam(rare, lr=1e-2)]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


def plain_process(name, parts):
    sparse = name == "SparseAdam"
    plain = Plain(seeded(bags, sparse), OPTIMIZERS[name], dtype=None, clip=CLIP[name], sparse=sparse)
    return plain.run(lambda model, step, part: model(tokens_of(step, part)), range(STEPS), parts)


OPTIMIZERS = {"AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1), "SparseAdam": Lazy}
CLIP = {"AdamW": 0.5, "SparseAdam": 0}  # torch does not clip sparse gradients


@pytest.mark.parametrize(
    "world, accumulate, sparse, optimizer, more, bound",
    [
        (1, 2, True, "AdamW", {}, 2e-6),
        (2, 1, True, "AdamW", {}, 2e-6),
        (3, 2, False, "AdamW", {}, 2e-6),
        (3, 1, True, "SparseAdam", {}, 2e-6),
        (1, 1, True, "SparseAdam", {}, 2e-6),
        # Sixteen bits travel, and accumulate in fp32.
        (2, 2, False, "AdamW", {"communication_data_type": "bf16"}, 2e-2),
    ],
)
@on_ranks()
def test_equals_one_dense_process(rank, world, accumulate, sparse, optimizer, more, bound):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "sparse_gradients": True,
        "gradient_clipping": CLIP[optimizer],
        **more,
    }
    model, args = bags(sparse), {}
    if optimizer == "AdamW":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    else:
        args["optimizer"] = OPTIMIZERS[optimizer](model.parameters())
    engine = deepspeed.initialize(model=model, config=config, **args)[0]
    names = {"words.weight", "again.weight", "padded.weight", "bag.weight", "idle.weight"}
    assert engine.sparse_tensor_module_names == names and engine.sparse_gradients_enabled()
    for step in range(STEPS):
        for micro in range(accumulate):
            take_step(engine, engine(tokens_of(step, world * micro + rank)))
    reference = plain_process(optimizer, world * accumulate)
    pairs = zip(engine.module.parameters(), reference.params.values(), strict=True)
    worst = together(max(float((mine.detach().float() - wanted).abs().max()) for mine, wanted in pairs))
    assert max(worst) < bound and len(set(worst)) == 1


def embedding_engine(rows, on, **more):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(rows, 8), torch.nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sparse_gradients": on,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        **more,
    }
    return engine_of(model, config)


@on_ranks(2)
def test_only_touched_rows_travel(rank, world):
    def sent(on):
        engine = embedding_engine(4000, on)
        engine.core.reset_traffic()
        take_step(engine, engine(torch.tensor([7, 3999, rank])).sum())
        return engine.core.traffic()["bytes"]

    dense, rows = map(sent, (False, True))
    assert dense > 4000 * 8 * 4 and rows < 1000


@on_ranks(2)
def test_sums_in_place_of_means(rank, world):
    """As DeepSpeed's own test of sparse gradients has it: sums are means times the number of ranks."""
    model = seeded(bags, True)
    config = {"train_micro_batch_size_per_gpu": 1, "sparse_gradients": True}
    engine = deepspeed.initialize(model=model, optimizer=Lazy(model.parameters()), config=config)[0]
    found = []
    for average in (True, False):
        engine.gradient_average = average
        engine.backward(engine(tokens_of(0, 3 * rank)))
        found.append({n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None})
        for param in engine.module.parameters():
            param.grad = None
        engine.zero_grad()
    assert len(found[0]) == 5
    for name, mean in found[0].items():
        assert torch.allclose(found[1][name], world * mean, rtol=1e-6, atol=0) and bool((mean != 0).any()), name


class NoRates(torch.optim.Optimizer):
    """Adam and SparseAdam behind groups without ``lr``, as DeepSpeed's own tests of sparse gradients have it."""

    def __init__(self, model):
        rare = [p for n, p in model.named_parameters() if not n.startswith("out")]
        super().__init__([*model.out.parameters(), *rare], {})
        self.parts = [torch.optim.Adam(model.out.parameters(), lr=1e-2), torch.optim.SparseAdam(rare, lr=1e-2)]

    step = Lazy.step


def dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor


@pytest.mark.parametrize("sparse", [True, False])
@on_ranks(2)
def test_sums_after_grads_were_dropped_and_groups_without_lr(rank, world, sparse):
    model = seeded(bags, sparse)
    config = {"train_batch_size": world, "steps_per_print": 1, "sparse_gradients": True}
    optimizer = NoRates(model) if sparse else torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    found = []
    for average, times in ((True, 1), (False, 2), (False, 1)):
        engine.gradient_average = average
        for _ in range(times):  # what is there is added to
            engine.backward(engine(tokens_of(0, 3 * rank)))
        found.append({n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None})
        for param in engine.parameters():
            param.grad = None  # and nothing else: the next backward starts from nothing
    assert len(found[0]) == 5
    for name, mean in found[0].items():
        for factor, other in zip((2 * world, world), found[1:]):
            assert torch.allclose(dense(other[name]), factor * dense(mean), rtol=1e-6, atol=0), (name, factor)
    before = [param.detach().clone() for param in model.parameters()]
    take_step(engine, engine(tokens_of(1, 3 * rank)))
    assert any((a != b).any() for a, b in zip(before, model.parameters()))
    assert engine.get_lr() == ([0.0] if sparse else [0.1])
    group = deepspeed.utils.groups._get_data_parallel_group()
    for param in model.parameters():
        mine, other = engine.all_gather_scalar(param, group)
        assert torch.equal(mine, other)


class OneTable(torch.nn.Module):
    def __init__(self, has_table):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        if has_table:
            self.table = torch.nn.Embedding(10, 3)


KINDS = [(False, False), (True, False), (True, True)]  # has a table, sparse_gradients


@on_ranks(2)
def test_names_of_sparse_embeddings_without_an_optimizer_and_after_a_load(rank, world, folder):
    """As DeepSpeed's own test of checkpoints has it, without an optimizer."""

    def engine(has_table, sparse):
        config = {"train_batch_size": world, "sparse_gradients": sparse}
        return engine_of(OneTable(has_table), config)

    for number, (has_table, sparse) in enumerate(KINDS):
        source = engine(has_table, sparse)
        assert source.sparse_tensor_module_names == ({"table.weight"} if sparse else set())
        source.save_checkpoint(folder, tag=str(number))
        for other in KINDS:
            target = engine(*other)
            own = target.sparse_tensor_module_names
            target.load_checkpoint(
                folder, tag=str(number), load_module_strict=False, load_optimizer_states=False,
                load_lr_scheduler_states=False,
            )  # fmt: skip
            wanted = source.sparse_tensor_module_names if has_table and other[0] else own
            assert target.sparse_tensor_module_names == wanted, (has_table, sparse, other)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_stages_are_refused(stage):
    config = {"train_batch_size": 1, "sparse_gradients": True, "zero_optimization": {"stage": stage}}
    refused(
        deepspeed.config.DeepSpeedConfigError,
        "sparse_gradients.*stage.*Use stage 0",
        deepspeed.initialize,
        model=torch.nn.Linear(2, 2),
        config=config,
    )


@on_ranks(2)
def test_bf16_with_fp32_masters(rank, world):
    def masters(on):
        engine = embedding_engine(60, on, bf16={"enabled": True})
        for step in range(2):
            take_step(engine, engine(torch.tensor([7, 59, step + rank])).sum())
        return [deepspeed.utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]

    for one, other in zip(masters(False), masters(True)):
        assert one.dtype == torch.float32 and torch.allclose(one, other, rtol=1e-5, atol=1e-6)
