// Each file of this room contributes to the module by itself: a new binding is a new file, no list to edit.
//
//   DS_BINDINGS(m) { m.def("answer", [](int more) { return 42 + more; }, "more"_a = 0); }
//
// One DS_BINDINGS per file. Order between files is unspecified, so a base class and what derives from it share one.
#pragma once
#include <pybind11/pybind11.h>

#include <vector>

using namespace pybind11::literals;  // NOLINT: "name"_a, an argument of a function for Python

namespace ds::bindings {

using Binder = void (*)(pybind11::module_&);
std::vector<Binder>& binders();

struct Registration {
  explicit Registration(Binder binder) { binders().push_back(binder); }
};

}  // namespace ds::bindings

// Several files may be compiled as one: __COUNTER__ keeps the names apart.
#define DS_BINDINGS(module) DS_BINDINGS_OF(module, __COUNTER__)
#define DS_BINDINGS_OF(module, id) DS_BINDINGS_NAMED(module, id)
#define DS_BINDINGS_NAMED(module, id)                                                 \
  static void ds_bind_##id(pybind11::module_& module);                                \
  static const ::ds::bindings::Registration ds_bind_registration_##id{&ds_bind_##id}; \
  static void ds_bind_##id(pybind11::module_& module)
