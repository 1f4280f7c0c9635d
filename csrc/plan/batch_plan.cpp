#include "plan/batch_plan.h"

#include <algorithm>

#include "base/error.h"
#include "base/sizes.h"

namespace ds::plan {

namespace {

constexpr const char* kTrain = "train_batch_size";
constexpr const char* kMicro = "train_micro_batch_size_per_gpu";
constexpr const char* kAccumulation = "gradient_accumulation_steps";

std::string number(const std::optional<int64_t>& value) { return value ? std::to_string(*value) : "not given"; }

std::string ranks(const BatchRequest& r) {
  std::string out = std::to_string(r.world) + (r.world == 1 ? " data-parallel rank" : " data-parallel ranks");
  return r.world_source.empty() ? out : out + " (" + r.world_source + ")";
}

std::string summary(const BatchRequest& r) {
  return std::string(kTrain) + " " + number(r.train) + ", " + kMicro + " " + number(r.micro) + ", " + kAccumulation +
         " " + number(r.accumulation) + ", " + ranks(r);
}

[[noreturn]] void refuse(const BatchRequest& r, const std::string& why, const std::string& fix) {
  fail(ErrorKind::kAssertion, "The batch sizes do not fit: ", why, " Given: ", summary(r), ". ", fix);
}

bool product(int64_t a, int64_t b, int64_t c, int64_t& out) {
  int64_t ab = 0;
  return sizes::multiply(a, b, &ab) && sizes::multiply(ab, c, &out);
}

// "64 or 72": the multiples of `unit` next to `value`.
std::string near_multiples(int64_t value, int64_t unit) {
  const int64_t below = value / unit * unit;
  if (below == value) return std::to_string(value);
  const std::string above = std::to_string(below + unit);
  return below > 0 ? std::to_string(below) + " or " + above : above;
}

// The divisors of `whole` next to `value`; whole > 0.
std::string near_divisors(int64_t whole, int64_t value) {
  int64_t below = 0, above = 0;
  constexpr int64_t kFarthest = 100000;  // looks this far; 1 always divides
  for (int64_t d = std::min(value, whole), i = 0; d >= 1 && i < kFarthest; --d, ++i) {
    if (whole % d == 0) {
      below = d;
      break;
    }
  }
  for (int64_t d = value, i = 0; d <= whole && i < kFarthest; ++d, ++i) {
    if (whole % d == 0) {
      above = d;
      break;
    }
  }
  if (below == above || above == 0) return std::to_string(below ? below : 1);
  return below ? std::to_string(below) + " or " + std::to_string(above) : std::to_string(above);
}

// A suggestion for a train size that cannot be cut into the requested parts.
std::string choices(const BatchRequest& r) {
  std::string out = "Choose ";
  int64_t unit = 0;
  const bool fits = product(r.micro.value_or(1), r.accumulation.value_or(1), r.world, unit);
  out += std::string(kTrain) + " " +
         (!fits                       ? "smaller"
          : r.micro && r.accumulation ? std::to_string(unit)
                                      : near_multiples(*r.train, unit));
  if (*r.train % r.world != 0) return out + ".";  // no micro size or accumulation can repair that
  const int64_t per_rank = *r.train / r.world;
  if (r.micro) {
    if (!r.accumulation)
      out += std::string(", or ") + kMicro + " " + near_divisors(per_rank, *r.micro);
    else if (per_rank % *r.accumulation == 0)
      out += std::string(", or ") + kMicro + " " + std::to_string(per_rank / *r.accumulation);
  }
  if (r.accumulation) {
    if (!r.micro)
      out += std::string(", or ") + kAccumulation + " " + near_divisors(per_rank, *r.accumulation);
    else if (per_rank % *r.micro == 0)
      out += std::string(", or ") + kAccumulation + " " + std::to_string(per_rank / *r.micro);
  }
  return out + ".";
}

}  // namespace

BatchPlan plan_batch(const BatchRequest& r) {
  if (r.world <= 0) refuse(r, "there must be at least one data-parallel rank.", "Check how the world size is set.");
  const std::pair<const char*, std::optional<int64_t>> sizes[] = {
      {kTrain, r.train}, {kMicro, r.micro}, {kAccumulation, r.accumulation}};
  for (const auto& [name, value] : sizes) {
    if (value && *value <= 0)
      refuse(r, std::string(name) + " must be greater than 0.",
             std::string("Set ") + name + " to at least 1, or leave it out.");
  }
  if (!r.train && !r.micro) {
    refuse(r, std::string("neither ") + kTrain + " nor " + kMicro + " is given.",
           std::string("Set ") + kMicro + " to what fits in the memory of one rank, for example 1.");
  }

  BatchPlan plan{};
  plan.accumulation = r.accumulation.value_or(r.train && r.micro ? *r.train / *r.micro / r.world : 1);
  plan.micro = r.micro ? *r.micro : *r.train / r.world / plan.accumulation;  // accumulation: given, or 1
  int64_t total = 0;
  if (!product(plan.micro, plan.accumulation, r.world, total)) {
    refuse(r, "their product is larger than any integer here.", "Choose smaller numbers.");
  }
  plan.train = r.train.value_or(total);
  if (plan.train != total || plan.micro <= 0 || plan.accumulation <= 0) {
    const int given = r.train.has_value() + r.micro.has_value() + r.accumulation.has_value();
    std::string why = std::to_string(plan.train) + " is not " + std::to_string(plan.micro) + " x " +
                      std::to_string(plan.accumulation) + " x " + std::to_string(r.world) + " = " +
                      std::to_string(total) + ".";
    if (given < 3) {
      why = std::string(kTrain) + " " + std::to_string(plan.train) + " cannot be cut into equal parts";
      if (r.micro) why += " of " + std::to_string(*r.micro);
      if (r.accumulation) why += " over " + std::to_string(*r.accumulation) + " steps";
      why += r.world == 1 ? "." : " for " + std::to_string(r.world) + " ranks.";
    }
    refuse(r, why, choices(r));
  }
  return plan;
}

}  // namespace ds::plan
