// What each rank of a group shows the others in its shared segment: its last collectives, why it has given up, and,
// when asked, where its threads are. Readable after its owner has died.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "comm/shared_segments.h"
#include "comm/watch.h"

namespace ds::comm {

class RankBoard : public Watched {
 public:
  static constexpr int64_t kBytes = 64 * 1024;  // at the given place of each segment, zeros at first

  RankBoard(int rank, std::shared_ptr<SharedSegments> segments, int64_t place, const GroupFacts& facts);

  FlightRing& ring();
  // Everything a person wants to know when a group has failed because of `why`: which rank is where, since when, doing
  // what, with its Python stack where it answers within two seconds, and the name of the file that the flight recorders
  // of all ranks have been written to.
  std::string report(const std::string& why);
  void close();                        // nobody answers for this rank any more
  void warn(const std::string& text);  // to the log of this process
  std::string called(int rank) const;  // "rank 1 (rank 5 of the job, process 123)"

  void look(const DiagnosticCallbacks& callbacks) override;
  std::string name() const override { return name_; }
  std::vector<Flight> flights() const override;

 private:
  struct Page;
  Page* page(int rank) const;
  std::string stack_of(int rank) const;
  std::string place_of(int rank) const;
  std::string write_flights(const std::string& why) const;

  int rank_;
  std::shared_ptr<SharedSegments> segments_;
  int64_t place_;
  std::string name_;
  std::mutex mutex_;
  std::vector<std::string> warnings_;
  std::atomic<bool> has_warnings_{false};
};

}  // namespace ds::comm
