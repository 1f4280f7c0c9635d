#include "zero/offload/param_files.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/ranges.h"

namespace ds::zero {

namespace {

const std::vector<std::pair<at::ScalarType, std::string>> kTypes = {
    {at::kHalf, "float16"}, {at::kBFloat16, "bfloat16"}, {at::kFloat, "float32"}, {at::kDouble, "float64"}};

std::string params_folder(const std::string& type, int rank) { return type + "params/rank" + std::to_string(rank); }

}  // namespace

std::shared_ptr<io::RunFolder> param_folders(const std::string& root, int rank) {
  std::vector<std::string> owned;
  for (const auto& [type, name] : kTypes) owned.push_back(params_folder(name, rank));
  return std::make_shared<io::RunFolder>(root, "rank" + std::to_string(rank), std::move(owned));
}

std::string param_file(at::ScalarType type, int rank, int64_t id, const std::string& name) {
  std::string number = id < 0 ? name : std::to_string(id);
  std::replace(number.begin(), number.end(), '/', '_');
  const auto found = find_if(kTypes, [&](const auto& one) { return one.first == type; });
  const std::string type_name = found == kTypes.end() ? c10::toString(type) : found->second;
  return params_folder(type_name, rank) + "/" + number + "_param.tensor.swp";
}

}  // namespace ds::zero
