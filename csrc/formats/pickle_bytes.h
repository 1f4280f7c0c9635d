// The bytes of a pickle, read from front to back. DamagedPickle where they end too early.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "formats/format_error.h"
#include "formats/graph_builder.h"

namespace ds::formats {

class PickleBytes {
 public:
  PickleBytes(std::string_view data, uint64_t position) : data_(data), at_(position) {}

  uint64_t position() const { return at_; }
  uint64_t left() const { return at_ < data_.size() ? data_.size() - at_ : 0; }

  uint8_t byte() {
    if (at_ >= data_.size()) cut_off(1);
    return static_cast<uint8_t>(data_[at_++]);
  }

  std::string_view take(uint64_t size) {
    if (at_ > data_.size() || size > data_.size() - at_) cut_off(size);
    const std::string_view found = data_.substr(at_, size);
    at_ += size;
    return found;
  }

  template <typename T>
  T little() {
    const std::string_view bytes = take(sizeof(T));
    uint64_t value = 0;
    for (size_t i = sizeof(T); i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
    return static_cast<T>(value);
  }

  uint64_t signed_size() {
    const int32_t size = little<int32_t>();
    if (size < 0) cut_off(0);
    return static_cast<uint64_t>(size);
  }

  std::string_view line(size_t longest) {
    const size_t end = data_.find('\n', at_);
    need(end != std::string_view::npos && end - at_ < longest, "a line without end");
    const std::string_view found = data_.substr(at_, end - at_);
    at_ = end + 1;
    return found;
  }

 private:
  [[noreturn]] void cut_off(uint64_t size) const {
    damaged<DamagedPickle>("the pickle is cut off: ", size, " bytes wanted at byte ", at_);
  }

  std::string_view data_;
  uint64_t at_;
};

}  // namespace ds::formats
