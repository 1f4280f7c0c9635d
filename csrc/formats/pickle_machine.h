// Reads pickles (protocols 0 to 5; the opcodes: pickletools of Python's library) and runs nothing that they name.
#pragma once
#include <cstdint>
#include <functional>
#include <string_view>

#include "formats/pickle_graph.h"
#include "formats/pickle_names.h"

namespace ds::formats {

class PickleMachine {
 public:
  // `data` must outlive the graphs: they point into it. `check_storage` gets each storage that a tensor names, once,
  // and throws what it finds wrong; without it storages are refused.
  PickleMachine(std::string_view data, NameResolver& names,
                std::function<void(const StoredMemory&)> check_storage = {});

  // The pickle that begins at `position`, which then is behind its end. DamagedPickle for anything that is no pickle of
  // plain data, with the byte where; RefusedName for a name that could run code.
  PickleGraph read(uint64_t* position);

 private:
  std::string_view data_;
  NameResolver& names_;
  std::function<void(const StoredMemory&)> check_storage_;
};

}  // namespace ds::formats
