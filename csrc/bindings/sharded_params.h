// What the bindings of the engine and of sharded parameters share.
#pragma once
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include "comm/transports/c10d_communicator.h"
#include "zero/engine.h"

namespace ds::bindings {

// Over a torch process group; None: one process.
comm::CommunicatorPtr communicator(const pybind11::object& group, comm::GlooBy gloo_by = comm::GlooBy::kTransfers);

// What the end of the process asks for where nobody has ended what has this storage. Keeps nothing of it.
struct ExitGuard {
  std::weak_ptr<storage::ShardStorage> storage;
};

}  // namespace ds::bindings
