"""Applies the sections ``sequence_parallel`` and ``sparse_attention`` of the configuration to an engine's model."""

import torch

from deepspeed._native import DeepSpeedConfigError
from deepspeed.activation_checkpointing.hidden_states import CheckpointHiddenStatesOffload
from deepspeed.comm.mesh_views import alone
from deepspeed.engine.members import engine_parts
from deepspeed.log import log_dist
from deepspeed.ops.attention.table import is_model
from deepspeed.ops.sparse_attention import sparsify
from deepspeed.pipe.module import PipelineModule
from deepspeed.sequence import hf_attention, tiling

_NOT_HF = (
    "{key} is for models of transformers, and {model} is none: put deepspeed.sequence.layer.DistributedAttention, "
    "deepspeed.sequence.ring.ring_attention or deepspeed.sequence.chunked.chunked_attention into it, and leave the key "
    "out"
)


class _LayerInputs(CheckpointHiddenStatesOffload):
    """Tensors in the shape of the hidden states that autograd saves: of a model whose layers are computed again, their
    inputs. What was marked, too."""

    shapes = frozenset()

    def see_embeddings(self, module, inputs, output):
        """A forward hook of what makes the first hidden states."""
        if torch.is_tensor(output):
            self.shapes = frozenset((output.shape,))

    def wants(self, tensor):
        return (tensor.is_floating_point() and tensor.shape in self.shapes) or super().wants(tensor)


@engine_parts.add("_long_sequences")
class LongSequences:
    """A part of the engine. Without the section it does nothing."""

    def __init__(self, engine):
        self.engine, self.section, self.inputs = engine, engine._config.sequence_parallel_config, None

    def prepare(self):
        """Once, before the model is moved: its attention shares sequences, and what was asked for works by tiles."""
        section, model = self.section, self.engine.module
        if section is not None:
            self._apply(section, model)
        sparse = self.engine._config.sparse_attention
        if sparse:  # last: what shares sequences exchanges tokens for heads around it
            self._make_sparse(model, sparse)

    def _apply(self, section, model):
        if isinstance(model, PipelineModule):
            asked = [key for key in ("chunk", "tile_mlp", "tile_loss") if section[key]]
            asked += ["offload"] * (section.offload != "none") + ["method"] * (section.method != "auto")
            if asked:
                raise DeepSpeedConfigError(
                    f"sequence_parallel.{asked[0]} cannot be used with a PipelineModule: layers of a "
                    "PipelineModule are not replaced. Use tiled or chunked layers when you build it"
                )
            return
        self._share(model)
        self._tile(model)
        if section.offload != "none":
            self._watch_inputs(model)

    def _make_sparse(self, model, section):
        if isinstance(model, PipelineModule):
            raise DeepSpeedConfigError(
                "sparse_attention cannot be used with a PipelineModule: layers of a PipelineModule are not replaced. "
                "Put SparseSelfAttention into them when you build it"
            )
        sliced = self.engine._config.tensor_parallel_config.autotp_size
        if section.get("different_layout_per_head") and sliced > 1:
            raise DeepSpeedConfigError(
                f"sparse_attention.different_layout_per_head is true, and {sliced} ranks "
                "have some heads each (tensor_parallel.autotp_size): set it to false, so that all heads have one layout"
            )
        try:
            sparsify(model, section)
        except ValueError as error:
            raise DeepSpeedConfigError(str(error)) from None

    @property
    def _offload(self):
        """As ``utils.waiting_tensors.store_of`` wants it."""
        return {"none": False, "host": True, "file": self.section.folder}[self.section.offload]

    def _share(self, model):
        section, group = self.section, self.engine.seq_parallel_group
        if self.engine.sequence_parallel_size == 1 and not section.chunk:
            return
        if not is_model(model):
            asked = [key for key in ("chunk", "method") if section[key] not in (0, "auto")]
            if asked:
                key = f"sequence_parallel.{asked[0]}"
                raise DeepSpeedConfigError(_NOT_HF.format(key=key, model=type(model).__name__))
            return
        group = alone().group if self.engine.sequence_parallel_size == 1 else group
        how = {"method": section.method, "chunk": section.chunk, "offload": self._offload}
        hf_attention.configure_model(model, group, **how)

    def _tile(self, model):
        asked = self.section.tile_mlp  # true, false or names
        mlp, loss = asked if isinstance(asked, list) else "auto" if asked else None, None
        if self.section.tile_loss:
            loss = "auto"
        if mlp is None and loss is None:
            return
        tiled = tiling.tile(model, mlp, loss)
        if mlp == "auto" and not set(tiled) - {"loss"}:
            raise DeepSpeedConfigError(
                f"sequence_parallel.tile_mlp is true, but {type(model).__name__} has no module that is called like an "
                "MLP and treats every token alone: name modules in a list, or leave the key out"
            )
        if loss and "loss" not in tiled:
            raise DeepSpeedConfigError(
                f"sequence_parallel.tile_loss is true, but {type(model).__name__} is not a causal language model of "
                "transformers with a linear head: use deepspeed.runtime.sequence_parallel.ulysses_sp."
                "TiledFusedLogitsLoss in it, and leave the key out"
            )
        log_dist(f"sequence_parallel: tile by tile go {', '.join(tiled)}", ranks=[0])

    # ---- inputs of layers --------------------------------------------------------------------------------------------
    def _watch_inputs(self, model):
        self.inputs = _LayerInputs(folder=self.section.folder if self.section.offload == "file" else None)
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        if embeddings is not None:
            embeddings.register_forward_hook(self.inputs.see_embeddings)

    def around(self, phase):
        """In a forward, inputs of layers leave for the memory that ``offload`` names, where they wait for backward."""
        return self.inputs if phase == "forward" and torch.is_grad_enabled() else None
