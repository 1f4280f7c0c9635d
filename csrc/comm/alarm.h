// A failure of one rank ends the waits of all ranks that depend on each other, with one text.
//
// Ranks that exchange messages in an order of their own wait for each other in circles of several groups: a rank that
// cannot go on is waited for by some, who are waited for by others. So it rings: the job's store keeps the first text,
// and each rank's watch looks for it four times a second while that rank works, and says so to whoever it waits in.
// A process of this host that has ended without goodbye() rings by itself: whoever sees it first does it. Ranks of one
// host show each other where they are (place_page.h), so the text says what it was doing.
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
#include "comm/place_page.h"
#include "comm/watch.h"

namespace ds::comm {

class Alarm : public Watched {
 public:
  using Store = c10::intrusive_ptr<c10d::Store>;
  using Told = std::function<void(const std::string& why)>;

  // `store`: of this alarm alone. `names`: of all ranks, for texts. `told`: once, from any thread, when it has rung.
  // `places`: what the words of place() are called. `keeper`: the rank whose process has the store; -1: another one
  // has.
  Alarm(Store store, int rank, std::vector<std::string> names, Told told, PlaceNames places = {}, int keeper = -1);
  ~Alarm() override;
  Alarm(const Alarm&) = delete;

  // This rank works from here on, or no longer: it looks whether somebody has rung, and who has ended.
  void begin() { working_ = true; }
  void end() { working_ = false; }
  // Ends the waits of all. Returns the text that counts: the first one.
  std::string ring(const std::string& why);
  std::string heard() const;                                          // "": nobody has rung
  const std::shared_ptr<PlacePage>& place() const { return place_; }  // of this rank, which writes it
  // The last known positions of the ranks of this host: "stage 0, rank 0: layer 1 (Block), ...; ..."
  std::string where() const;
  // Before this rank ends because of it: the store may be its own, and the others have to hear. Waits for all who live,
  // a moment at most.
  void await_all();
  void goodbye() noexcept;  // this rank may end

  void look(const DiagnosticCallbacks& callbacks) override;
  std::string name() const override { return "alarm"; }
  std::string transport() const override { return "store"; }
  std::vector<Flight> flights() const override { return {}; }

 private:
  std::string ring_or(const std::string& why, const std::string& alone);  // `alone`: where the store has gone
  void hear(const std::string& why);
  int ended_rank();  // a process of this host that has ended; -1: none
  bool keeper_ends() const;
  void meet(int rank);
  void meet(int rank, const std::string& who);
  void see_keeper();  // where it is: the store cannot be asked when it has ended
  std::string place_text(int rank) const;
  std::string without_store() const;

  const Store store_;
  const int rank_;
  const std::vector<std::string> names_;
  const PlaceNames place_names_;
  const int keeper_;
  const std::string host_;  // host_id(), as it was when this was made: the watch's thread does not read the environment
  const std::shared_ptr<PlacePage> place_ = std::make_shared<PlacePage>();
  const OwningProcess owner_;
  std::atomic<bool> working_{false}, left_{false};
  std::atomic<int64_t> next_look_us_{0};
  std::atomic<int> ended_{0};  // ranks that have been seen to have ended
  std::vector<int64_t> pids_;  // of ranks on this host; 0: not known yet, -1: elsewhere. Of the watch's thread
  mutable std::mutex mutex_;   // of what follows
  std::vector<std::shared_ptr<PlacePage>> pages_;  // of ranks on this host, this one among them; null: not seen
  std::string keepers_place_;                      // as the store had it last, where it is on another host
  std::string heard_;
  Told told_;
};

}  // namespace ds::comm
