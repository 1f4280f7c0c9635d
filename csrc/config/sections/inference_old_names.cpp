// Old names of keys of init_inference.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(20, kInference, "Older names") {
  c.add(integer("mp_size", 1, "Old name.").at_least(1).deprecated_for("tp.tp_size").forwards());
  c.add(python("mpu", nullptr, "Old name.").deprecated_for("tp.mpu").forwards());
  c.add(integer("ep_size", 1, "Old name.").at_least(1).deprecated_for("moe.ep_size").forwards());
  c.add(python("expert_group", nullptr, "Old name.").alias("ep_group").deprecated_for("moe.expert_group").forwards());
  c.add(python("expert_mp_group", nullptr, "Old name.")
            .alias("ep_mp_group")
            .deprecated_for("moe.ep_mp_group")
            .forwards());
  c.add(list("moe_experts", std::vector<int64_t>{1}, "Old name.")
            .items(kInt)
            .items_at_least(1)
            .deprecated_for("moe.num_experts")
            .forwards());
  c.add(
      text("moe_type", "standard", "Old name.").one_of({"standard", "residual"}).deprecated_for("moe.type").forwards());
}

}  // namespace ds::config
