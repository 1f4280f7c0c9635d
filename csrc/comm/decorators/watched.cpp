#include "comm/decorators/watched.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "comm/decorators/forwarding.h"

namespace ds::comm {

namespace {

using BoardPtr = std::shared_ptr<StoreBoard>;

// While it is there this rank waits. `message`: the send or receive that it waits for; null: a call with a number.
class Waiting {
 public:
  explicit Waiting(StoreBoard& board, const Record* message = nullptr) : board_(board) { board_.wait_begins(message); }
  ~Waiting() { board_.wait_ends(); }
  Waiting(const Waiting&) = delete;

 private:
  StoreBoard& board_;
};

// The call is over when this goes, whatever is thrown: a report still shows this rank in it.
struct Ended {
  StoreBoard& board;
  int64_t number;
  ~Ended() {
    if (number) board.ended(number);
  }
};

// Whether the caller made the error: such an error is not a failure of the group.
bool callers(const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  return ours && ours->kind() != ErrorKind::kRuntime;
}

[[noreturn]] void explain(StoreBoard& board, int rank, const std::string& call, const std::exception& error) {
  fail(ErrorKind::kRuntime, board.give_up(call + " failed on rank " + std::to_string(rank) + ": " + error.what()));
}

class WatchedWork : public Work {
 public:
  // `number`: of the board; 0: a message.
  WatchedWork(BoardPtr board, CommunicatorPtr inner, WorkPtr work, const Record& call, int64_t number)
      : board_(std::move(board)), inner_(std::move(inner)), work_(std::move(work)), call_(call), number_(number) {}
  ~WatchedWork() override { end(); }  // nobody waits for it any more

  void wait() override {
    if (!error_.empty()) fail(ErrorKind::kRuntime, error_);
    try {
      const Waiting here(*board_, number_ ? nullptr : &call_);
      work_->wait();
    } catch (const std::exception& error) {
      if (callers(error)) throw;
      try {
        explain(*board_, inner_->rank(), describe(call_), error);
      } catch (const std::exception& explained) {
        end();
        error_ = explained.what();
        throw;
      }
    }
    end();
  }
  bool ready() override { return work_->ready(); }
  bool ended() override { return work_->ended(); }

 private:
  void end() {
    if (number_) board_->ended(std::exchange(number_, 0));
  }

  BoardPtr board_;
  CommunicatorPtr inner_;
  WorkPtr work_;
  const Record call_;
  std::string error_;
  int64_t number_;
};

class WatchedCommunicator : public ForwardingCommunicator {
 public:
  WatchedCommunicator(CommunicatorPtr inner, BoardPtr board)
      : ForwardingCommunicator(std::move(inner)), board_(std::move(board)) {
    board_->on_failure([inner = std::weak_ptr<Communicator>(inner_)](const std::string& why) {
      if (const CommunicatorPtr here = inner.lock()) here->abort(why);
    });
  }

  void abort(const std::string& why) noexcept override {
    try {
      board_->give_up(why);
    } catch (const std::exception&) {  // nobody can be told
    }
    inner_->abort(why);
  }

 protected:
  WorkPtr start(const Op& op) override {
    const Record call = record_of(op, rank(), size());
    const bool message = is_message(op.verb);
    if (message) board_->refuse_if_failed();
    const Waiting here(*board_, message ? &call : nullptr);  // a call that is made of several waits for those before
    const int64_t number = message ? 0 : board_->enter(call);
    try {
      return std::make_shared<WatchedWork>(board_, inner_, inner_->run(op), call, number);
    } catch (const std::exception& error) {
      const Ended at_last{*board_, number};
      if (callers(error)) throw;
      explain(*board_, rank(), describe(call), error);
    }
  }

 private:
  const BoardPtr board_;
};

}  // namespace

CommunicatorPtr watched(CommunicatorPtr inner, std::shared_ptr<StoreBoard> board) {
  return std::make_shared<WatchedCommunicator>(std::move(inner), std::move(board));
}

}  // namespace ds::comm
