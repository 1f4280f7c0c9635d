// The training engine for Python. Everything that computes or waits runs without the GIL: autograd's hooks, other
// threads and other ranks' threads must be able to go on.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/registry.h"
#include "bindings/shared_function.h"
#include "bindings/optimizer_rules.h"
#include "bindings/sharded_params.h"
#include "bindings/torch_types.h"
#include "bindings/without_lock.h"
#include "comm/c10d_communicator.h"
#include "comm/local_communicator.h"
#include "zero/engine.h"

namespace py = pybind11;

namespace ds::bindings {

comm::CommunicatorPtr communicator(const py::object& group) {
  if (group.is_none()) return comm::local_communicator();
  if (py::isinstance<comm::Communicator>(group)) return group.cast<comm::CommunicatorPtr>();
  auto native = group.cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
  return comm::c10d_communicator(std::move(native), without_lock);
}

namespace {

using zero::Engine;
using Unlocked = py::call_guard<py::gil_scoped_release>;

std::vector<zero::ParamSpec> param_specs(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names,
                                         const std::vector<int32_t>& groups, const std::vector<int32_t>& orders,
                                         const std::vector<bool>& counts_in_norm,
                                         const std::vector<zero::ShardedParamPtr>& sharded,
                                         const std::vector<int>& grad_forms) {
  std::vector<zero::ParamSpec> specs;
  for (size_t i = 0; i < tensors.size(); ++i)
    specs.push_back({tensors[i], names.at(i), groups.at(i), orders.at(i), counts_in_norm.at(i),
                     sharded.empty() ? nullptr : sharded.at(i), static_cast<zero::GradForm>(grad_forms.at(i))});
  return specs;
}

std::shared_ptr<Engine> make_engine(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names,
                                    const std::vector<int32_t>& groups, const std::vector<int32_t>& orders,
                                    const std::vector<bool>& counts_in_norm, const py::object& data_parallel,
                                    const py::object& model_parallel, int stage, int threads,
                                    const py::object& grad_dtype, const py::object& comm_dtype, int64_t bucket_numel,
                                    bool overlap, double predivide, double postscale, bool find_nonfinite_grads,
                                    bool scatter, bool allgather, int64_t allgather_bucket_numel,
                                    const std::vector<zero::ShardedParamPtr>& sharded,
                                    const std::vector<zero::ShardedParamPtr>& others, const py::object& gathers,
                                    int64_t max_live, int64_t max_reuse, int64_t persistence, int64_t model_persistence,
                                    int64_t prefetch, const py::object& replicas, const std::vector<int>& grad_forms) {
  zero::EngineOptions options;
  options.stage = stage;
  options.threads = threads;
  options.grad_dtype = optional_dtype(grad_dtype);
  options.reducer.bucket_numel = bucket_numel;
  options.reducer.overlap = overlap;
  options.reducer.predivide = static_cast<float>(predivide);
  options.reducer.postscale = static_cast<float>(postscale);
  options.reducer.comm_dtype = optional_dtype(comm_dtype);
  options.reducer.find_nonfinite_grads = find_nonfinite_grads;
  options.reducer.scatter = scatter;
  options.gather.overlap = overlap;
  options.gather.collective = allgather;
  options.allgather_bucket_numel = allgather_bucket_numel;
  options.others = others;
  if (!gathers.is_none())
    options.gathers = [open = shared_function(py::function(gathers))] {
      py::gil_scoped_acquire locked;
      return communicator((*open)());
    };
  options.gatherer = {max_live, max_reuse, persistence, model_persistence, prefetch};
  if (!replicas.is_none()) options.replicas = communicator(replicas);
  auto specs = param_specs(tensors, names, groups, orders, counts_in_norm, sharded, grad_forms);
  auto dp = communicator(data_parallel);
  auto mp = model_parallel.is_none() ? nullptr : communicator(model_parallel);
  py::gil_scoped_release unlocked;
  return std::make_shared<Engine>(std::move(specs), options, std::move(dp), std::move(mp));
}

// `rules`: the name of the native optimizer of each parameter group.
void set_rules(Engine& engine, const std::vector<std::string>& names) {
  std::vector<const optim::Rule*> rules;
  for (const std::string& name : names) rules.push_back(&optim::find_rule(name));
  engine.stepper().set_rules(std::move(rules));
}

// `groups`: one (rule, {hyperparameter: value}) for each parameter group. `begin`: the arguments of begin_step, which
// is then called first.
void update(Engine& engine, const std::vector<std::pair<std::string, std::map<std::string, double>>>& groups,
            const std::optional<std::tuple<float, float, bool>>& begin) {
  py::gil_scoped_release unlocked;
  if (begin) engine.begin_step(std::get<0>(*begin), std::get<1>(*begin), std::get<2>(*begin));
  std::vector<std::vector<double>> hyper;
  for (size_t group = 0; group < groups.size(); ++group) {
    const optim::Rule& rule = engine.stepper().rule(static_cast<int32_t>(group));
    if (rule.name != groups[group].first)
      fail(ErrorKind::kRuntime, "parameter group ", group, " was set up for the optimizer '", rule.name,
           "' and is now to be updated by '", groups[group].first, "', which has other states");
    hyper.push_back(hyper_values(rule, groups[group].second));
  }
  engine.update(hyper);
}

zero::Kept kept_of(const std::string& name) {
  if (name == "master") return zero::Kept::kMaster;
  if (name == "grad") return zero::Kept::kGrad;
  if (name == "slot") return zero::Kept::kSlot;
  fail(ErrorKind::kValue, "kept is 'master', 'grad' or 'slot', not '", name, "'");
}

c10::optional<at::Tensor> full(Engine& engine, const std::string& kept, int slot, size_t param) {
  const zero::Kept what = kept_of(kept);
  py::gil_scoped_release unlocked;
  at::Tensor found = engine.full(what, slot, param);
  return found.defined() ? c10::optional<at::Tensor>(std::move(found)) : c10::nullopt;
}

void set_full(Engine& engine, const std::string& kept, int slot, size_t param, const at::Tensor& value) {
  const zero::Kept what = kept_of(kept);
  py::gil_scoped_release unlocked;
  engine.set_full(what, slot, param, value);
}

}  // namespace

DS_BINDINGS(m) {
  py::module_::import("torch.distributed");  // registers ProcessGroup

  py::class_<zero::StepReport>(m, "StepReport")
      .def_readonly("norm", &zero::StepReport::norm)
      .def_readonly("grad_scale", &zero::StepReport::grad_scale)
      .def_readonly("skipped", &zero::StepReport::skipped);

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init(&make_engine), py::kw_only(), py::arg("tensors"), py::arg("names"), py::arg("groups"),
           py::arg("orders"), py::arg("counts_in_norm"), py::arg("data_parallel"), py::arg("model_parallel"),
           py::arg("stage"), py::arg("threads"), py::arg("grad_dtype"), py::arg("comm_dtype"), py::arg("bucket_numel"),
           py::arg("overlap"), py::arg("predivide"), py::arg("postscale"), py::arg("find_nonfinite_grads"),
           py::arg("scatter"), py::arg("allgather"), py::arg("allgather_bucket_numel"), py::arg("sharded"),
           py::arg("others"), py::arg("gathers"), py::arg("max_live"), py::arg("max_reuse"), py::arg("persistence"),
           py::arg("model_persistence"), py::arg("prefetch"), py::arg("replicas"), py::arg("grad_forms"))
      .def("forwarded", &Engine::forwarded, Unlocked(), py::arg("outputs"), py::arg("reduce"), py::arg("factor"))
      .def("begin_step", &Engine::begin_step, Unlocked(), py::arg("loss_scale"), py::arg("max_norm"), py::arg("check"))
      .def("end_step", &Engine::end_step, Unlocked())
      .def("gate_input", &Engine::gate_input, py::arg("input"))
      .def("set_outer_factor", &Engine::set_outer_factor, py::arg("factor"))
      .def("plan_user_backward", &Engine::plan_user_backward, py::arg("reduce"), py::arg("factor"))
      .def(
          "begin_backward",
          // optional: torch 1.13 takes no None for a tensor
          [](Engine& engine, bool reduce, const c10::optional<at::Tensor>& root) {
            engine.begin_backward(reduce, root.value_or(at::Tensor()));
          },
          Unlocked(), py::arg("reduce"), py::arg("root") = py::none())
      .def("end_backward", &Engine::end_backward, Unlocked())
      .def("abort_backward", &Engine::abort_backward, Unlocked())
      .def("finish_backward", &Engine::finish_backward, Unlocked())
      .def("join_backward", &Engine::join_backward, Unlocked(), py::arg("reduce"))
      .def("clear_grads", &Engine::clear_grads, Unlocked())
      .def("adopt_grads", &Engine::adopt_grads, Unlocked())
      .def("set_postscale", [](Engine& engine, float scale) { engine.grads().set_postscale(scale); })
      .def("set_rules", &set_rules, py::arg("rules"))
      .def("update", &update, py::arg("groups"), py::arg("begin") = py::none())
      .def("slot_names", [](Engine& engine) { return engine.stepper().slot_names(); })
      .def("report", &Engine::report, Unlocked())
      .def("assign_optimizer_grads", &Engine::assign_optimizer_grads, Unlocked())
      .def(
          "local_grad",
          [](Engine& engine, size_t param) {
            at::Tensor found = engine.local_grad(param);
            return found.defined() ? c10::optional<at::Tensor>(std::move(found)) : c10::nullopt;
          },
          Unlocked(), py::arg("param"))
      .def("take_back_grads", &Engine::take_back_grads, Unlocked())
      .def(
          "set_grad_dtype",
          [](Engine& engine, const py::object& type) {
            const auto wanted = optional_dtype(type);
            py::gil_scoped_release unlocked;
            engine.set_grad_dtype(wanted);
          },
          py::arg("dtype"))
      .def(
          "has_grads", [](Engine& engine) { return engine.grads().any(); }, Unlocked())
      .def(
          "publish", [](Engine& engine) { engine.stepper().publish(); }, Unlocked())
      .def("refresh_master", &Engine::refresh_master, Unlocked())
      .def("hold_states", [](Engine& engine) { engine.hold().hold(); })
      .def("let_states_go", [](Engine& engine) { engine.hold().let_go(); })
      .def(
          "wait_for_states", [](Engine& engine) { engine.hold().wait(); }, Unlocked())
      .def("broadcast", &Engine::broadcast, Unlocked())
      .def("finish_step", &Engine::finish_step, Unlocked())
      .def("begin_write", &Engine::begin_write, Unlocked())
      .def("end_write", &Engine::end_write, Unlocked())
      .def_property_readonly("communicators", &Engine::communicators)
      .def_property_readonly("gatherer",
                             [](const std::shared_ptr<Engine>& engine) -> std::shared_ptr<zero::ParamGatherer> {
                               if (!engine->gatherer()) return nullptr;
                               return {engine, engine->gatherer()};
                             })
      .def("release", &Engine::release, Unlocked())
      .def(
          "masters", [](Engine& engine) { return engine.pieces(zero::Kept::kMaster, 0); }, Unlocked())
      .def(
          "grads", [](Engine& engine) { return engine.pieces(zero::Kept::kGrad, 0); }, Unlocked())
      .def(
          "slots",
          [](Engine& engine, int slot) {
            std::vector<c10::optional<at::Tensor>> result;
            for (at::Tensor& piece : engine.pieces(zero::Kept::kSlot, slot))
              result.push_back(piece.defined() ? c10::optional<at::Tensor>(std::move(piece)) : c10::nullopt);
            return result;
          },
          Unlocked())
      .def("pieces",
           [](Engine& engine) {
             std::vector<std::tuple<int32_t, int64_t, int64_t>> result;
             for (const zero::Piece& piece : engine.params().pieces())
               result.emplace_back(piece.param, piece.param_offset, piece.numel);
             return result;
           })
      .def("full", &full, py::arg("kept"), py::arg("slot"), py::arg("param"))
      .def("set_full", &set_full, py::arg("kept"), py::arg("slot"), py::arg("param"), py::arg("value"))
      .def("held_bytes",
           [](Engine& engine) {
             py::dict result;
             for (const auto& [what, bytes] : engine.params().held_bytes()) result[py::str(what)] = bytes;
             return result;
           })
      .def("traffic",
           [](Engine& engine) {
             const comm::Traffic& traffic = engine.data_parallel().traffic();
             py::dict result;
             result["calls"] = traffic.calls;
             result["elements"] = traffic.elements;
             result["bytes"] = traffic.bytes;
             return result;
           })
      .def("reset_traffic", &Engine::reset_traffic)
      .def_property_readonly("communicator", [](Engine& engine) { return engine.data_parallel().name(); })
      .def("used",
           [](Engine& engine) {
             std::vector<bool> used;
             for (size_t param = 0; param < engine.params().size(); ++param) used.push_back(engine.grads().used(param));
             return used;
           })
      .def("sums",
           [](Engine& engine) {
             const at::Tensor& sums = engine.stepper().sums();
             return sums.defined() ? c10::optional<at::Tensor>(sums) : c10::nullopt;
           })
      .def("steps", [](Engine& engine) { return engine.stepper().steps(); })
      .def("learned_fires", [](Engine& engine) { return engine.grads().learned(); })
      .def(
          "set_learned_fires",
          [](Engine& engine, const std::vector<int32_t>& expected) { engine.grads().set_learned(expected); },
          py::arg("expected"))
      .def("nonfinite_grads",
           [](Engine& engine) {
             std::vector<std::pair<std::string, std::string>> result;
             std::vector<zero::GradReducer::NonfiniteGrad> found;
             {
               py::gil_scoped_release unlocked;  // waits for the device
               found = engine.grads().local_nonfinite_grads();
             }
             for (const auto& nonfinite : found)
               result.emplace_back(engine.params().spec(nonfinite.param).name, nonfinite.nan ? "nan" : "inf");
             return result;
           })
      .def_property_readonly("peak_borrowed_bytes", [](Engine& engine) { return engine.grads().peak_borrowed_bytes(); })
      .def_property_readonly("late_count", [](Engine& engine) { return engine.grads().late_count(); })
      .def_property_readonly("overlapped_count", [](Engine& engine) { return engine.grads().overlapped_count(); });
}

}  // namespace ds::bindings
