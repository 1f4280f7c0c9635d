// The groups of ranks that one rank of an engine belongs to.
#pragma once
#include <functional>
#include <map>
#include <string>

#include "comm/communicator.h"

namespace ds::zero {

struct EngineRanks {
  comm::CommunicatorPtr data_parallel;               // of dense parameters; at stage 3 the ranks of one shard group
  std::function<comm::CommunicatorPtr()> gathers{};  // as data_parallel; asked where gathers need collectives
  comm::CommunicatorPtr replicas{};                  // other groups that hold the same shards (MiCS), or null
  comm::CommunicatorPtr tensor{};                    // they hold other slices of the same layers; null: none do
  comm::CommunicatorPtr pipe{};                      // they hold other layers; null: none do
  std::map<std::string, comm::CommunicatorPtr> others{};  // by name, for the rules of space_rules/

  int count() const { return data_parallel->size() * (replicas ? replicas->size() : 1); }  // that train this model
  const comm::CommunicatorPtr& other(const std::string& name) const;  // fails with the names that there are
};

}  // namespace ds::zero
