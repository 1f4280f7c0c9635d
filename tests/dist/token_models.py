"""A small language model, batches of it with padding, and the tokens in them."""

import torch

import deepspeed
from models import seeded
from runs import settings

WORDS, WIDTH, LENGTH = 13, 8, 12


class Words(torch.nn.Module):
    """Predicts words from themselves; its loss is the mean over tokens. It cuts sequences by itself."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.out = torch.nn.Linear(WIDTH, WORDS)
        self.lengths = []  # of the sequences that it has seen

    def forward(self, input_ids, attention_mask=None, curriculum_seqlen=None):
        ids = input_ids[:, :curriculum_seqlen]
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask[:, :curriculum_seqlen]
        self.lengths.append(ids.shape[1])
        return token_loss(self.out(torch.tanh(self.embedding(ids))), ids, mask)


def token_loss(scores, labels, mask):
    each = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum()


def words():
    return seeded(Words)


def rows(step, micro, rank, count=2, length=LENGTH):
    """``(input_ids, attention_mask)`` of a micro-batch: each row has 1 to ``length`` tokens."""
    generator = torch.Generator().manual_seed(10000 * step + 100 * micro + rank)
    lengths = torch.randint(1, length + 1, (count, 1), generator=generator)
    ids = torch.randint(0, WORDS, (count, length), generator=generator)
    return ids, (torch.arange(length) < lengths).long()


def tokens_of(step, world, accumulate, cut=LENGTH, mask=True):
    """Tokens of a step of all ranks."""
    found = [rows(step, micro, rank)[1] for micro in range(accumulate) for rank in range(world)]
    return sum(int(one[:, :cut].sum() if mask else one[:, :cut].numel()) for one in found)


def word_engine(accumulate=1, stage=0, model=None, **more):
    config = settings(stage, accumulate=accumulate, **more)
    return deepspeed.initialize(model=model or words(), config=config)[0]


def train_step(engine, step, rank, mask=True, before=lambda: None):
    for micro in range(engine.gradient_accumulation_steps()):
        ids, kept = rows(step, micro, rank)
        engine.backward(engine(ids, attention_mask=kept) if mask else engine(ids))
        before()
        engine.step()
