// A Communicator whose calls are written down on a board that the other ranks can ask for: what each rank waits in, for
// how long, and which call does not fit those of the others. For transports that do not look after their ranks by
// themselves, as shared memory does.
#pragma once
#include <memory>

#include "comm/communicator.h"
#include "comm/boards/store_board.h"

namespace ds::comm {

// Does what `inner` does. A send or a receive, which two ranks make, has no number: it is shown while this rank waits
// for it. A call that fails, or that
// another rank has found not to fit, throws kRuntime with where all ranks are, and `inner` is aborted: all further
// calls fail.
CommunicatorPtr watched(CommunicatorPtr inner, std::shared_ptr<StoreBoard> board);

}  // namespace ds::comm
