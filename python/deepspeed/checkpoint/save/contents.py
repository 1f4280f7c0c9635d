"""The contents of a run that is saved: counters, the shapes and shards of ZeRO, and its memory.

Memory that only the core changes (fp32 masters, states of a native optimizer) can be copied later.
"""

import collections

from deepspeed._compat import storage_of
from deepspeed.checkpoint.layouts import names, storage
from deepspeed.checkpoint.write.snapshot import MemoryRanges
from deepspeed.ops.fp_quantizer.weight_form import coded_params
from deepspeed.zero.parameters.param_ranks import ranks_of, shape_of
from deepspeed.zero.parameters.sharded_parameter import is_sharded

# ---- counters ------------------------------------------------------------------------------------------------------
# The progress of a run and the numbers of its ranks, which every layout has under the same keys.


def counters_of(run):
    """dict with the published keys, in the order of the model file."""
    position = run.position()
    return {
        "data_sampler": position.get("sampler") if isinstance(position, dict) else None,
        "random_ltd": run.counters.random_ltd,
        "sparse_tensor_module_names": run.counters.sparse_names,
        "skipped_steps": run.counters.skipped_steps,
        "global_steps": run.counters.global_steps,
        "global_samples": run.counters.global_samples,
        "dp_world_size": run.ranks.dp_world_size,
        "mp_world_size": run.ranks.mp_world_size,
        names.RESERVED_KEY: dict(run.ranks.degrees),
        **run.tensor_facts(),
        **_codes_of(run),
    }


def _codes_of(run):
    """Facts of weights that are small floats, by key; nothing where there are none."""
    found = coded_params(run.weights.params)
    return {names.QUANTIZED_PARAMS: {run.weights.named(name): facts for name, facts in found.items()}} if found else {}


# ---- zero states ---------------------------------------------------------------------------------------------------
# What a checkpoint holds of a run with ZeRO: shapes and shards.


def param_shapes(run):
    """One ordered dict name -> torch.Size for each parameter group of the optimizer, in its order, of what all ranks
    train."""
    groups = (zip(names, params) for names, params in zip(run.group_names, run.trained_groups))
    return [
        collections.OrderedDict((name, shape_of(param)) for name, param in group if ranks_of(param) is None)
        for group in groups
    ]


def _frozen(run):
    """Parameters that no file of optimizer states has, frozen ones and those the optimizer was not given, nor an
    expert's file."""
    named, trained = run.weights.named, run.trained_ids()
    return [
        (named(name), param)
        for name, param in run.weights.unique()
        if id(param) not in trained and ranks_of(param) is None and (named.expert(name) is None or is_sharded(param))
    ]


def frozen_shapes(run):
    """Ordered dict name -> torch.Size of parameters that are not trained."""
    return collections.OrderedDict((name, shape_of(param)) for name, param in _frozen(run))


def frozen_fragments(run):
    """Ordered dict name -> values of parameters that are not trained: this rank's slice at stage 3, else the whole."""
    return collections.OrderedDict(
        (name, storage.compact(p.ds_tensor if is_sharded(p) else p.data)) for name, p in _frozen(run)
    )


# ---- memory --------------------------------------------------------------------------------------------------------


class HeldStates:
    """That memory of a run, and the hold on it. Weights are not in it, even where they are their own masters, and
    neither are the states of an optimizer of somebody else: programs write to them between steps.

    ``hold()``: from now on calls that would change it wait for ``let_go()``."""

    def __init__(self, run):
        self.hold, self.let_go = getattr(run.states, "hold", None), getattr(run.states, "let_go", None)
        weights = [*run.weights.params.values(), *run.weights.buffers.values()]
        known = {storage_of(weight).data_ptr() for weight in weights}
        self._ranges = MemoryRanges()
        self._watched = {}  # address of a storage -> (a tensor over it, its version)
        tensors = run.states.tensors() if run.states is not None else ()
        on_host = (t for t in tensors if t is not None and t.device.type == "cpu" and t.numel() > 0)
        for tensor in on_host:
            storage = storage_of(tensor)
            if storage.data_ptr() not in known and storage.data_ptr() not in self._watched:
                self._ranges.add(storage.data_ptr(), storage.nbytes())
                self._watched[storage.data_ptr()] = tensor, tensor._version

    def cover(self, address, bytes):
        """Whether all of it is such memory."""
        return self._ranges.find(address, bytes) is not None

    def check_unchanged(self):
        """RuntimeError if it was written to since this was made, as far as torch saw it."""
        if any(tensor._version != version for tensor, version in self._watched.values()):
            raise RuntimeError(
                "fp32 masters or optimizer states were written to, by other means than the engine, between "
                "save_checkpoint and the next engine.step(), while they were being copied. Call "
                "engine.checkpoint_engine.wait() before you change them, or use safe_set_full_fp32_param and "
                "safe_set_full_optimizer_state, which wait by themselves"
            )
