// Finds writes into the parameters that the engine has not made.
//
// [Note: what the user has written counts]
// A write is seen in one of two ways. `param.data = tensor` leaves the parameter with other memory than its view of
// the flat buffer: one comparison of pointers. A write in place raises the parameter's version (Tensor._version), which
// nothing of the engine does: it writes the flat buffers, whose versions are others, and what it writes through
// parameters (loading) ends with know(). Of a parameter that was written, masters take those elements that are not the
// weights' rounded masters: the others keep what the weights' dtype cannot hold. What the engine wrote in the same
// interval is such a rounded master, hence neither is lost.
//
// There is no version of what is written through `param.data` in place (param.data.copy_(...)) or through numpy. Where
// masters are the weights, such a write counts all the same; elsewhere the next step writes over it.
//
// Sharded parameters count such writes themselves (ShardedParam::written), also those through `param.data`, and are not
// released before their slices have the values, frozen ones included.
//
// Nothing here communicates: every rank looks at its own tensors, and takes what it owns. All ranks have to write the
// same values, as they have to for a model without an engine.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "zero/spaces/param_store.h"

namespace ds::zero {

class UserWrites {
 public:
  // `before_change` waits for readers and writers of masters.
  UserWrites(ParamStore& store, std::function<void()> before_change);

  // Parameters with data of their own return to their views of the flat buffer, which take the values.
  void bring_home();
  void bring_home(size_t param);
  void bring_home(size_t param, const at::Tensor& value);
  // Masters take the values written in place since the last call. For a gathered parameter this rank's slice does, too:
  // no other rank may be reading it.
  void adopt();
  // Names of the parameters of which adopt() has changed what this rank owns, since the last call.
  std::vector<std::string> take_names() { return std::exchange(names_, {}); }
  // The masters have the values that the weights have now.
  void know();

 private:
  void know(size_t param);
  std::vector<size_t> found();
  bool adopt(size_t param);
  void add_name(const std::string& name);

  ParamStore& store_;
  const std::function<void()> before_change_;
  std::vector<std::string> names_;
  std::vector<uint32_t> versions_;
  std::vector<uint8_t> came_home_;
};

}  // namespace ds::zero
