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

plan::Axis axis_of(const AxisArgs& args) { return {std::get<0>(args), std::get<1>(args), std::get<2>(args)}; }

std::vector<plan::Axis> axes_of(const std::vector<AxisArgs>& given) {
  std::vector<plan::Axis> axes;
  for (const AxisArgs& args : given) axes.push_back(axis_of(args));
  return axes;
}

// `open(key, ranks)` returns a Communicator.
comm::JobPtr make_job(int rank, int world, py::function open) {
  return std::make_shared<Job>(
      rank, world, [open = shared_function(std::move(open))](const std::string& key, const comm::SubMesh& members) {
        py::gil_scoped_acquire locked;
        return (*open)(key, members.ranks).cast<comm::CommunicatorPtr>();
      });
}

}  // namespace

DS_BINDINGS(m) {
  py::class_<ProcessGrid>(m, "ProcessGrid")
      .def(py::init([](int world, const std::vector<AxisArgs>& axes) { return ProcessGrid(world, axes_of(axes)); }),
           "world"_a, "axes"_a)
      .def(
          "split",
          [](ProcessGrid& grid, const std::string& axis, const AxisArgs& outer, const AxisArgs& inner) {
            grid.split(axis, axis_of(outer), axis_of(inner));
          },
          "axis"_a, "outer"_a, "inner"_a)
      .def(
          "fold",
          [](ProcessGrid& grid, const std::string& name, const Axes& from, const std::vector<AxisArgs>& to) {
            grid.fold(name, from, axes_of(to));
          },
          "name"_a, "from_"_a, "to"_a)
      .def("size", &ProcessGrid::size, "axes"_a)
      .def("list", &ProcessGrid::list, "axes"_a, "rank"_a)
      .def("lists", &ProcessGrid::lists, "axes"_a)
      .def("index", &ProcessGrid::index, "axes"_a, "rank"_a);
  m.def("fold_experts", &plan::fold_experts, "grid"_a, "name"_a, "from_"_a, "expert"_a, "data_first"_a);

  py::enum_<Purpose>(m, "Purpose")
      .value("REDUCE", Purpose::kReduce)
      .value("GATHER", Purpose::kGather)
      .value("PIPE", Purpose::kPipe)
      .value("PIPE_GRADS", Purpose::kPipeGrads)
      .value("EXPERTS", Purpose::kExperts)
      .value("CONTROL", Purpose::kControl);
  py::class_<Job, comm::JobPtr>(m, "Job").def(py::init(&make_job), "rank"_a, "world"_a, "open"_a);
  py::class_<ProcessMesh, comm::ProcessMeshPtr>(m, "ProcessMesh")
      .def(py::init(&ProcessMesh::adopt), "own"_a, "job"_a)
      .def(py::init<ProcessGrid, comm::JobPtr, std::vector<int>>(), "grid"_a, "job"_a, "ranks"_a = std::vector<int>())
      .def(
          "fold",
          [](ProcessMesh& mesh, const std::string& name, const Axes& from, const std::vector<AxisArgs>& to) {
            mesh.fold(name, from, axes_of(to));
          },
          "name"_a, "from_"_a, "to"_a)
      .def_property_readonly("has_grid", &ProcessMesh::has_grid)
      .def("size", &ProcessMesh::size, "axes"_a)
      .def("rank", &ProcessMesh::rank, "axes"_a)
      .def(
          "ranks", [](const ProcessMesh& mesh, const Axes& axes) { return mesh.sub(axes).ranks; }, "axes"_a)
      .def(
          "communicator",
          [](ProcessMesh& mesh, const Axes& axes, Purpose purpose) {
            return mesh.communicator(mesh.sub(axes), purpose);
          },
          "axes"_a, "purpose"_a)
      .def(
          "over",
          [](ProcessMesh& mesh, const std::vector<int>& ranks, int rank, Purpose purpose) {
            return mesh.communicator({ranks, rank}, purpose);
          },
          "ranks"_a, "rank"_a, "purpose"_a);
}

}  // namespace ds::bindings
