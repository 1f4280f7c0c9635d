// Transports in which sends and receives of a communicator wait for each other.
#pragma once
#include "comm/communicator.h"

namespace ds::comm {

// Such a transport derives from this class and from Communicator. A send whose receive has not started blocks all later
// calls of the communicator, to any rank. Two ranks that both send first therefore wait for ever. A caller whose ranks
// send and receive in no common order needs a communicator for each direction between two ranks.
class OneQueue {
 public:
  virtual ~OneQueue() = default;
  virtual bool has_one_queue() const { return true; }
};

// False for all other transports: their messages do not wait for each other.
inline bool has_one_queue(Communicator& communicator) {
  const auto* found = dynamic_cast<const OneQueue*>(&communicator.bare());
  return found && found->has_one_queue();
}

}  // namespace ds::comm
