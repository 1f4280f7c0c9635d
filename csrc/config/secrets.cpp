#include "config/secrets.h"

#include <array>
#include <cctype>
#include <string_view>

namespace ds::config {

namespace {

constexpr std::array<std::string_view, 12> kNames = {"api_key",     "apikey",      "password",   "passwd",
                                                     "passphrase",  "secret",      "token",      "credential",
                                                     "credentials", "private_key", "access_key", "secret_key"};

// Whether a key is called like a secret: "password", "wandb_api_key", "hub-token", but not "max_train_tokens".
bool named_secret(const std::string& name) {
  std::string small;
  for (const char letter : name) {
    small += letter == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  for (const std::string_view known : kNames) {
    if (small.size() < known.size() || small.compare(small.size() - known.size(), known.size(), known) != 0) continue;
    if (small.size() == known.size() || small[small.size() - known.size() - 1] == '_') return true;
  }
  return false;
}

}  // namespace

Value masked(const Value& value, const Field* field, const std::string& name) {
  const bool described = field != nullptr && !field->is_wildcard();
  const bool secret = described ? field->is_secret : named_secret(name);
  if (secret && !value.is_null() && !value.is_boolean() && value != "") return "***";
  if (value.is_object()) {
    Value out = Value::object();
    for (const auto& item : value.items()) {
      const Field* inside = field != nullptr && field->is_section() ? field->find(item.key()) : nullptr;
      out[item.key()] = masked(item.value(), inside, item.key());
    }
    return out;
  }
  if (value.is_array()) {
    Value out = Value::array();
    for (const Value& item : value) out.push_back(masked(item, nullptr));
    return out;
  }
  return value;
}

}  // namespace ds::config
