// Transports in which sends and receives of a communicator wait for each other.
#pragma once
#include "comm/communicator.h"

namespace ds::comm {

// What such a transport is besides a Communicator: a send that nobody receives yet keeps calls that come after it from
// starting, to whichever rank they go. Two ranks that both send first wait for ever, so who sends and receives in no
// common order needs a communicator for each direction between two ranks.
class OneQueue {
 public:
  virtual ~OneQueue() = default;
  virtual bool has_one_queue() const { return true; }
};

// False for transports that do not say it: their messages travel each by itself.
inline bool has_one_queue(Communicator& communicator) {
  const auto* found = dynamic_cast<const OneQueue*>(&communicator.bare());
  return found && found->has_one_queue();
}

}  // namespace ds::comm
