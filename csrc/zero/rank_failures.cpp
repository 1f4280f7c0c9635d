#include "zero/rank_failures.h"

#include <c10/util/Exception.h>

namespace ds::zero {

void run_beside(const std::function<void()>& work) {
  const auto text = [](const std::string& what) {
    return "a thread that steps beside the training has failed: " + what;
  };
  try {
    work();
  } catch (const io::FileError&) {
    throw;
  } catch (const LoneFailure&) {  // of work that this one waited for
    throw;
  } catch (const Error& error) {
    throw LoneFailure(error.kind(), text(error.what()));
  } catch (const c10::Error& error) {
    throw LoneFailure(ErrorKind::kRuntime, text(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    throw LoneFailure(ErrorKind::kRuntime, text(error.what()));
  }
}

std::string lone_text(const comm::Communicator& ranks, const std::exception& error) {
  return "data-parallel rank " + std::to_string(ranks.rank()) + " could not go on: " + error.what();
}

}  // namespace ds::zero
