// The section optimizer.
#include "config/schema.h"
#include "config/sections/optimizer_params.h"

namespace ds::config {

namespace {

bool one_bit(const std::string& type) { return type == "OneBitAdam" || type == "ZeroOneAdam" || type == "OneBitLamb"; }

}  // namespace

DS_CONFIG_CHAPTER(20, kTraining, "Optimizer") {
  c.add(section("optimizer", "The optimizer to make, unless one is given to initialize().",
                {
                    text("type", nullptr, "Its name.")
                        .one_of_any_case(optimizer_types())
                        .or_other("any class name in torch.optim")
                        .not_built_values("this optimizer", optimizer_types_not_built()),
                    table("params", nullptr, "Arguments of its constructor.").variants_by("type", optimizer_params()),
                    boolean("legacy_fusion", false, "Kept for old scripts that fused optimizer and fp16 wrapper.")
                        .not_built("the legacy fused fp16 optimizer"),
                })
            .ignores_private());
  c.rule("optimizer.params.max_grad_norm is refused: gradient_clipping does that.", [](RuleContext& j) {
    if (!j.given("optimizer.params.max_grad_norm") || optimizer_params().count(j.text("optimizer.type")) == 0) return;
    j.error({"optimizer.params.max_grad_norm"}, "the built-in optimizers do not clip gradients.",
            "Use \"gradient_clipping\" instead.", ErrorKind::kValue);
  });
  c.rule("Parameters of torch's own Adam (foreach, fused, maximize, capturable, differentiable) need torch_adam.",
         [](RuleContext& j) {
           const std::string type = j.text("optimizer.type"), at = "optimizer.params.";
           if ((type != "Adam" && type != "AdamW") || j.on(at + "torch_adam")) return;
           for (const char* key : {"foreach", "fused", "maximize", "capturable", "differentiable"}) {
             if (j.on(at + key)) {
               j.error({at + key}, "only torch's own Adam has this.",
                       "Set \"" + at + "torch_adam\" to true or leave it out.");
             }
           }
         });
  c.rule("params need a type.", [](RuleContext& j) {
    for (const std::string at : {"optimizer", "scheduler"}) {
      if (j.is_null(at + ".type") && j.size(at + ".params") > 0) {
        j.error({at + ".type", at + ".params"}, "there are parameters but no name.", "Add \"" + at + ".type\".");
      }
    }
  });
  c.rule("OneBitAdam, ZeroOneAdam and OneBitLamb do not work with ZeRO.", [](RuleContext& j) {
    if (!one_bit(j.text("optimizer.type")) || j.integer("zero_optimization.stage") == 0) return;
    j.error({"optimizer.type", "zero_optimization.stage"}, "the 1-bit optimizers do not work with ZeRO.",
            "Set \"zero_optimization.stage\" to 0, or choose another optimizer and compress what ZeRO sends with "
            "\"zero_quantized_gradients\" and \"zero_quantized_weights\" (ZeRO++).");
  });
}

}  // namespace ds::config
