// Pickles a value the way torch.save does, but takes tensors apart itself: into records of exactly their elements.
//
// The format is that of torch.serialization: pickle protocol 2, storages as persistent ids
// ("storage", torch.FloatStorage, key, "cpu", numel), tensors as calls of torch._utils._rebuild_tensor_v2. In the
// stream that torch.save wrote before zip archives, persistent ids have one part more. All other objects become the
// bytes that Python's own pickler makes of them; their classes are asked as it asks them (copyreg, __reduce_ex__).
#pragma once
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "bindings/formats/tensor_source.h"
#include "formats/prepared_file.h"

namespace ds::bindings {

struct PickledValue {
  std::string bytes;
  std::vector<std::string> keys;              // of the records, in order
  std::vector<io::SourcePtr> sources;         // their bytes
  std::vector<uint64_t> counts;               // their elements, as their storages count them
  std::vector<formats::NamedTensor> tensors;  // every tensor, by where it stands in dicts, lists and tuples
};

// `hooks`: checkpoint/write/file_writer.py's PicklerHooks. `stream`: as in the format before the zip archives.
// Attributes that were set on tensors and parameters are not saved. Raises what pickle raises for values that it cannot
// take.
PickledValue pickle_value(const pybind11::object& value, const pybind11::object& hooks, bool stream);

// The bytes of a zero.tensor_of_pieces.TensorOfPieces.
io::SourcePtr source_of_pieces(const pybind11::handle& object);

}  // namespace ds::bindings
