// A failure of one rank ends the waits of all ranks that depend on each other, with one text.
//
// Pipeline stages exchange messages in different orders, so ranks wait for each other in cycles over several groups. A
// rank that fails reports its error to the job's store, which keeps the first text. The watch of each rank reads it
// four times a second while that rank works, and ends every wait of the rank with it. A process of this host that ended
// without leave() is reported by the first rank that notices. Ranks of one host share their positions
// (position_page.h), so the text names the work in which the process ended.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/process.h"
#include "comm/c10d_compat.h"
#include "comm/boards/position_page.h"
#include "comm/boards/watch.h"

namespace ds::comm {

class ErrorPropagation : public Watched {
 public:
  using Store = c10::intrusive_ptr<c10d::Store>;
  using OnError = std::function<void(const std::string& why)>;

  // `store`: its keys belong to this object. `names`: of all ranks, for texts. `on_error`: called once, from any
  // thread, with the first error. `position_names`: names for the words of position(). `keeper`: the rank whose process
  // serves the store; -1: no rank of this group does.
  ErrorPropagation(Store store, int rank, std::vector<std::string> names, OnError on_error,
                   PositionNames position_names = {}, int keeper = -1);
  ~ErrorPropagation() override;
  ErrorPropagation(const ErrorPropagation&) = delete;

  // This rank starts or stops working. While it works it looks for errors and for processes that have ended.
  void begin() { working_ = true; }
  void end() { working_ = false; }
  // Ends the waits of all ranks. Returns the first reported text, which all ranks get.
  std::string report(const std::string& why);
  std::string error() const;                                                   // "": no rank has reported one
  const std::shared_ptr<PositionPage>& position() const { return position_; }  // of this rank, which writes it
  // The last known positions of the ranks of this host: "stage 0, rank 0: layer 1 (Block), ...; ..."
  std::string where() const;
  // Waits, for 1.5 seconds at most, until all living ranks have the error. A rank calls it before it ends, because the
  // store may end with its process.
  void await_delivery();
  void leave() noexcept;  // from now on this rank may end without being reported

  void look(const DiagnosticCallbacks& callbacks) override;
  std::string name() const override { return "error propagation"; }
  std::string transport() const override { return "store"; }
  std::vector<Flight> flights() const override { return {}; }

 private:
  std::string report_or(const std::string& why, const std::string& alone);  // `alone`: the text if the store has gone
  void receive(const std::string& why);
  int ended_rank();  // a process of this host that has ended; -1: none
  bool keeper_ends() const;
  void meet(int rank);
  void meet(int rank, const std::string& who);
  void see_keeper();  // keeps its position: the store cannot be asked after it has ended
  std::string position_text(int rank) const;
  std::string without_store() const;

  const Store store_;
  const int rank_;
  const std::vector<std::string> names_;
  const PositionNames position_names_;
  const int keeper_;
  const std::string host_;  // host_id() at construction: the watch's thread does not read the environment
  const std::shared_ptr<PositionPage> position_ = std::make_shared<PositionPage>();
  const OwningProcess owner_;
  std::atomic<bool> working_{false}, left_{false};
  std::atomic<int64_t> next_look_us_{0};
  std::atomic<int> ended_{0};  // ranks that have been seen to have ended
  std::vector<int64_t> pids_;  // of ranks on this host; 0: not known yet, -1: elsewhere. Of the watch's thread
  mutable std::mutex mutex_;   // of what follows
  std::vector<std::shared_ptr<PositionPage>> pages_;  // of ranks on this host, this one among them; null: not seen
  std::string keepers_position_;                      // as the store had it last, if the keeper is on another host
  std::string error_;
  OnError on_error_;
};

}  // namespace ds::comm
