// Types that the bindings of the engine and of sharded parameters share.
#pragma once
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include "comm/transports/c10d_communicator.h"
#include "zero/engine.h"

namespace ds::bindings {

// Over a torch process group; None: one process.
comm::CommunicatorPtr communicator(const pybind11::object& group, comm::GlooBy gloo_by = comm::GlooBy::kTransfers);

// Cleans up a storage that still exists when the process ends. Does not keep the storage alive.
struct ExitGuard {
  std::weak_ptr<storage::ShardStorage> storage;
};

}  // namespace ds::bindings
