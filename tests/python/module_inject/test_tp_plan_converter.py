"""Tensor-parallel plans that models of transformers bring along."""

import types

import pytest

from deepspeed.module_inject.autotp_config import PartitionType
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

COLUMN, ROW, SKIP = PartitionType.COLUMN, PartitionType.ROW, PartitionType.SKIP


@pytest.mark.parametrize(
    "style,wanted",
    [("colwise", (COLUMN, False, False)), ("ColWise", (COLUMN, False, False)), ("rowwise", (ROW, False, False)),
     ("colwise_rep", (COLUMN, True, False)), ("colwise_gather_output", (COLUMN, True, False)),
     ("replicated_with_grad_allreduce", (SKIP, False, True))],
)  # fmt: skip
def test_a_style_becomes_a_rule(style, wanted):
    (spec,) = TPPlanConverter.convert({"lm_head": style})
    assert (spec.partition_type, spec.gather_output, spec.grad_allreduce) == wanted


@pytest.mark.parametrize("style", ["sequence_parallel", "packed_colwise", "local_rowwise", "", None, object()])
def test_a_plan_with_another_style_is_not_used(style):
    assert TPPlanConverter.convert({"a": "colwise", "b": style}) is None


@pytest.mark.parametrize(
    "name,fits",
    [("layers.0.self_attn.q_proj.weight", True), ("model.layers.11.self_attn.q_proj.bias", True),
     ("base.model.layers.x.self_attn.q_proj", True), ("layers.0.1.self_attn.q_proj.weight", False),
     ("model.xlayers.0.self_attn.q_proj.weight", False), ("layers.0.self_attn.q_proj_a.weight", False),
     ("layers.0.self_attnxq_proj.weight", False), ("layers.0.self_attn.q_proj.scale", False)],
)  # fmt: skip
def test_a_star_is_one_part_of_a_name_and_any_prefix_will_do(name, fits):
    (spec,) = TPPlanConverter.convert({"layers.*.self_attn.q_proj": "colwise"})
    assert spec.matches(name) is fits


def test_rules_are_in_the_order_of_the_plan():
    specs = TPPlanConverter.convert({"layers.0.down": "colwise", "layers.*.down": "rowwise"})
    kinds = [next(spec.partition_type for spec in specs if spec.matches(f"layers.{layer}.down")) for layer in (0, 1)]
    assert kinds == [COLUMN, ROW] and TPPlanConverter.convert({}) == []


BASE = {"layers.*.q": "colwise", "layers.*.o": "rowwise"}


@pytest.mark.parametrize(
    "base,whole,wanted",
    [(None, None, None), ({}, {}, None), (BASE, None, BASE), (BASE, {}, BASE),
     (None, {"lm_head": "colwise"}, {"lm_head": "colwise"}),
     (BASE, {"lm_head": "colwise"}, {"lm_head": "colwise", **BASE}),
     (BASE, {"model.layers.*.q": "rowwise"}, {"model.layers.*.q": "rowwise", "layers.*.o": "rowwise"}),
     (BASE, {"layers.*.q": "rowwise"}, {"layers.*.q": "rowwise", "layers.*.o": "rowwise"}), ("plan", 3, None)],
)  # fmt: skip
def test_the_plan_of_a_model_is_of_the_model_and_of_its_configuration(base, whole, wanted):
    config = types.SimpleNamespace(base_model_tp_plan=base)
    found = _get_hf_tp_plan(types.SimpleNamespace(config=config, _tp_plan=whole, base_model_prefix="model"))
    assert found == wanted and list(found or ()) == list(wanted or ())


def test_a_model_without_a_configuration_has_no_plan():
    assert _get_hf_tp_plan(object()) is None
