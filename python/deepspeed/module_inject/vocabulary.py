"""The layer that gives the words of a model, and the embeddings that read them."""

import dataclasses

from torch import nn

from deepspeed.config.errors import config_error
from deepspeed.module_inject.block_twin import features, is_linear

KEY = "tensor_parallel.vocab_parallel_lm_head"
_HEADS = ("lm_head", "embed_out")  # the published names of heads


@dataclasses.dataclass
class Vocabulary:
    """``head``: the name of the layer that gives the words; ``embeddings``: names of embeddings that are cut with it;
    ``words``: how many there are; ``overwrite``: backward of the loss writes the gradient over the logits."""

    head: str
    embeddings: list
    words: int
    overwrite: bool = False

    @property
    def layers(self):
        return [self.head, *self.embeddings]


def head_of(model, blocks):
    """The name of the linear layer that gives the words, outside of ``blocks``; None without."""
    get = getattr(model, "get_output_embeddings", None)
    made = get() if get is not None else None
    inside = tuple(f"{name}." for name in blocks if name)
    for name, module in model.named_modules():
        named = module is made if made is not None else name.rpartition(".")[2] in _HEADS
        if named and is_linear(module) and "" not in blocks and not name.startswith(inside):
            return name
    return None


def vocabulary_of(model, blocks, ranks, settings):
    """The ``Vocabulary`` that the section ``tensor_parallel`` wants cut over this many ranks; None: none. ValueError
    where the model has none that can be cut."""
    backend = getattr(settings, "vocab_parallel_ce_backend", "torch")
    if not getattr(settings, "vocab_parallel_lm_head", None):
        if backend != "torch":
            raise config_error(
                f"tensor_parallel.vocab_parallel_ce_backend is {backend}, and the vocabulary is not cut: set {KEY} to "
                "true, or leave the backend out",
                ["tensor_parallel.vocab_parallel_ce_backend"],
            )
        return None
    head = head_of(model, blocks)
    if head is None:
        raise config_error(
            f"{KEY} is true, and no linear layer of {type(model).__name__} outside of its blocks is known to give the "
            "words: give the model a method get_output_embeddings() that returns it, or leave the key out",
            [KEY],
        )
    weight, words = model.get_submodule(head).weight, features(model.get_submodule(head))[1]
    if words < ranks:
        raise config_error(f"{KEY} is true, and {words} words are too few for {ranks} ranks: leave it out", [KEY])
    embeddings, read = [], getattr(model, "get_input_embeddings", lambda: None)()
    for name, module in model.named_modules(remove_duplicate=False):
        tied = name != head and any(param is weight for param in module._parameters.values())
        if tied and not isinstance(module, nn.Embedding):
            raise config_error(
                f"{KEY} is true, and '{name}' ({type(module).__name__}) has the weight of '{head}' and is not a "
                "torch.nn.Embedding: leave the key out",
                [KEY],
            )
        if tied or module is read and isinstance(module, nn.Embedding) and module.num_embeddings == words:
            embeddings.append(name)
    return Vocabulary(head, embeddings, words, backend == "liger")
