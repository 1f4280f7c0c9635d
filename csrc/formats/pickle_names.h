// Names that a pickle may use, and arguments that its calls may have. Other names are refused, or left to a resolver.
#pragma once
#include <cstdint>
#include <string_view>

#include "formats/pickle_graph.h"

namespace ds::formats {

class GraphBuilder;

struct Rule {
  std::string_view module, name;
  // The node that a call with these arguments gives; Complaint for arguments it must not have. nullptr: no call.
  Ref (*call)(GraphBuilder&, Ref global, const Ref* arguments, size_t count);
  enum State : uint8_t {
    kNoState,
    kAttributes,
    kOwnState
  } state = kNoState;      // the state that BUILD may give an instance
  bool cheap_key = false;  // as in Global
};

const Rule& rule_at(uint16_t index);

// The names of Python 2 and of other versions of the library, as they are called now.
void modernise(std::string* module, std::string* name);

class NameResolver {
 public:
  virtual ~NameResolver() = default;
  // Finds a modern name. The default knows the table, torch's storages and dtypes, and throws RefusedName for all
  // others.
  virtual Global find(const std::string& module, const std::string& name);

 protected:
  // Whether the table has it.
  static bool in_table(const std::string& module, const std::string& name, Global* found);
};

}  // namespace ds::formats
