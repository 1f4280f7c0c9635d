#include "formats/pickle_writer.h"

#include <cstring>
#include <limits>
#include <utility>

#include "base/error.h"

namespace ds::formats {

template <typename T>
void PickleWriter::little(T value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) bytes_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
}

void PickleWriter::integer(int64_t value) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    char bytes[8];
    for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
    big_integer({bytes, sizeof(bytes)});
  } else if (value >= 0 && value <= 0xff) {
    op('K');
    little(value, 1);
  } else if (value >= 0 && value <= 0xffff) {
    op('M');
    little(value, 2);
  } else {
    op('J');
    little(value, 4);
  }
}

void PickleWriter::big_integer(std::string_view bytes) {
  const auto redundant = [](char last, char before) {
    const bool negative = (static_cast<uint8_t>(before) & 0x80) != 0;
    return negative ? last == '\xff' : last == '\0';
  };
  while (bytes.size() > 1 && redundant(bytes[bytes.size() - 1], bytes[bytes.size() - 2])) bytes.remove_suffix(1);
  if (bytes.size() <= 0xff) {
    op('\x8a');
    little(bytes.size(), 1);
  } else {
    if (bytes.size() > 0x7fffffff) fail(ErrorKind::kValue, "a number of ", bytes.size(), " bytes in a pickle");
    op('\x8b');
    little(bytes.size(), 4);
  }
  bytes_.append(bytes);
}

void PickleWriter::real(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  op('G');
  for (int i = 7; i >= 0; --i) bytes_.push_back(static_cast<char>(bits >> (8 * i)));
}

void PickleWriter::text(std::string_view utf8) {
  if (utf8.size() > std::numeric_limits<uint32_t>::max()) {
    fail(ErrorKind::kValue, "a text of ", utf8.size(), " bytes in a pickle of protocol 2, which takes 4 GiB at most");
  }
  op('X');
  little(utf8.size(), 4);
  bytes_.append(utf8);
}

void PickleWriter::global(std::string_view module, std::string_view name) {
  if (module.find('\n') != std::string_view::npos || name.find('\n') != std::string_view::npos) {
    fail(ErrorKind::kValue, "the name of a class has a line end in it: ", module, ".", name);
  }
  op('c');
  bytes_.append(module).push_back('\n');
  bytes_.append(name).push_back('\n');
}

void PickleWriter::tuple(size_t count) {
  constexpr char kShort[] = {')', '\x85', '\x86', '\x87'};
  op(count <= 3 ? kShort[count] : 't');
}

uint32_t PickleWriter::put() {
  const uint32_t number = memo_++;
  op(number <= 0xff ? 'q' : 'r');
  little(number, number <= 0xff ? 1 : 4);
  return number;
}

void PickleWriter::get(uint32_t number) {
  op(number <= 0xff ? 'h' : 'j');
  little(number, number <= 0xff ? 1 : 4);
}

std::string PickleWriter::take() {
  op('.');
  return std::exchange(bytes_, {});
}

}  // namespace ds::formats
