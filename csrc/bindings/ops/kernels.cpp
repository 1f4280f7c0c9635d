// The kernels that this machine has, for reports and tests.
#include <pybind11/stl.h>

#include <string>

#include "bindings/registry.h"
#include "kernels/table.h"
#include "zero/any_kernels.h"

namespace py = pybind11;

DS_BINDINGS(m) {
  m.def(
      "kernels_of",
      [](const std::string& device) { return std::string(ds::zero::kernels_of(c10::Device(device)).isa); }, "device"_a,
      "The instruction set of the kernels with which an engine trains on a device, for reports. RuntimeError,\n"
      "ValueError or NotImplementedError where there can be none.");
  m.def(
      "kernel_info",
      [](const std::string& device) {
        using ds::kernels::kKernelAbi;
        py::dict info;
        const ds::kernels::KernelTable* table = ds_kernels(kKernelAbi, device.c_str());
        const char* error = table != nullptr ? table->device_error() : ds_kernels_error(kKernelAbi, device.c_str());
        info["isa"] = table != nullptr ? py::object(py::str(table->isa)) : py::object(py::none());
        info["error"] = error != nullptr ? py::object(py::str(error)) : py::object(py::none());
        return info;
      },
      "device"_a,
      "{'isa': the instruction set of the kernels for 'cpu' or 'cuda' (None: no kernels),\n"
      " 'error': why they cannot run here, or None}");
}
