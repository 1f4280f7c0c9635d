"""The names that scripts import from deepspeed.module_inject."""

import importlib

import pytest

from deepspeed import module_inject


@pytest.mark.parametrize("name", module_inject._NAMES)
def test_a_public_name_is_found_in_the_package(name):
    assert getattr(module_inject, name).__module__ == module_inject._NAMES[name]
    assert name in dir(module_inject)


@pytest.mark.parametrize(
    "path,names",
    [("config", ["TPTrainingConfig", "_get_hf_tp_plan"]),
     ("init_utils", ["load_ds_config", "merge_tp_model_init_into_config", "record_tp_model_init_args"])],
)  # fmt: skip
def test_published_paths_of_the_configuration_have_their_names(path, names):
    module = importlib.import_module(f"deepspeed.runtime.tensor_parallel.{path}")
    assert [name for name in names if not hasattr(module, name)] == []
