// The objects of a pickle, made of its graph (formats/pickle_graph.h) step by step.
#pragma once
#include <pybind11/pybind11.h>

#include "formats/format_error.h"
#include "formats/torch_archive.h"

namespace ds::bindings {

[[noreturn]] void raise_refused(const pybind11::object& names, const std::string& name);

// Returns the result of `read`; for a name that `read` refuses, raises the error that `names` (plain_classes.Names)
// makes.
template <typename Read>
auto refusing(const pybind11::object& names, const Read& read) {
  try {
    return read();
  } catch (const formats::RefusedName& refused) {
    raise_refused(names, refused.name());
  }
}

// names, values, storages: as formats/torch_archive.py passes them. Raises pickle.UnpicklingError with the byte of the
// pickle for what cannot be made.
pybind11::object load_archive(formats::TorchArchive& archive, const pybind11::object& names,
                              const pybind11::dict& values, const pybind11::object& storages);

}  // namespace ds::bindings
