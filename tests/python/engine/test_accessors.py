"""The accessors of the engine return the values of its configuration."""

import inspect

import pytest

from deepspeed import DeepSpeedEngine
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.accessors import ConfigAccessors
from deepspeed.utils.forwarding import answers_from


class Engine(ConfigAccessors):
    """As much of an engine as the accessors need."""

    optimizer = client_optimizer = None

    def __init__(self, rank=0, **config):
        self._config = DeepSpeedConfig({"train_batch_size": 8, **config}, world_size=4)
        self.rank = rank

    def get_data_parallel_rank(self):
        return self.rank


ZERO = {
    "stage": 3,
    "reduce_bucket_size": 11,
    "allgather_bucket_size": 12,
    "reduce_scatter": False,
    "overlap_comm": False,
    "contiguous_gradients": False,
    "round_robin_gradients": True,
    "ignore_unused_parameters": False,
    "allgather_partitions": False,
    "sub_group_size": 13,
    "stage3_prefetch_bucket_size": 14,
    "stage3_max_live_parameters": 15,
    "stage3_max_reuse_distance": 16,
    "stage3_param_persistence_threshold": 17,
    "stage3_model_persistence_threshold": 18,
    "stage3_module_granularity_threshold": 19,
    "stage3_gather_16bit_weights_on_model_save": True,
    "load_from_fp32_weights": False,
    "mics_shard_size": 2,
}
EXPECTED = {
    "zero_optimization": True,
    "zero_optimization_stage": 3,
    "zero_optimization_partition_gradients": True,
    "zero_optimization_partition_weights": True,
    "zero_reduce_bucket_size": 11,
    "reduce_bucket_size": 11,
    "zero_allgather_bucket_size": 12,
    "zero_reduce_scatter": False,
    "zero_overlap_comm": False,
    "zero_contiguous_gradients": False,
    "zero_round_robin_gradients": True,
    "zero_ignore_unused_parameters": False,
    "zero_allgather_partitions": False,
    "zero_sub_group_size": 13,
    "zero_prefetch_bucket_size": 14,
    "zero_max_live_parameters": 15,
    "zero_max_reuse_distance": 16,
    "zero_param_persistence_threshold": 17,
    "zero_model_persistence_threshold": 18,
    "zero_module_granularity_threshold": 19,
    "zero_gather_16bit_weights_on_model_save": True,
    "zero_load_from_fp32_weights": False,
    "mics_shard_size": 2,
    "zero_offload_optimizer": None,
    "zero_use_cpu_optimizer": False,
    "zero_cpu_offload": False,
    "zero_nvme_offload_optimizer": False,
    "zero_partial_offload": 0.0,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_zero(name):
    assert getattr(Engine(zero_optimization=ZERO), name)() == EXPECTED[name]


def test_below_stage_3():
    engine = Engine(zero_optimization={"stage": 1})
    assert engine.zero_optimization() and not engine.zero_optimization_partition_gradients()
    assert not engine.zero_optimization_partition_weights() and not engine.is_first_weights_partition_group()


def test_the_first_group_with_a_whole_copy():
    assert [Engine(rank, zero_optimization=ZERO).is_first_weights_partition_group() for rank in range(4)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert all(Engine(rank, zero_optimization={"stage": 3}).is_first_weights_partition_group() for rank in range(4))


def test_features():
    engine = Engine(
        checkpoint={"tag_validation": "FAIL"},
        flops_profiler={"profile_step": 7, "module_depth": 2, "top_modules": 3, "detailed": False},
        bf16={"enabled": True, "check_grad_overflow": False},
        progressive_layer_drop={"theta": 0.25, "gamma": 0.125},
    )
    assert engine.checkpoint_tag_validation_enabled() and engine.checkpoint_tag_validation_fail()
    assert engine.checkpoint_serialization_enabled() and not engine.checkpoint_writer_enabled()
    assert (engine.flops_profiler_profile_step(), engine.flops_profiler_module_depth()) == (7, 2)
    assert (engine.flops_profiler_top_modules(), engine.flops_profiler_detailed()) == (3, False)
    assert (engine.pld_theta(), engine.pld_gamma(), engine.pld_enabled()) == (0.25, 0.125, False)
    assert not engine.bf16_optimizer_states() and not engine.bf16_master_weights_and_gradients()


def test_every_one_answers():
    engine = Engine()
    names = [name for name, _ in inspect.getmembers(ConfigAccessors, inspect.isfunction) if not name.startswith("_")]
    assert len(names) > 125
    for name in names:
        getattr(engine, name)()


def test_an_accessor_of_the_table_looks_like_a_method():
    accessor = DeepSpeedEngine.zero_sub_group_size
    assert accessor.__qualname__ == "ConfigAccessors.zero_sub_group_size"
    assert str(inspect.signature(accessor)) == "(self)" and "zero_config.sub_group_size" in accessor.__doc__
    assert Engine(zero_optimization={"sub_group_size": 13}).zero_sub_group_size() == 13


def test_a_name_is_in_the_table_or_a_method():
    with pytest.raises(AssertionError, match="is_there is in the table and in Both"):

        @answers_from({"is_there": "train_batch_size"})
        class Both:
            def is_there(self):
                return 1


def test_every_member_of_the_engine_has_one_definition():
    """The first of two in different bases hides the second, and a change of the second has no effect."""
    places = {}
    for base in inspect.getmro(DeepSpeedEngine):
        if base.__module__.startswith("deepspeed"):
            for name in vars(base):
                if not name.startswith("__"):
                    places.setdefault(name, []).append(base.__name__)
    assert not {name: bases for name, bases in places.items() if len(bases) > 1}
