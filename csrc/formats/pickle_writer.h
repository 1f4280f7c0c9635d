// Writes the bytes of a pickle of protocol 2, as Python's own pickler does and torch.load(weights_only=True) reads.
//
// Values are pushed in the order of the file, and opcodes join them: who walks objects calls it depth first. What may
// be met again is remembered at once (put), and met again by its number (get).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ds::formats {

class PickleWriter {
 public:
  static constexpr size_t kBatch = 1000;  // items that one APPENDS or SETITEMS adds

  PickleWriter() : bytes_("\x80\x02") {}

  // ---- values
  void none() { op('N'); }
  void boolean(bool value) { op(value ? '\x88' : '\x89'); }
  void integer(int64_t value);
  // Two's complement, little endian, of any length; as short as it goes.
  void big_integer(std::string_view bytes);
  void real(double value);
  void text(std::string_view utf8);
  // Neither may have a line end in it.
  void global(std::string_view module, std::string_view name);

  // ---- what joins them
  void mark() { op('('); }
  void empty_tuple() { op(')'); }
  void empty_list() { op(']'); }
  void empty_dict() { op('}'); }
  // Makes a tuple of the `count` values behind the mark; for `count` <= 3 of the last values, without a mark.
  void tuple(size_t count);
  // Both take the values behind the mark, or the last one where there is only `one`.
  void append(bool one) { op(one ? 'a' : 'e'); }
  void set_items(bool one) { op(one ? 's' : 'u'); }
  void reduce() { op('R'); }         // function, arguments
  void new_object() { op('\x81'); }  // class, arguments
  void build() { op('b'); }          // object, state
  void persistent() { op('Q'); }     // an id
  void pop() { op('0'); }
  void pop_mark() { op('1'); }

  // ---- the memo
  uint32_t put();  // of the last value; numbers count from 0
  void get(uint32_t number);

  std::string take();  // ends the pickle

 private:
  void op(char code) { bytes_.push_back(code); }
  template <typename T>
  void little(T value, size_t bytes = sizeof(T));

  std::string bytes_;
  uint32_t memo_ = 0;
};

}  // namespace ds::formats
