"""The tensor-parallel plan that a model of transformers brings along, as rules of ``autotp_config``."""

import re

from deepspeed.log import log_dist_once
from deepspeed.module_inject.autotp_config import PartitionType, TPLayerSpec

# Style of transformers -> what a rule says about it.
_STYLES = {
    "colwise": {"partition_type": PartitionType.COLUMN},
    "colwise_rep": {"partition_type": PartitionType.COLUMN, "gather_output": True},
    "colwise_gather_output": {"partition_type": PartitionType.COLUMN, "gather_output": True},
    "rowwise": {"partition_type": PartitionType.ROW},
    "replicated_with_grad_allreduce": {"partition_type": PartitionType.SKIP, "grad_allreduce": True},
}


class TPPlanConverter:
    """Reads plans such as ``{"layers.*.self_attn.q_proj": "colwise", "lm_head": "colwise_rep"}``."""

    @staticmethod
    def convert(hf_tp_plan):
        """A list of ``TPLayerSpec``, in the order of the plan; None where the plan has a style without a rule.

        A ``*`` of the plan stands for one part of a name. The rules fit the weight and the bias of a module, whatever
        stands before the names of the plan.
        """
        specs = []
        for name, style in hf_tp_plan.items():
            rule = _STYLES.get(style.lower()) if isinstance(style, str) else None
            if rule is None:
                log_dist_once(
                    f"The tensor-parallel plan of the model has the style {style!r} for {name!r}, and only "
                    f"{', '.join(_STYLES)} can be read: the plan is not used.",
                    ranks=[0],
                )
                return None
            path = r"[^.]+".join(re.escape(part) for part in name.split("*"))
            specs.append(TPLayerSpec([rf"(.*\.)?{path}(\.(weight|bias))?$"], **rule))
        return specs


def _get_hf_tp_plan(model):
    """The plan of a model of transformers, or None. Entries of the whole model (``_tp_plan``) come before those of its
    configuration (``base_model_tp_plan``), whose names lack the prefix of the base model."""
    plans = getattr(model, "_tp_plan", None), getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    whole, base = (plan if isinstance(plan, dict) else {} for plan in plans)
    prefix = getattr(model, "base_model_prefix", "")
    rest = {name: style for name, style in base.items() if not {name, f"{prefix}.{name}"} & whole.keys()}
    return {**whole, **rest} or None
