"""Arguments of tp_model_init() in the configuration of the next initialize()."""

import pytest
import torch

from deepspeed.runtime.tensor_parallel import init_utils
from refusals import refused


class Groups:
    """A module of process groups, each of which is known by its number of ranks."""

    def __init__(self, initialized=True):
        self.initialized = initialized

    def is_initialized(self):
        return self.initialized

    def get_world_size(self, group=None):
        return len(group)


GROUP = "ab"


def record(tp_size=2, dtype=torch.bfloat16, tp_group=None, dist=None):
    init_utils.record_tp_model_init_args(tp_size, dtype, tp_group, dist or Groups())


def merged(config, mpu=None, mesh_param=None):
    return init_utils.merge_tp_model_init_into_config(config, mpu, mesh_param, Groups())


@pytest.fixture(autouse=True)
def nothing_recorded():
    """No test finds the arguments of another one."""
    merged({})
    yield
    merged({})


def test_without_a_call_the_configuration_stays_what_it_is():
    config = {"tensor_parallel": {"autotp_size": 4}}
    assert merged(config) is config


@pytest.mark.parametrize(
    "section",
    [None, {}, {"autotp_size": 2}, {"autotp_size": "auto", "dtype": "auto"}, {"dtype": torch.bfloat16},
     {"autotp_size": None, "dtype": "bf16"}, {"dtype": "torch.bfloat16"}],
)  # fmt: skip
def test_arguments_are_set_where_the_configuration_agrees(section):
    config = {"train_batch_size": 8, "tensor_parallel": section}
    before = {**config, "tensor_parallel": section and dict(section)}
    record()
    assert merged(config) == {
        "train_batch_size": 8,
        "tensor_parallel": {"autotp_size": 2, "dtype": torch.bfloat16},
    }
    assert config == before


def test_other_keys_stay_and_one_rank_is_no_split():
    record(tp_size=1, dtype=None)
    section = {"autotp_size": 0, "tp_overlap_comm": True, "dtype": "fp16"}
    assert merged({"tensor_parallel": section}) == {"tensor_parallel": {**section, "autotp_size": 1}}


@pytest.mark.parametrize(
    "words,section",
    [("tp_size=2.*autotp_size=4", {"autotp_size": 4}), ("tp_size=2.*autotp_size=0", {"autotp_size": 0}),
     ("dtype=torch.bfloat16.*dtype='fp16'", {"dtype": "fp16"}),
     ("dtype=torch.bfloat16.*dtype=torch.float32", {"dtype": torch.float32}),
     ("tp_group='ab'.*tp_group='cd'", {"tp": {"tp_group": "cd"}}),
     ("tp_group='ab'.*tp_group='cd'", {"tensor_parallel": {"tp_group": "cd"}})],
)  # fmt: skip
def test_a_configuration_that_says_something_else_is_refused(words, section):
    record(tp_group=GROUP)
    refused(ValueError, words, merged, {"tensor_parallel": section})
    assert merged({}) == {}


@pytest.mark.parametrize("name", ["tp", "tensor_parallel"])
def test_a_group_is_set_beside_other_keys(name):
    record(tp_group=GROUP)
    section = merged({"tensor_parallel": {name: {"tp_grain_size": 8}}})["tensor_parallel"]
    assert section == {
        name: {"tp_grain_size": 8, "tp_group": GROUP},
        "autotp_size": 2,
        "dtype": torch.bfloat16,
    }


@pytest.mark.parametrize("other,given", [("mpu", {"mpu": object()}), ("mesh_param", {"mesh_param": (2, 2)})])
def test_a_group_beside_other_groups_is_refused(other, given):
    record(tp_group=GROUP)
    refused(ValueError, f"a tp_group, and initialize got {other}", merged, {}, **given)
    record()
    assert merged({}, **given)["tensor_parallel"]["autotp_size"] == 2


def test_a_group_of_another_size_is_refused():
    refused(ValueError, "tp_group has 3 ranks, and tp_size is 2", record, tp_group="abc")
    record(tp_group="abc", dist=Groups(initialized=False))
    refused(ValueError, "tp_group has 3 ranks, and tp_size is 2", merged, {})


@pytest.mark.parametrize(
    "words,again",
    [("tp_size=2 before, and now with tp_size=4", {"tp_size": 4, "tp_group": "abcd"}),
     ("dtype=torch.bfloat16 before, and now with dtype=torch.float16", {"dtype": torch.float16}),
     ("tp_group='ab' before, and now with tp_group=None", {"tp_group": None})],
)  # fmt: skip
def test_a_second_call_has_the_same_arguments(words, again):
    record(tp_group=GROUP)
    record(tp_group=GROUP)
    refused(ValueError, words, record, **{"tp_group": GROUP, **again})
    assert merged({})["tensor_parallel"]["autotp_size"] == 2


def test_the_next_call_of_initialize_uses_the_arguments_up():
    record()
    merged({})
    assert merged({}) == {}
    record(tp_size=4)
    assert merged({})["tensor_parallel"]["autotp_size"] == 4
