// One thread of a process that looks after its groups: it answers other ranks that ask where this one is, and hands
// warnings to the log. It needs the interpreter only when there is something to say.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/condition_variable.h"
#include "base/process.h"
#include "comm/boards/flight_ring.h"

namespace ds::comm {

// Functions of the process around the core; an empty function stands for one that it does not have.
struct DiagnosticCallbacks {
  std::function<std::string()> stacks;           // where its threads are, a few kilobytes
  std::function<void(const std::string&)> warn;  // a line for the user
};

// A group, as the watch sees it.
class Watched {
 public:
  virtual ~Watched() = default;
  virtual void look(const DiagnosticCallbacks& callbacks) = 0;  // ten times a second, from the watch's thread
  virtual std::string name() const = 0;
  virtual std::string transport() const = 0;        // what carries it: shm, gloo, ...
  virtual std::vector<Flight> flights() const = 0;  // of this rank
};

class CallLog;

class Watch {
 public:
  explicit Watch(DiagnosticCallbacks callbacks) : callbacks_(std::move(callbacks)) {}
  ~Watch() { stop(); }
  Watch(const Watch&) = delete;

  void add(std::weak_ptr<Watched> group);
  std::vector<std::shared_ptr<Watched>> groups() const;
  // No look() is under way afterwards, and none will be. Not from look(), nor with a lock that `callbacks` takes.
  void stop();
  // False in a forked child, which must leave it alone: its thread is the parent's, and so is who waits in it.
  bool here() const { return owner_.here(); }

 private:
  void serve();

  const DiagnosticCallbacks callbacks_;
  const OwningProcess owner_;
  mutable std::mutex mutex_;
  ConditionVariable changed_;
  std::vector<std::weak_ptr<Watched>> groups_;
  std::thread thread_;
  int64_t pid_ = 0;  // where the thread is: a forked child has none
  bool ending_ = false;
};

// Facts about a group for its messages, and the watch over it.
struct GroupFacts {
  std::string name;              // "" : unknown
  int job_rank = -1;             // of this process in the whole job; -1: unknown
  std::shared_ptr<Watch> watch;  // null: nobody looks after it
  // Another thread for boards in the job's store, which may let it wait. null: likewise.
  std::shared_ptr<Watch> store_watch;
  std::shared_ptr<CallLog> log;  // of its calls; null: there is none
  // Whether a core is free for a thread that runs collectives in shared memory; without a value, usable_cores()
  // decides.
  std::optional<bool> spare_cores{};
};

}  // namespace ds::comm
