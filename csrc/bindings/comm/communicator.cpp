// A group of ranks as the native engine uses it. Python makes one from a process group, hands it to an engine and keeps
// it to read its log.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <optional>

#include "base/clock.h"
#include "base/error.h"
#include "bindings/registry.h"
#include "bindings/engine/sharded_params.h"
#include "comm/decorators/logged.h"
#include "comm/decorators/watched.h"
#include "comm/nccl/nccl_tensors.h"
#include "comm/scripts/c10d_backend.h"
#include "comm/scripts/script_calls.h"
#include "comm/transports/c10d_communicator.h"
#include "comm/transports/counted_communicator.h"
#include "comm/transports/local_communicator.h"
#include "comm/transports/nccl_communicator.h"
#include "comm/transports/shm_communicator.h"

namespace py = pybind11;

namespace ds::bindings {

comm::CommunicatorPtr communicator(const py::object& group, comm::GlooBy gloo_by) {
  if (group.is_none()) return comm::local_communicator();
  if (py::isinstance<comm::Communicator>(group)) return group.cast<comm::CommunicatorPtr>();
  auto made = group.cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
  return comm::c10d_communicator(std::move(made), gloo_by);
}

namespace {

using comm::Communicator;
using Unlocked = py::call_guard<py::gil_scoped_release>;

comm::Verb verb_named(const std::string& name) {
  for (int verb = 0; verb < comm::kVerbs; ++verb)
    if (name == comm::verb_name(static_cast<comm::Verb>(verb))) return static_cast<comm::Verb>(verb);
  fail(ErrorKind::kValue, "there is no collective '", name, "'; use one of ", comm::verb_names());
}

comm::ReduceOp reduction_named(const std::string& name) {
  constexpr std::pair<const char*, comm::ReduceOp> kNames[] = {
      {"sum", comm::ReduceOp::kSum}, {"avg", comm::ReduceOp::kAvg}, {"product", comm::ReduceOp::kProduct},
      {"min", comm::ReduceOp::kMin}, {"max", comm::ReduceOp::kMax}, {"band", comm::ReduceOp::kAnd},
      {"bor", comm::ReduceOp::kOr},  {"bxor", comm::ReduceOp::kXor}};
  for (const auto& [known, op] : kNames)
    if (name == known) return op;
  fail(ErrorKind::kValue, "there is no reduction '", name,
       "'; sum, avg, product, min, max, band, bor and bxor are there");
}

c10::intrusive_ptr<c10d::Work> call_op(comm::ScriptCalls& self, const std::string& verb, std::vector<at::Tensor> given,
                                       std::vector<at::Tensor> taken, bool detached, const std::string& op, int peer,
                                       const std::pair<std::vector<int64_t>, std::vector<int64_t>>& splits, int tag) {
  return self.run({verb_named(verb), std::move(given), std::move(taken), splits.first, splits.second,
                   reduction_named(op), peer, detached, tag});
}

// The uses that a caller makes of a communicator over a group of torch.
struct Use {
  bool shared = false;     // through the memory of one host where the ranks share it
  bool scripts = false;    // for ScriptCalls, whose handles may be asked and dropped
  bool on_device = false;  // tensors are on devices, whose backend the group has
  milliseconds timeout{0};
};

comm::CommunicatorPtr opened(const py::object& group, const Use& use, const std::optional<comm::GroupFacts>& given,
                             const std::optional<c10::intrusive_ptr<c10d::Store>>& store,
                             const std::shared_ptr<comm::NcclTensors>& nccl) {
  auto made = communicator(group, use.on_device ? comm::GlooBy::kNothing
                                  : use.scripts ? comm::GlooBy::kCollectives
                                                : comm::GlooBy::kTransfers);
  py::gil_scoped_release unlocked;
  const auto* known = dynamic_cast<const comm::LoggedCommunicator*>(made.get());
  const std::string named = known ? known->group() : given ? given->name : "";
  const comm::GroupFacts facts = given.value_or(comm::GroupFacts{});
  if (nccl)
    made = comm::nccl_communicator(nccl->pointer(), comm::one_host_communicator(std::move(made), use.timeout, facts));
  if (use.scripts && use.shared) made = comm::exchanges_by_hosts(std::move(made), use.timeout, facts);
  if (store && made->size() > 1) {
    auto board =
        std::make_shared<comm::StoreBoard>(*store, made->rank(), made->size(), use.timeout, made->name(), facts);
    if (facts.store_watch) facts.store_watch->add(board);
    made = comm::watched(std::move(made), std::move(board));
  }
  if (use.shared)
    made = use.scripts ? comm::one_host_communicator(std::move(made), use.timeout, facts)
                       : comm::shm_communicator(std::move(made), use.timeout, facts);
  return comm::logged(std::move(made), facts.log, named);
}

comm::WorkPtr run_op(Communicator& self, const std::string& verb, const std::optional<at::Tensor>& input,
                     const std::optional<at::Tensor>& output,
                     const std::pair<std::vector<int64_t>, std::vector<int64_t>>& counts, const std::string& op,
                     int peer, const std::string& tag) {
  comm::Op call{verb_named(verb), {}, {}, counts.first, counts.second, reduction_named(op), peer, tag};
  if (input) call.in = input->detach();
  if (output) call.out = output->detach();
  return self.run(call);
}

}  // namespace

DS_BINDINGS(m) {
  py::module_::import("torch.distributed");  // registers torch's handles
  py::class_<comm::Work, comm::WorkPtr>(m, "CommunicatorWork")
      .def("wait", &comm::Work::wait, Unlocked())
      .def("ready", &comm::Work::ready);
  py::class_<Communicator, comm::CommunicatorPtr>(m, "Communicator")
      // group: of torch, a Communicator, or None. store: of this group alone, for the boards of ranks that do not share
      // a host. nccl: carries tensors on devices. The others: see Use.
      .def(py::init([](const py::object& group, bool shared, milliseconds timeout,
                       const std::optional<comm::GroupFacts>& facts,
                       const std::optional<c10::intrusive_ptr<c10d::Store>>& store, bool scripts, bool on_device,
                       const std::shared_ptr<comm::NcclTensors>& nccl) {
             return opened(group, {shared, scripts, on_device, timeout}, facts, store, nccl);
           }),
           "group"_a, "shared"_a = false, "timeout"_a = milliseconds(30 * 60 * 1000), "facts"_a = py::none(),
           "store"_a = py::none(), "scripts"_a = false, "on_device"_a = false, "nccl"_a = nullptr)
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      // verb: all_reduce, ...; which tensors it uses, csrc/comm/calls/op.h. counts: of the parts of input and output,
      // [] where they are equal.
      .def("run", &run_op, "verb"_a, "input"_a = py::none(), "output"_a = py::none(),
           "counts"_a = std::pair<std::vector<int64_t>, std::vector<int64_t>>(), "op"_a = "sum", "peer"_a = -1,
           "tag"_a = "", Unlocked())
      .def("leave", &Communicator::leave, Unlocked());
  // One rank of a group whose other ranks do not exist (comm/transports/counted_communicator.h).
  m.def(
      "counted_communicator",
      [](int rank, int size, std::shared_ptr<comm::CallLog> log, const std::string& group,
         std::shared_ptr<plan::StepPlan> step, const plan::LinkCost& link, std::function<void(int64_t)> touched,
         const std::optional<c10::intrusive_ptr<c10d::Store>>& peers) {
        comm::CountedTime time{std::move(step), link, std::move(touched)};
        return comm::logged(
            comm::counted_communicator(rank, size, group, std::move(time), peers.value_or(comm::PlannedPeers())),
            std::move(log), group);
      },
      "rank"_a, "size"_a, "log"_a, "group"_a, "step"_a, "link"_a, "touched"_a = nullptr, "peers"_a = py::none());
  // As scripts call torch.distributed, with torch's handles (comm/scripts/script_calls.h).
  py::class_<comm::ScriptCalls>(m, "ScriptCalls")
      .def(py::init<comm::CommunicatorPtr>(), "communicator"_a)
      .def("call", &call_op, "verb"_a, "given"_a, "taken"_a, "detached"_a = false, "op"_a = "sum", "peer"_a = -1,
           "splits"_a = std::pair<std::vector<int64_t>, std::vector<int64_t>>(), "tag"_a = 0, Unlocked())
      .def_property_readonly_static("ANY_RANK", [](const py::object&) { return comm::kAnyRank; });
  // A backend of torch.distributed (comm/scripts/c10d_backend.h).
  m.def("c10d_backend", &comm::c10d_backend, "communicator"_a, "other"_a.none(true), "name"_a, Unlocked());
  m.def("communicator_of", &comm::communicator_of, "backend"_a);
}

}  // namespace ds::bindings
