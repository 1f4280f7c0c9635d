// Grids of ranks and the mesh of an engine, for comm/mesh.py and comm/mesh_views.py.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "bindings/shared_function.h"
#include "comm/communicator.h"
#include "comm/process_mesh.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using comm::Job;
using comm::ProcessMesh;
using comm::Purpose;
using plan::Axes;
using plan::ProcessGrid;
using AxisArgs = std::tuple<std::string, int, std::string>;  // name, size, key

std::vector<plan::Axis> axes_of(const std::vector<AxisArgs>& given) {
  std::vector<plan::Axis> axes;
  for (const AxisArgs& args : given) axes.push_back({std::get<0>(args), std::get<1>(args), std::get<2>(args)});
  return axes;
}

// `open(key, ranks, in_memory)` returns a Communicator.
comm::JobPtr make_job(int rank, int world, py::function open, int ranks_of_host) {
  return std::make_shared<Job>(
      rank, world,
      [open = shared_function(std::move(open))](const std::string& key, const comm::SubMesh& members, bool in_memory) {
        py::gil_scoped_acquire locked;
        return (*open)(key, members.ranks, in_memory).cast<comm::CommunicatorPtr>();
      },
      ranks_of_host);
}

}  // namespace

DS_BINDINGS(m) {
  py::class_<ProcessGrid>(m, "ProcessGrid")
      .def(py::init([](int world, const std::vector<AxisArgs>& axes) { return ProcessGrid(world, axes_of(axes)); }),
           "world"_a, "axes"_a)
      .def(
          "fold",
          [](ProcessGrid& grid, const std::string& name, const Axes& from, const std::vector<AxisArgs>& to) {
            grid.fold(name, from, axes_of(to));
          },
          "name"_a, "from_"_a, "to"_a)
      .def("size", &ProcessGrid::size, "axes"_a)
      .def("list", &ProcessGrid::list, "axes"_a, "rank"_a)
      .def("lists", &ProcessGrid::lists, "axes"_a);

  py::enum_<Purpose>(m, "Purpose")
      .value("REDUCE", Purpose::kReduce)
      .value("GATHER", Purpose::kGather)
      .value("PIPE", Purpose::kPipe)
      .value("PIPE_GRADS", Purpose::kPipeGrads)
      .value("EXPERTS", Purpose::kExperts)
      .value("TENSOR", Purpose::kTensor)
      .value("CONTROL", Purpose::kControl);
  py::class_<Job, comm::JobPtr>(m, "Job")
      .def(py::init(&make_job), "rank"_a, "world"_a, "open"_a, "ranks_of_host"_a = 0)
      .def("planned_host", &Job::planned_host, "rank"_a);
  py::class_<ProcessMesh, comm::ProcessMeshPtr>(m, "ProcessMesh")
      .def(py::init(&ProcessMesh::adopt), "own"_a, "job"_a)
      .def(py::init<ProcessGrid, comm::JobPtr, std::vector<int>>(), "grid"_a, "job"_a, "ranks"_a = std::vector<int>())
      .def(
          "fold",
          [](ProcessMesh& mesh, const std::string& name, const Axes& from, const std::vector<AxisArgs>& to) {
            mesh.fold(name, from, axes_of(to));
          },
          "name"_a, "from_"_a, "to"_a)
      .def("fold_lists", &ProcessMesh::fold_lists, "name"_a, "lists"_a)
      .def("size", &ProcessMesh::size, "axes"_a)
      .def(
          "ranks", [](const ProcessMesh& mesh, const Axes& axes) { return mesh.sub(axes).ranks; }, "axes"_a)
      .def(
          "communicator",
          [](ProcessMesh& mesh, const Axes& axes, Purpose purpose, bool in_memory) {
            return mesh.communicator(mesh.sub(axes), purpose, in_memory);
          },
          "axes"_a, "purpose"_a, "in_memory"_a = false)
      .def(
          "over",
          [](ProcessMesh& mesh, const std::vector<int>& ranks, int rank, Purpose purpose) {
            return mesh.communicator({ranks, rank}, purpose);
          },
          "ranks"_a, "rank"_a, "purpose"_a);
}

}  // namespace ds::bindings
