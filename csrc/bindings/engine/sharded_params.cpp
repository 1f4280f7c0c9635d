// Sharded parameters and their gatherer for Python, and the hooks of modules: called for every module of every forward,
// so they find their tensors without Python code where they can.
#include <Python.h>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <c10/core/GradMode.h>
#include <pybind11/stl.h>

#include "bindings/engine/nested_tensors.h"
#include "bindings/config/py_config.h"
#include "bindings/registry.h"
#include "bindings/engine/sharded_params.h"
#include "bindings/torch_types.h"
#include "zero/spaces/remote_slices.h"

namespace py = pybind11;

namespace ds::bindings {

using zero::ParamGatherer;
using zero::ShardedParam;
using zero::ShardedParamPtr;
using zero::ShardSource;

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

// The parameter's class says whether its data may be touched. The classes live as long as their module: forever.
void swap_classes(ShardedParam& param, const py::object& available, const py::object& released) {
  PyObject *when_available = available.ptr(), *when_released = released.ptr();
  const auto apply = [&param, when_available, when_released](zero::ParamStatus status) {
    if (status == zero::ParamStatus::kInflight) return;
    py::gil_scoped_acquire locked;
    const at::Tensor tensor = param.tensor();
    if (!tensor.defined()) return;
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    PyObject* type = status == zero::ParamStatus::kAvailable ? when_available : when_released;
    if (PyObject_SetAttrString(object.ptr(), "__class__", type) != 0) throw py::error_already_set();
  };
  param.on_status = apply;
  param.hold_for_status = [] { return std::shared_ptr<void>(std::make_shared<py::gil_scoped_acquire>()); };
  apply(param.status());
}

std::vector<ShardedParam*> raw(const std::vector<ShardedParamPtr>& params) {
  std::vector<ShardedParam*> result;
  for (const ShardedParamPtr& param : params) result.push_back(param.get());
  return result;
}

// Tensors that need gradients in a module's arguments or outputs.
void collect(PyObject* value, std::vector<at::Tensor>& found) {
  if (value == Py_None || PyUnicode_Check(value) || PyLong_Check(value) || PyFloat_Check(value)) return;
  if (THPVariable_Check(value)) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (tensor.requires_grad()) found.push_back(tensor);
  } else if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) collect(PyTuple_GET_ITEM(value, i), found);
  } else if (PyList_Check(value)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) collect(PyList_GET_ITEM(value, i), found);
  } else if (PyDict_Check(value)) {
    PyObject *key, *item;
    Py_ssize_t position = 0;
    while (PyDict_Next(value, &position, &key, &item)) collect(item, found);
  } else {
    for (const at::Tensor& tensor : tensors_within(value))
      if (tensor.requires_grad()) found.push_back(tensor);
  }
}

// torch.nn.functional.linear while modules of one model run, and while a segment of it is recomputed: outside of that
// torch's own is there.
struct LinearScope {
  py::dict functions;  // of torch.nn.functional
  py::object chosen;
  py::object before{};
  int depth = 0;

  void enter(bool whole) {
    if (!before) {
      before = py::reinterpret_borrow<py::object>(functions["linear"]);
      functions["linear"] = chosen;
    }
    depth = whole ? 1 : depth + 1;  // a call that raised has left modules that nobody leaves
  }
  void leave(bool whole) {
    depth = whole || depth == 0 ? 0 : depth - 1;
    if (depth > 0 || !before) return;
    if (py::object(functions["linear"]).is(chosen)) functions["linear"] = before;
    before = py::object();
  }
};
using LinearScopePtr = std::shared_ptr<LinearScope>;

// Hooks hold the gatherer weakly: a module may outlive the engine that hooked it.
struct ModuleHook {
  std::weak_ptr<zero::Engine> engine;
  int32_t unit;  // -1: the whole model
  LinearScopePtr linear{};

  ParamGatherer* gatherer(std::shared_ptr<zero::Engine>& keep) const {
    keep = engine.lock();
    return keep ? keep->gatherer() : nullptr;
  }
  std::vector<at::Tensor> tensors(const py::object& a, const py::object& b) const {
    std::vector<at::Tensor> found;
    collect(a.ptr(), found);
    collect(b.ptr(), found);
    return found;
  }
};

// Parameters among the outputs of a module, such as a bias that somebody else adds: the caller gets their values,
// because it may ask for shape and status before it computes with them.
void gather_for_caller(ParamGatherer& gatherer, const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (!output.is_leaf()) continue;
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(output));
    if (!py::hasattr(object, "ds_handle")) continue;
    const auto param = object.attr("ds_handle").cast<ShardedParamPtr>();
    py::gil_scoped_release unlocked;
    gatherer.touch(*param);
  }
}

struct EnterHook : ModuleHook {
  py::object operator()(const py::object&, const py::object& args, const py::object& kwargs) const {
    std::shared_ptr<zero::Engine> keep;
    ParamGatherer* gatherer = this->gatherer(keep);
    if (!gatherer) return py::none();
    if (unit >= 0 && gatherer->covers(unit)) return py::none();
    if (linear) linear->enter(unit < 0);
    if (unit < 0) {
      py::gil_scoped_release unlocked;
      gatherer->begin_forward();
    } else {
      const auto inputs = c10::GradMode::is_enabled() ? tensors(args, kwargs) : std::vector<at::Tensor>{};
      py::gil_scoped_release unlocked;
      gatherer->enter(unit, inputs);
    }
    return py::none();
  }
};

struct LeaveHook : ModuleHook {
  py::object operator()(const py::args& args) const {
    std::shared_ptr<zero::Engine> keep;
    ParamGatherer* gatherer = this->gatherer(keep);
    if (unit >= 0 && gatherer && gatherer->covers(unit)) return py::none();
    if (linear) linear->leave(unit < 0);
    if (!gatherer) return py::none();
    const auto outputs = tensors(py::reinterpret_borrow<py::object>(args[args.size() - 1]), py::none());
    const auto in_graph = c10::GradMode::is_enabled() ? outputs : std::vector<at::Tensor>{};
    {
      py::gil_scoped_release unlocked;
      if (unit < 0) {
        gatherer->end_forward(in_graph);
      } else {
        gatherer->leave(unit, in_graph);
      }
    }
    if (unit >= 0) gather_for_caller(*gatherer, outputs);
    return py::none();
  }
};

}  // namespace

DS_BINDINGS(m) {
  py::class_<ShardedParam, ShardedParamPtr>(m, "ShardedParam")
      .def(py::init([](const at::Tensor& tensor, std::string name, int64_t parts, int64_t rank,
                       const py::object& available, const py::object& released) {
             auto param = std::make_shared<ShardedParam>(tensor, std::move(name), parts, rank);
             swap_classes(*param, available, released);
             return param;
           }),
           "tensor"_a, "name"_a, "parts"_a, "rank"_a, "available"_a, "released"_a)
      .def("copy_for",
           [](const ShardedParam& param, const at::Tensor& tensor, const py::object& available,
              const py::object& released) {
             auto copy = std::make_shared<ShardedParam>(tensor, param);
             swap_classes(*copy, available, released);
             return copy;
           })
      .def_property("name", &ShardedParam::name, &ShardedParam::rename)
      .def_readwrite("rule", &ShardedParam::rule)
      .def_property_readonly("sizes", &ShardedParam::sizes)
      .def_property_readonly("numel", &ShardedParam::numel)
      .def_property_readonly("parts", &ShardedParam::parts)
      .def_property_readonly("rank", &ShardedParam::rank)
      .def_property_readonly("slice_numel", &ShardedParam::slice_numel)
      .def_property_readonly("own_begin", &ShardedParam::own_begin)
      .def_property_readonly("own_numel", &ShardedParam::own_numel)
      .def_property_readonly(
          "shard",
          [](const ShardedParam& param) {
            py::gil_scoped_release unlocked;
            return param.slice_tensor();
          },
          "This rank's slice; a copy where it is in a file.")
      .def_property_readonly("dtype", [](const ShardedParam& param) { return dtype_object(param.dtype()); })
      .def_property_readonly("device", [](const ShardedParam& param) { return at::Device(param.device()); })
      .def_property_readonly("offloaded", &ShardedParam::offloaded)
      .def_property_readonly("in_file", &ShardedParam::in_file)
      .def_property_readonly("rests_as_codes", &ShardedParam::rests_as_codes)
      .def_property_readonly("resting_bytes", &ShardedParam::resting_bytes, "Bytes of this rank's slice.")
      .def_property_readonly(
          "second", [](const ShardedParam& param) { return none_for_undefined(param.second_values()); },
          "This rank's part of the second copy (hpZ), flat; None where there is none.")
      .def("set_slice", &ShardedParam::set_slice, "The slice takes the values of a tensor like `shard`.", Unlocked())
      .def_readwrite("id", &ShardedParam::id)
      .def_property_readonly("status", [](const ShardedParam& param) { return static_cast<int>(param.status()); })
      .def_readwrite("persistent", &ShardedParam::persistent)
      .def_readwrite("data_given", &ShardedParam::data_given)
      .def_readonly("holders", &ShardedParam::holders)
      .def("write_back", &ShardedParam::write_back)
      .def("reshaped", &ShardedParam::reshaped)
      .def("adopt_shape", &ShardedParam::adopt_shape)
      .def("cast", [](ShardedParam& param, const py::object& dtype) { param.cast(*optional_dtype(dtype)); });

  py::class_<zero::RemoteSlices>(m, "RemoteSlices", "Where slices go as they are made: 'cpu' or 'nvme'.")
      .def(py::init(
               [](const PyConfig& config, const at::Device& device, const std::string& remote, bool pinned, int rank) {
                 zero::RemoteOptions options = zero::remote_options(config.config, remote, pinned, rank);
                 options.offload.host_numel = 0;
                 return std::make_unique<zero::RemoteSlices>(device, options.placement, options.offload, options.files);
               }),
           "config"_a, "device"_a, "remote"_a, "pinned"_a, "rank"_a)
      .def(
          "take", [](zero::RemoteSlices& slices, const ShardedParamPtr& param) { slices.take(*param); }, Unlocked())
      .def("exit_guard", [](zero::RemoteSlices& slices) { return ExitGuard{slices.storage()}; })
      .def("settle", &zero::RemoteSlices::settle, Unlocked(), "Throws what could not be written.");

  py::class_<ParamGatherer, std::shared_ptr<ParamGatherer>>(m, "ParamGatherer")
      .def(py::init([](const py::object& group) {
             return std::make_shared<ParamGatherer>(
                 std::vector<ShardedParamPtr>{}, zero::collective_source(communicator(group)), zero::GathererOptions{});
           }),
           "group"_a)
      .def(
          "acquire", [](ParamGatherer& g, const std::vector<ShardedParamPtr>& params) { g.acquire(raw(params)); },
          Unlocked())
      .def(
          "release", [](ParamGatherer& g, const std::vector<ShardedParamPtr>& params) { g.release(raw(params)); },
          Unlocked())
      .def("touch", &ParamGatherer::touch, Unlocked())
      .def("written", &ParamGatherer::written, Unlocked())
      .def("forget_written", &ParamGatherer::forget_written)
      .def("before_slice_write", &ParamGatherer::before_slice_write, Unlocked())
      .def("add_unit", &ParamGatherer::add_unit, "name"_a, "params"_a, "block"_a)
      .def("extend_unit", &ParamGatherer::extend_unit)
      .def("release_all", &ParamGatherer::release_all, Unlocked())
      .def("abandon_forward", &ParamGatherer::abandon_forward, Unlocked())
      .def("drain", &ParamGatherer::drain, Unlocked())
      .def("invalidate_copies",
           [](ParamGatherer& g) {
             if (g.copies()) g.copies()->invalidate();
           })
      .def("empty_cache",
           [](ParamGatherer& g) {
             g.release_all();
             g.source().buffers().trim();
           })
      .def("reset_peak", &ParamGatherer::reset_peak)
      .def_property_readonly("has_all", [](ParamGatherer& g) { return g.source().has_all(); })
      .def_property_readonly("looks_ahead", [](ParamGatherer& g) { return g.source().looks_ahead(); })
      .def_property_readonly("max_live", &ParamGatherer::max_live_numel)
      .def_property_readonly("source", [](ParamGatherer& g) { return g.source().name(); })
      .def_property_readonly("live_numel", &ParamGatherer::live_numel)
      .def_property_readonly("peak_live_numel", &ParamGatherer::peak_live_numel)
      .def_property_readonly("fetches", &ParamGatherer::fetches)
      .def_property_readonly("pool_bytes", [](ParamGatherer& g) { return g.source().buffers().idle_bytes(); })
      .def_property_readonly("gathered_elements", [](ParamGatherer& g) { return g.source().gathered_elements(); })
      .def_property_readonly("collectives", [](ParamGatherer& g) { return g.source().collectives(); })
      .def_property_readonly("exchanges", [](ParamGatherer& g) { return g.source().exchanges(); })
      .def("reset_counters", [](ParamGatherer& g) { g.source().reset_counters(); });

  py::class_<LinearScope, LinearScopePtr>(m, "LinearScope",
                                          "The function that is linear of torch.nn.functional "
                                          "while modules with hooks run.")
      .def(py::init([](const py::dict& functions, const py::object& chosen) {
             return std::make_shared<LinearScope>(LinearScope{functions, chosen});
           }),
           "functions"_a, "chosen"_a)
      .def("end", [](LinearScope& scope) { scope.leave(true); });

  py::class_<EnterHook>(m, "EnterHook")
      .def(py::init([](const std::shared_ptr<zero::Engine>& engine, int32_t unit, const LinearScopePtr& linear) {
             return EnterHook{{engine, unit, linear}};
           }),
           "engine"_a, "unit"_a, "linear"_a)
      .def("__call__", &EnterHook::operator(), "module"_a, "args"_a, "kwargs"_a = py::none())
      .def("__deepcopy__", [](const EnterHook& hook, const py::dict&) {
        return EnterHook{{{}, hook.unit, {}}};
      });
  py::class_<LeaveHook>(m, "LeaveHook")
      .def(py::init([](const std::shared_ptr<zero::Engine>& engine, int32_t unit, const LinearScopePtr& linear) {
             return LeaveHook{{engine, unit, linear}};
           }),
           "engine"_a, "unit"_a, "linear"_a)
      .def("__call__", &LeaveHook::operator())
      .def("__deepcopy__", [](const LeaveHook& hook, const py::dict&) {
        return LeaveHook{{{}, hook.unit, {}}};
      });
}

}  // namespace ds::bindings
