// This process and others of this machine.
#pragma once
#include <cstdint>

namespace ds {

// As the kernel shows it: R runs, S sleeps, D waits inside the kernel, T is stopped, Z has ended and nobody has asked
// how. '?' where there is no such process.
char process_state(int64_t pid);

// True when nothing can come from the process any more: it is gone, waits for its parent to ask how it ended, or is
// being taken apart by the kernel, which closes its connections on the way.
bool process_ended(int64_t pid);

// When the process began, in clock ticks since the machine was started; 0 where there is no such process. A process
// number is given again, together with this it is not.
uint64_t process_began(int64_t pid);

// Memory that is freed stays with this process, up to 1 GiB, unless the environment has settings for malloc. By default
// glibc returns it to the kernel and asks for it again, which can take 2 microseconds for each 4 KiB.
void keep_freed_memory();

// The process that made an object. A forked child has a copy of the object and none of its threads, and what the object
// shares with others is not the child's to close: where here() is false a destructor leaves all of it alone.
class OwningProcess {
 public:
  OwningProcess();
  bool here() const;

 private:
  const int64_t pid_;
};

}  // namespace ds
