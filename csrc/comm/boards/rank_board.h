// The boards of ranks that share memory, each in its owner's segment: readable after the owner has died.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "comm/boards/board.h"
#include "comm/segments/shared_segments.h"

namespace ds::comm {

class RankBoard : public Board {
 public:
  static constexpr int64_t kBytes = 64 * 1024;  // at the given offset of each segment, zeros at first

  RankBoard(int rank, std::shared_ptr<SharedSegments> segments, int64_t offset, const GroupFacts& facts);

  FlightRing& ring();
  void close();                        // this rank answers no more questions
  std::string called(int rank) const;  // "rank 1 (rank 5 of the job, process 123)"

  void look(const DiagnosticCallbacks& callbacks) override;
  std::vector<Flight> flights() const override;
  std::string transport() const override { return "shm"; }

 protected:
  std::vector<RankView> views() override;

 private:
  struct Page;
  Page* page(int rank) const;
  std::string stack_of(int rank) const;

  std::shared_ptr<SharedSegments> segments_;
  int64_t offset_;
};

}  // namespace ds::comm
