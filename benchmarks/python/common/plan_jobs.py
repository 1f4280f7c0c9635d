"""The jobs that ``plan_accuracy.py`` plans and runs."""

import contextlib

TOKENS, ROWS = 128, 2
TOKENS_ON_A_GPU, ROWS_ON_A_GPU = 1024, 16
SIZES = {
    "1m": {"layers": 2, "heads": 2, "width": 128},
    "10m": {},
    "30m": {"layers": 8, "heads": 8, "width": 512},
    "100m": {"layers": 12, "heads": 12, "width": 768, "vocab_size": 16384},
}
# Size, ranks, stage, dtype, micro-batches of a step, and features (``Job``).
CONFIGURATIONS = [tuple(line.split()) for line in """
1m 1 0 fp32 1
1m 1 0 bf16 2
1m 1 2 fp32 1 host
1m 1 3 bf16 1 params
10m 1 0 fp32 2 recomputed
10m 1 1 bf16 1
10m 1 3 bf16 2 recomputed
30m 1 2 fp32 2 host
30m 1 2 bf16 1 nvme
100m 1 1 bf16 1
1m 2 0 fp32 2
1m 2 1 bf16 1 host
1m 2 2 bf16 2
1m 2 3 fp32 1
1m 2 1 fp32 1 experts
1m 2 2 bf16 2 experts
10m 2 0 bf16 1
10m 2 1 fp32 2
10m 2 2 fp32 1 recomputed
10m 2 2 bf16 2 host
10m 2 3 bf16 1
10m 2 3 fp32 2 host
10m 2 3 bf16 1 params
10m 2 1 bf16 1 experts
10m 2 2 fp32 1 experts all
10m 2 3 bf16 1 experts all
10m 2 1 fp32 1 ulysses
10m 2 2 bf16 1 ring
30m 2 2 bf16 1
30m 2 3 fp32 1 recomputed
30m 2 1 bf16 2 partly
30m 2 3 bf16 2 nvme
100m 2 2 bf16 1 recomputed
100m 2 3 bf16 1
1m 4 1 fp32 2
1m 4 3 bf16 1 experts
10m 4 2 bf16 1
10m 4 3 fp32 1 mics
10m 4 0 bf16 1 experts
10m 4 1 fp32 1 ulysses
""".strip().splitlines()]  # fmt: skip
CONFIGURATIONS_ON_A_GPU = [tuple(f"100m 1 {line}".split()) for line in """
0 bf16 1
0 fp32 2
1 bf16 2
2 bf16 1
3 bf16 1
2 fp32 1 host
2 bf16 1 nvme
3 bf16 1 params
0 bf16 2 recomputed
3 bf16 2 recomputed
""".strip().splitlines()]  # fmt: skip
SECTIONS = {
    "host": {"offload_optimizer": {"device": "cpu"}},
    "partly": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "nvme": {"offload_optimizer": {"device": "nvme"}},
    "params": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "mics": {"mics_shard_size": 2},
}
# Variants of these jobs, with shares of the memory that they need, and of the micro-batch that they have here.
ADVISED = ["10m 1 0 bf16 1", "10m 1 1 fp32 1", "30m 1 0 bf16 1", "10m 2 0 fp32 1", "10m 2 0 bf16 1", "10m 2 1 bf16 1",
           "10m 2 2 bf16 1", "30m 2 0 bf16 1", "30m 2 1 fp32 1", "30m 2 1 bf16 1"]  # fmt: skip
SHARES, ADVISED_ROWS = (0.9, 0.75, 0.6), 8


class Job:
    """A configuration in words: ``host``, ``partly``, ``nvme`` (optimizer states) and ``params`` are places,
    ``recomputed`` activations, ``experts`` (with ``all``: none of their tokens is dropped), ``ulysses`` and ``ring``
    sequences that ranks share, ``mics``."""

    def __init__(self, words, rows=ROWS, tokens=TOKENS):
        self.name, self.rows, self.tokens = " ".join(words), rows, tokens
        self.ran, self.times = {}, {}  # runs of its changes, times of its operators
        size, world, stage, self.dtype, steps, *self.features = words
        self.shape, self.world, self.stage, self.steps = SIZES[size], int(world), int(stage), int(steps)
        self.parts = next((one for one in ("ulysses", "ring") if one in self.features), None)

    def config(self, folder):
        zero = {"stage": self.stage}
        for feature in self.features:
            zero.update(SECTIONS.get(feature, {}))
        if "nvme" in self.features:
            zero["offload_optimizer"] = {**zero["offload_optimizer"], "nvme_path": folder}
        config = {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.steps,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": zero,
            "bf16": {"enabled": self.dtype == "bf16"},
            "steps_per_print": None,
        }
        if self.parts:
            config["sequence_parallel"] = {"size": self.world, **({"method": "ring"} if self.parts == "ring" else {})}
        return config

    def model(self, recomputed=False):
        import torch

        from model import GPT, Shape

        torch.manual_seed(0)
        shape = Shape(context=self.tokens, **self.shape)
        if self.parts:
            import toy_transformers

            return toy_transformers.ToyForCausalLM(
                heads=shape.heads, kv=shape.heads, hidden=shape.width, layers=shape.layers,
                intermediate=4 * shape.width, vocabulary=shape.vocab_size,
            )  # fmt: skip
        made = GPT(shape)
        if "experts" in self.features:
            for block in made.blocks:
                block.up, block.down = self._experts(shape.width), torch.nn.Linear(shape.width, shape.width)
        if recomputed or "recomputed" in self.features:
            for block in made.blocks:
                block.forward = _Recomputed(block.forward)
        return made

    def _experts(self, width):
        import torch

        from deepspeed.moe.layer import MoE

        class Experts(MoE):
            def forward(self, x):
                return super().forward(x)[0]

        wide = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )
        return Experts(width, wide, 4, self.world, k=2, drop_tokens="all" not in self.features)

    def inputs(self, device, rows=None):
        import torch

        ids = torch.zeros(rows or self.rows, self.tokens, dtype=torch.int64, device=device)
        return {"input_ids": ids, "labels": ids} if self.parts else (ids, ids)

    def around(self):
        import toy_transformers

        return toy_transformers.installed() if self.parts else contextlib.nullcontext()


class _Recomputed:
    """A forward whose activations are computed again in the backward."""

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, x):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.forward, x, use_reentrant=False)


def chosen(part, device):
    """``(job, more arguments)`` of a part of the benchmark."""
    if part == "advice":
        jobs = [Job(one.split(), ADVISED_ROWS) for one in ADVISED]
        return [(job, {"share": share}) for job in jobs for share in SHARES]
    if device == "cuda":
        return [(Job(words, ROWS_ON_A_GPU, TOKENS_ON_A_GPU), {}) for words in CONFIGURATIONS_ON_A_GPU]
    return [(Job(words), {}) for words in CONFIGURATIONS]
