"""Files of a pipeline's layers in a checkpoint: one for each layer, so that any number of stages can read them."""

import glob
import os

from deepspeed.utils.partition import partition_uniform
from deepspeed.zero.parameters.param_ranks import SavedLayers


class LayerFiles:
    """Mixed into ``PipelineModule``."""

    def ckpt_prefix(self, checkpoints_path, tag):
        """The beginning of the names of files of this rank's stage and slice; copies share them."""
        axes = [axis for axis in self._topo.get_axis_names() if axis not in ("data", "sequence")]
        coordinate = self._topo.get_coord(self._grid.get_global_rank())
        coordinates = "".join(f"-{axis}_{getattr(coordinate, axis):02d}" for axis in axes)
        return os.path.join(checkpoints_path, str(tag), f"module{coordinates}")

    def _slices(self):
        """The part of its layers that this rank has, such as ``"model_01"``; "" for all of them."""
        return self._topo.get_rank_repr(self._grid.get_global_rank(), omit_axes=["data", "pipe", "sequence"])

    def _layer_path(self, ckpt_dir, layer):
        slices = self._slices()
        return os.path.join(ckpt_dir, f"layer_{layer:02d}" + (f"-{slices}" if slices else "") + "-model_states.pt")

    def ckpt_layer_path(self, ckpt_dir, local_layer_idx):
        """The file of this rank's layer number ``local_layer_idx``."""
        return self._layer_path(ckpt_dir, self.local_layers[local_layer_idx])

    def ckpt_layer_path_list(self, ckpt_dir, local_layer_idx):
        """The files of all slices of that layer, sorted."""
        layer = self.local_layers[local_layer_idx]
        return sorted(glob.glob(os.path.join(glob.escape(ckpt_dir), f"layer_{layer:02d}-*model_states.pt")))

    def _saved_layers(self):
        """For checkpoints of an engine: the file that each module of this stage is in."""
        first = {layers[0]: f"tied_modules.{key}" for key, layers in self._tied_layers.items()}
        numbers, layers = {path: number for number, path in first.items()}, {}
        for number, module in zip(self.local_layers, self._modules_by_position):
            key = getattr(self._layer_specs[number], "key", None)
            if module is not None:
                path = str(number) if key is None else f"tied_modules.{key}"
                layers[path] = numbers.get(path, number)
        return SavedLayers(
            self.stage_id,
            self.num_stages,
            layers,
            writes=[number for number in layers.values() if self.stage_owner(number) == self.stage_id],
            paths=first,
            slices=self._slices(),
        )

    def _file_of(self, local):
        """The layer under which the module of this position is saved: its own; for a tied one, the first of its key."""
        key = getattr(self._layer_specs[self.local_layers[local]], "key", None)
        return self.local_layers[local] if key is None else self._tied_layers[key][0]

    def save_state_dict(self, save_dir, checkpoint_engine, exclude_frozen_params=False):
        """Writes a file for each layer of this stage that has a state; the copies of the stage share the work. A tied
        layer is in the file of its first appearance, and in those of others that call the module itself."""
        copy = self._grid.get_sequence_data_parallel_rank()
        offsets = partition_uniform(len(self.forward_funcs), self._grid.get_sequence_data_parallel_world_size())
        os.makedirs(save_dir, exist_ok=True)
        for local in range(offsets[copy], offsets[copy + 1]):
            module = self._modules_by_position[local]
            called_itself = self.forward_funcs[local] is module
            if module is None or not (called_itself or self._file_of(local) == self.local_layers[local]):
                continue
            frozen = {name for name, one in module.named_parameters() if not one.requires_grad}
            state = module.state_dict()
            for name, value in list(state.items()):
                if exclude_frozen_params and name in frozen:
                    del state[name]
                elif hasattr(value, "detach"):
                    state[name] = value.detach().clone()  # a part of a flat buffer would bring the buffer along
            checkpoint_engine.save(state, self.ckpt_layer_path(save_dir, local))

    def load_state_dir(self, load_dir, checkpoint_engine, strict=True):
        """Reads the layers of this stage, however many stages wrote them. Copies of a tied layer read one file, so they
        are equal afterwards; no rank waits for another."""
        for local, module in enumerate(self._modules_by_position):
            if module is None:
                continue
            path = self._layer_path(load_dir, self._file_of(local))
            if not os.path.exists(path):
                there = self.ckpt_layer_path_list(load_dir, local)
                raise FileNotFoundError(
                    f"{path} is missing: layer {self._file_of(local)} of the pipeline is not in this checkpoint for "
                    f"this slice. Files of the layer: {', '.join(map(os.path.basename, there)) or 'none'}"
                )
            module.load_state_dict(checkpoint_engine.load(path, map_location="cpu"), strict=strict)
