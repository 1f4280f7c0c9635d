// The training engine for Python. Everything that computes or waits runs without the GIL: autograd's hooks, other
// threads and other ranks' threads must be able to go on.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/engine/made_step.h"
#include "bindings/ops/optimizer_rules.h"
#include "bindings/config/py_config.h"
#include "bindings/registry.h"
#include "bindings/shared_function.h"
#include "bindings/engine/state_kind.h"
#include "bindings/engine/sharded_params.h"
#include "bindings/torch_types.h"
#include "comm/communicator.h"
#include "comm/process_mesh.h"
#include "zero/engine.h"
#include "zero/states/state_sources.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using zero::BackwardSession;
using zero::Engine;
using zero::StateAccess;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// (tensor, name, parameter group, index in the module, zero::GradForm, shard or None, rule of ranks, axis along which
// an earlier rank has a copy)
using ParamRow =
    std::tuple<at::Tensor, std::string, int32_t, int32_t, int, zero::ShardedParamPtr, std::string, std::string>;
using Pieces = std::vector<c10::optional<at::Tensor>>;  // one for each that this rank owns

// The rule of each parameter group; none: the optimizer has no native rule.
zero::OptimizerRules rules_named(const std::vector<std::optional<std::string>>& names) {
  zero::OptimizerRules rules;
  for (const auto& name : names) rules.push_back(name ? &optim::find_rule(*name) : nullptr);
  return rules;
}

std::shared_ptr<Engine> make_engine(const std::vector<ParamRow>& params,
                                    const std::vector<zero::ShardedParamPtr>& others, comm::ProcessMeshPtr mesh,
                                    const PyConfig& config, int threads, const py::object& grad_dtype,
                                    const std::vector<std::optional<std::string>>& rules,
                                    std::shared_ptr<zero::Window> window, bool codes_weights, bool codes_frozen) {
  const zero::StagePolicy policy = zero::policy_of(config.config);
  std::vector<zero::ParamSpec> specs;
  for (const auto& [tensor, name, group, order, form, shard, rule, copied_along] : params)
    specs.push_back({tensor, name, group, order, policy.shards_params() ? shard : nullptr,
                     static_cast<zero::GradForm>(form), rule, copied_along});
  const int rank = mesh->job().rank(), ranks = mesh->size(plan::same_weights());
  const c10::optional<at::ScalarType> dtype = optional_dtype(grad_dtype);
  zero::MeshSpacesPtr spaces;
  {
    py::gil_scoped_release unlocked;
    spaces = std::make_shared<zero::MeshSpaces>(std::move(mesh), policy, specs, others);
  }
  try {
    const auto options = zero::engine_options(config.config, {threads, ranks, dtype, rank, rules_named(rules), codes_weights,
                                                              codes_frozen});
    py::gil_scoped_release unlocked;
    return std::make_shared<Engine>(std::move(specs), others, options, spaces, std::move(window));
  } catch (const Error& error) {
    // A folder or file that this rank alone cannot make or lock.
    if (error.kind() == ErrorKind::kRuntime) {
      py::gil_scoped_release unlocked;
      spaces->abort(zero::lone_text(*spaces->data_parallel(), error));
    }
    throw;
  }
}

// `rules`: the name of the native optimizer of each parameter group.
void set_rules(Engine& engine, const std::vector<std::string>& names) {
  engine.set_rules(rules_named({names.begin(), names.end()}));
}

// The inputs of a step: zero::StepInputs with the hyperparameters by name, since the rules know their order.
struct PyStepInputs {
  zero::StepInputs step;
  std::vector<std::pair<std::string, std::map<std::string, double>>> groups;  // (rule, {hyperparameter: value})
};

// A Python function as one that the core calls, from a thread that has let go of the GIL.
std::function<void()> callback(const py::object& function) {
  if (function.is_none()) return nullptr;
  return [called = shared_function(py::function(function))] {
    py::gil_scoped_acquire locked;
    (*called)();
  };
}

zero::StepInputs step_inputs(Engine& engine, const PyStepInputs& given) {
  zero::StepInputs inputs = given.step;
  for (size_t group = 0; group < given.groups.size(); ++group) {
    const auto& [name, values] = given.groups[group];
    const optim::Rule& rule = engine.stepper().rule(static_cast<int32_t>(group));
    if (rule.name != name)
      fail(ErrorKind::kRuntime, "parameter group ", group, " was set up for the optimizer '", rule.name,
           "' and is now to be updated by '", name, "', which has other states");
    inputs.hyper.push_back(hyper_values(rule, values));
  }
  return inputs;
}

MadeStep step(Engine& engine, const PyStepInputs& given) {
  MadeStep made{engine.step(step_inputs(engine, given)), {}};
  if (engine.params().storage()->clock()->on()) made.bytes = bytes_of(engine);
  return made;
}

void expect_step(Engine& engine, const PyStepInputs& given) { engine.expect(step_inputs(engine, given)); }

using ScalerState = std::tuple<double, int64_t, int64_t, int64_t>;

std::optional<ScalerState> loss_scale(const MadeStep& report) {
  if (!report.loss_scale) return std::nullopt;
  const optim::LossScaleState& state = *report.loss_scale;
  return ScalerState{state.scale, state.iteration, state.last_overflow_iteration, state.hysteresis_left};
}

c10::optional<at::Tensor> full(Engine& engine, const std::string& kept, int slot, size_t param) {
  const zero::StateKind what = state_kind(kept);
  py::gil_scoped_release unlocked;
  return none_for_undefined(engine.failures().guard([&] { return engine.states().full(what, slot, param); }));
}

void set_full(Engine& engine, const std::string& kept, int slot, size_t param, const at::Tensor& value) {
  const zero::StateKind what = state_kind(kept);
  py::gil_scoped_release unlocked;
  engine.failures().guard([&] { engine.states().set_full(what, slot, param, value); });
}

// A piece for the time of a `with`.
struct LeasedPiece {
  std::function<std::pair<storage::Lease, at::Tensor>()> acquire;
  std::pair<storage::Lease, at::Tensor> held{};
};

LeasedPiece leased_piece(const std::shared_ptr<Engine>& engine, const std::string& kept, int slot, size_t number,
                         const std::string& access) {
  const std::map<std::string, storage::Access> known = {
      {"read", storage::Access::kRead}, {"write", storage::Access::kWrite}, {"update", storage::Access::kUpdate}};
  const auto found = known.find(access);
  if (found == known.end()) fail(ErrorKind::kValue, "access is 'read', 'write' or 'update', not '", access, "'");
  return {[engine, kind = state_kind(kept), slot, number, how = found->second] {
    return engine->states().piece(kind, slot, number, how);
  }};
}

std::vector<std::string> local_nonfinite(Engine& engine) {
  std::vector<std::string> names;
  for (const zero::NonfiniteGrad& one : engine.grads().local_nonfinite_grads())
    names.push_back(engine.params().spec(one.param).name);
  return names;
}

zero::StateSources sources_of(Engine& engine) { return {engine.params(), engine.states()}; }

// A method of a part of the engine, as one of the engine's. What this rank alone cannot do, the others hear of.
template <typename Part, typename Result, typename... Arguments>
auto of(Part& (Engine::*part)(), Result (Part::*method)(Arguments...)) {
  return [part, method](Engine& engine, Arguments... arguments) -> Result {
    return engine.failures().guard(
        [&]() -> Result { return ((engine.*part)().*method)(std::forward<Arguments>(arguments)...); });
  };
}

}  // namespace

DS_BINDINGS(m) {
  py::module_::import("torch.distributed");  // registers ProcessGroup

  py::class_<MadeStep>(m, "StepReport")
      .def_readonly("bytes", &MadeStep::bytes)
      .def_readonly("norm", &zero::StepReport::norm)
      .def_readonly("skipped", &zero::StepReport::skipped)
      .def_readonly("nonfinite", &zero::StepReport::nonfinite)
      .def_readonly("written", &zero::StepReport::written)
      .def_property_readonly("loss_scale", &loss_scale);

  py::class_<PyStepInputs>(m, "StepInputs")
      .def(py::init([](float loss_scale, float max_norm, bool check, bool name_nonfinite,
                       const py::object& before_update, bool norm_first) {
             PyStepInputs made;
             made.step = {loss_scale, max_norm, check, name_nonfinite, {}, callback(before_update), norm_first,
                          {},         {},       {}};
             return made;
           }),
           py::kw_only(), "loss_scale"_a, "max_norm"_a, "check"_a, "name_nonfinite"_a, "before_update"_a,
           "norm_first"_a)
      .def(
          "set_scaler",
          [](PyStepInputs& inputs, const optim::LossScaleRules& rules, const ScalerState& state) {
            const auto& [scale, iteration, last_overflow, hysteresis] = state;
            inputs.step.scaler = {rules, {scale, iteration, last_overflow, hysteresis}};
          },
          "rules"_a, "state"_a)
      .def_readwrite("groups", &PyStepInputs::groups)
      .def(
          "set_outside",
          [](PyStepInputs& inputs, std::vector<at::Tensor> masters, const py::object& update) {
            inputs.step.masters = std::move(masters);
            inputs.step.outside = callback(update);
          },
          "masters"_a, "update"_a);

  py::class_<ExitGuard>(m, "ExitGuard").def("__call__", [](const ExitGuard& guard) {
    if (const auto storage = guard.storage.lock()) storage->at_exit();
  });
  py::class_<LeasedPiece>(m, "LeasedPiece")
      .def("__enter__",
           [](LeasedPiece& piece) {
             {
               py::gil_scoped_release unlocked;
               piece.held = piece.acquire();
             }
             return none_for_undefined(at::Tensor(piece.held.second));
           })
      .def("__exit__", [](LeasedPiece& piece, const py::args&) {
        piece.held.second.reset();
        py::gil_scoped_release unlocked;
        piece.held.first.release();
      });

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init(&make_engine), py::kw_only(), "params"_a, "others"_a, "mesh"_a, "config"_a, "threads"_a,
           "grad_dtype"_a, "rules"_a, "window"_a, "codes_weights"_a = false, "codes_frozen"_a = false)
      .def_property_readonly("window", [](Engine& engine) { return engine.backward().window(); })
      .def("register_hooks", of(&Engine::backward, &BackwardSession::register_hooks))
      .def("forwarded", of(&Engine::backward, &BackwardSession::forwarded), Unlocked(), "outputs"_a)
      .def("step", &step, Unlocked(), "inputs"_a)
      .def("hook_input", of(&Engine::backward, &BackwardSession::hook_input), "input"_a)
      .def(
          "begin_backward",
          // optional: torch 1.13 takes no None for a tensor
          [](Engine& engine, const c10::optional<at::Tensor>& root) {
            engine.failures().guard(
                [&] { engine.backward().begin(engine.backward().window()->reduces(), root.value_or(at::Tensor())); });
          },
          Unlocked(), "root"_a = py::none())
      .def("end_backward", of(&Engine::backward, &BackwardSession::end), Unlocked())
      .def("abort_backward", of(&Engine::backward, &BackwardSession::abort), Unlocked())
      .def("abort_backward_together", of(&Engine::backward, &BackwardSession::abort_together), Unlocked())
      .def("finish_backward", of(&Engine::backward, &BackwardSession::finish), Unlocked())
      .def("unused_params", &Engine::unused_params, Unlocked())
      .def("join_backward", of(&Engine::backward, &BackwardSession::join), Unlocked(), "reduce"_a)
      .def("clear_grads", &Engine::clear_grads, Unlocked())
      .def("code_frozen", &Engine::code_frozen, Unlocked())
      .def("forget_errors", [](Engine& engine) { engine.grads().forget_errors(); })
      .def("adopt_grads", of(&Engine::backward, &BackwardSession::adopt_grads), Unlocked())
      .def("set_postscale", [](Engine& engine, double scale) { engine.grads().options().postscale = scale; })
      .def_property_readonly("predivide", [](Engine& engine) { return engine.grads().options().predivide; })
      .def(
          "step_norm", [](Engine& engine) { return engine.stepper().report().norm; }, Unlocked(),
          "In before_update of a step: the norm that it has found.")
      .def("local_nonfinite", &local_nonfinite, "Parameters whose gradients autograd has made inf or nan on this rank.")
      .def("set_rules", &set_rules, "rules"_a)
      .def("slot_names", [](Engine& engine) { return engine.states().slot_names(); })
      .def("strategy_states", [](Engine& engine) { return engine.strategy().state_names(); })
      .def("expect_step", &expect_step, Unlocked(), "inputs"_a)
      .def_property_readonly("expects_steps", [](Engine& engine) { return engine.strategy().expects(); })
      .def(
          "strategy_counters",
          [](Engine& engine) {
            zero::Counters found = engine.strategy().counters();
            found.merge(engine.stepper().sums().kept());
            found.merge(engine.stepper().compressed().counters());
            return found;
          },
          Unlocked())
      .def("restore_strategy", of(&Engine::states, &StateAccess::restore_strategy), Unlocked(), "counters"_a)
      .def(
          "set_steps_per_epoch", [](Engine& engine, int64_t steps) { engine.strategy().set_steps_per_epoch(steps); },
          "steps"_a)
      .def("strategy_figures", [](Engine& engine) { return engine.strategy().figures(); })
      .def(
          "local_grad",
          [](Engine& engine, size_t param) { return none_for_undefined(engine.states().local_grad(param)); },
          Unlocked(), "param"_a)
      .def("set_local_grad", of(&Engine::states, &StateAccess::set_local_grad), Unlocked(), "param"_a, "value"_a)
      .def(
          "set_grad_dtype",
          [](Engine& engine, const py::object& type) {
            const auto wanted = optional_dtype(type);
            py::gil_scoped_release unlocked;
            engine.failures().guard([&] { engine.grads().set_grad_dtype(wanted); });
          },
          "dtype"_a)
      .def(
          "has_grads", [](Engine& engine) { return engine.grads().any(); }, Unlocked())
      .def(
          "publish", [](Engine& engine) { engine.failures().guard([&] { engine.states().publish(); }); }, Unlocked())
      .def("refresh_master", of(&Engine::states, &StateAccess::refresh_master), Unlocked())
      .def(
          "hold_states", [](Engine& engine) { engine.failures().guard([&] { engine.states().hold_states(); }); },
          Unlocked())
      .def(
          "release_states", [](Engine& engine) { engine.states().hold().let_go(); }, Unlocked())
      .def(
          "wait_for_states", [](Engine& engine) { engine.states().hold().wait(); }, Unlocked())
      .def("broadcast", &Engine::broadcast, Unlocked())
      .def_property_readonly("gatherer",
                             [](const std::shared_ptr<Engine>& engine) -> std::shared_ptr<zero::ParamGatherer> {
                               if (!engine->gatherer()) return nullptr;
                               return {engine, engine->gatherer()};
                             })
      .def("release", &Engine::release, Unlocked())
      .def(
          "masters",
          [](Engine& engine, bool copies) { return engine.states().pieces(zero::StateKind::kMaster, 0, copies); },
          Unlocked(), "copies"_a = false)
      .def(
          "grads",
          [](Engine& engine, bool copies) { return engine.states().pieces(zero::StateKind::kGrad, 0, copies); },
          Unlocked(), "copies"_a = false)
      .def(
          "slots",
          [](Engine& engine, int slot, bool copies) {
            std::vector<c10::optional<at::Tensor>> result;
            for (at::Tensor& piece : engine.states().pieces(zero::StateKind::kSlot, slot, copies))
              result.push_back(none_for_undefined(std::move(piece)));
            return result;
          },
          Unlocked(), "slot"_a, "copies"_a = false)
      .def("piece", &leased_piece, "kept"_a, "slot"_a, "number"_a, "access"_a,
           "A context: the tensor of one piece, wherever it rests. access: 'read', 'write' (all of it), 'update'.")
      .def(
          "piece_tensor",
          [](Engine& engine, const std::string& kept, int slot, size_t number) {
            return none_for_undefined(engine.states().piece_tensor(state_kind(kept), slot, number));
          },
          Unlocked(), "kept"_a, "slot"_a, "number"_a,
          "A view of one piece, a copy of what lies in a file; None where its group has no such slot.")
      .def(
          "planes",
          [](Engine& engine, const std::string& what) {
            std::vector<std::pair<int32_t, int64_t>> found;
            for (const auto& [plane, bytes] : engine.params().planes(what)) found.emplace_back(plane.number, bytes);
            return found;
          },
          "what"_a, "[(plane of the storage, bytes)] of lp, master, grad or slots.")
      .def(
          "trim_wire", [](Engine& engine) { engine.grads().trim(); }, Unlocked())
      .def("exit_guard", [](Engine& engine) { return ExitGuard{engine.params().storage()}; })
      .def("pieces",
           [](Engine& engine) {
             std::vector<std::tuple<int32_t, int64_t, int64_t>> result;
             for (const zero::Piece& piece : engine.params().pieces())
               result.emplace_back(piece.param, piece.param_offset, piece.numel);
             return result;
           })
      .def("full", &full, "kept"_a, "slot"_a, "param"_a)
      .def("set_full", &set_full, "kept"_a, "slot"_a, "param"_a, "value"_a)
      .def(
          "full_of",
          [](Engine& engine, const Pieces& own, size_t param) {
            return none_for_undefined(engine.states().full_of(undefined_for_none(own), param));
          },
          Unlocked(), "own"_a, "param"_a)
      .def(
          "set_full_of",
          [](Engine& engine, const Pieces& own, size_t param, const at::Tensor& value) {
            engine.states().set_full_of(undefined_for_none(own), param, value);
          },
          Unlocked(), "own"_a, "param"_a, "value"_a)
      .def(
          "padded_slices",
          [](Engine& engine, const Pieces& own, const std::vector<size_t>& params) {
            return engine.states().padded_slices(undefined_for_none(own), params);
          },
          Unlocked(), "own"_a, "params"_a)
      .def(
          "slice_source",
          [](const std::shared_ptr<Engine>& engine, const std::string& kept, int slot,
             const std::vector<size_t>& params) -> io::SourcePtr {
            return sources_of(*engine).padded(engine, state_kind(kept), slot, params);
          },
          "kept"_a, "slot"_a, "params"_a, "padded_slices, read when it is written down.")
      .def(
          "piece_source",
          [](const std::shared_ptr<Engine>& engine, const std::string& kept, int slot, size_t number) -> io::SourcePtr {
            return sources_of(*engine).piece(engine, state_kind(kept), slot, number);
          },
          "kept"_a, "slot"_a, "number"_a, "A piece, as fp32, read when it is written down.")
      .def(
          "piece_in_file",
          [](Engine& engine, const std::string& kept, int slot, size_t number) {
            return none_for_undefined(sources_of(engine).piece_in_file(state_kind(kept), slot, number));
          },
          Unlocked(), "kept"_a, "slot"_a, "number"_a,
          "Its shape and dtype, a tensor of the device \"meta\"; None where it does not rest in a file.")
      .def(
          "rest_in_files", [](Engine& engine) { return sources_of(engine).rest_in_files(); }, Unlocked(),
          "Whether masters or optimizer states do.")
      .def_property_readonly("storage", [](Engine& engine) { return engine.params().storage(); })
      .def_property_readonly("clock", [](Engine& engine) { return engine.params().storage()->clock(); })
      .def("held_bytes",
           [](Engine& engine) {
             py::dict result;
             for (const auto& [what, bytes] : engine.params().held_bytes()) result[py::str(what)] = bytes;
             return result;
           })
      .def("absent_grad_bytes", [](Engine& engine) { return engine.params().absent_grad_bytes(); })
      .def_property_readonly("communicators", [](Engine& engine) { return engine.spaces().communicators(); })
      .def("traffic",
           [](Engine& engine) {
             const comm::Traffic& traffic = engine.spaces().data_parallel()->traffic();
             py::dict result;
             result["calls"] = traffic.calls;
             result["elements"] = traffic.elements;
             result["bytes"] = traffic.bytes;
             return result;
           })
      .def("reset_traffic", [](Engine& engine) { engine.spaces().data_parallel()->reset_traffic(); })
      .def_property_readonly("policy", &Engine::policy, py::return_value_policy::reference)
      .def_property_readonly("communicator", [](Engine& engine) { return engine.spaces().data_parallel()->name(); })
      .def("used",
           [](Engine& engine) {
             std::vector<bool> used;
             for (size_t param = 0; param < engine.params().size(); ++param) used.push_back(engine.grads().used(param));
             return used;
           })
      .def("sums", [](Engine& engine) { return none_for_undefined(at::Tensor(engine.stepper().sums().rows())); })
      .def("steps", [](Engine& engine) { return engine.stepper().steps(); })
      .def("learned_fires", [](Engine& engine) { return engine.grads().grad_uses().learned(); })
      .def(
          "set_learned_fires",
          [](Engine& engine, const std::vector<int32_t>& expected) {
            engine.grads().grad_uses().set_learned(expected);
          },
          "expected"_a)
      .def_property_readonly("peak_borrowed_bytes", [](Engine& engine) { return engine.grads().memory().peak_bytes(); })
      .def_property_readonly("late_count", [](Engine& engine) { return engine.grads().counts().late; });
}

}  // namespace ds::bindings
