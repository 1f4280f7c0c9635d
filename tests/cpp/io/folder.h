// A folder of a test, removed with all that is in it, and plain reading of files.
#pragma once
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

namespace ds::io {

class Folder {
 public:
  // `parent`: on which file system.
  explicit Folder(const std::string& parent = "/tmp") {
    std::string pattern = parent + "/ds_io_test_XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }
  size_t entries() const { return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_), {})); }

 private:
  std::string path_;
};

inline std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::string random_bytes(size_t bytes, unsigned seed = 1) {
  std::mt19937_64 random(seed);
  std::string text(bytes, 0);
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

inline size_t open_descriptors() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

// With what a process ends that runs `body` and returns its code; -1 where it ends otherwise.
template <typename Body>
int exit_code_of(const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// A process that has run `body` and lives until it is killed.
class Lingering {
 public:
  template <typename Body>
  explicit Lingering(const Body& body) {
    int ready[2];
    if (::pipe(ready) != 0) ::abort();
    pid_ = ::fork();
    if (pid_ == 0) {
      body();
      (void)!::write(ready[1], "x", 1);
      for (;;) ::pause();
    }
    ::close(ready[1]);
    char byte;
    (void)!::read(ready[0], &byte, 1);
    ::close(ready[0]);
  }
  ~Lingering() { kill(); }
  void kill() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

// CRC-32 bit by bit, from its definition.
inline uint32_t plain_crc32(const std::string& text) {
  uint32_t sum = 0xffffffff;
  for (unsigned char c : text) {
    sum ^= c;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ (sum & 1 ? 0xedb88320u : 0);
  }
  return ~sum;
}

}  // namespace ds::io
