// The position of a rank of a pipeline: three words that it writes and other processes of its host read, also after it
// has ended.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/shared_memory/shared_file.h"

namespace ds::comm {

// Names for the words, for messages.
struct PositionNames {
  std::vector<std::string> instructions, layers;
};

class PositionPage {
 public:
  enum Word { kInstruction, kMicroBatch, kLayer, kWords };  // numbers from 1 on; 0: none

  PositionPage();  // of this process, zeros. Without memory to share (fds, /proc) others see nothing, and nothing fails
  // That of another process, which has told its file(). Null where it cannot be opened.
  static std::shared_ptr<PositionPage> of(const SharedFile& file);
  ~PositionPage();
  PositionPage(const PositionPage&) = delete;

  int64_t* words() { return words_; }
  const SharedFile& file() const { return file_; }     // without one nobody can see it
  std::string text(const PositionNames& names) const;  // "layer 2 (Block), micro-batch 1, ForwardPass"; "": not known

 private:
  explicit PositionPage(int64_t* words) : words_(words) {}

  int64_t own_[kWords] = {};
  int64_t* words_ = own_;
  SharedFile file_;
};

}  // namespace ds::comm
