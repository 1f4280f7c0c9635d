// Failures of one rank alone: the others wait for it in a collective, or will, and are told.
#pragma once
#include <exception>
#include <functional>
#include <string>
#include <utility>

#include "base/error.h"
#include "comm/communicator.h"
#include "io/file_error.h"

namespace ds::zero {

// Work beside the training has failed, other than on a file.
class LoneFailure : public Error {
 public:
  using Error::Error;
};

// Runs work beside the training: what it throws is an io::FileError or a LoneFailure.
void run_beside(const std::function<void()>& work);

// The text with which the collectives of other ranks fail after an error of this one.
std::string lone_text(const comm::Communicator& ranks, const std::exception& error);

class RankFailures {
 public:
  using Tell = std::function<void(const std::exception&)>;
  explicit RankFailures(Tell tell) : tell_(std::move(tell)) {}

  void tell(const std::exception& error) const { tell_(error); }
  // Runs work in which every rank takes part, and tells the other ranks if this one fails.
  template <typename Body>
  decltype(auto) guard(const Body& body) const {
    try {
      return body();
    } catch (const io::FileError& error) {
      tell_(error);
      throw;
    } catch (const LoneFailure& error) {
      tell_(error);
      throw;
    }
  }

 private:
  const Tell tell_;
};

}  // namespace ds::zero
