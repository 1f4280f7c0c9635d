// The position of a rank of a pipeline: three words that the rank writes and other processes of its host read, even
// after the rank has ended.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/segments/shared_file.h"

namespace ds::comm {

// The names of instructions and layers in messages.
struct PositionNames {
  std::vector<std::string> instructions, layers;
};

class PositionPage {
 public:
  enum Word { kInstruction, kMicroBatch, kLayer, kWords };  // numbers from 1 on; 0: none

  PositionPage();  // of this process, zeros. Where memory cannot be shared (fds, /proc), other processes see none
  // The page of another process, by the file() that it has sent. Null where it cannot be opened.
  static std::shared_ptr<PositionPage> of(const SharedFile& file);
  ~PositionPage();
  PositionPage(const PositionPage&) = delete;

  int64_t* words() { return words_; }
  const SharedFile& file() const { return file_; }     // none: other processes cannot see the page
  std::string text(const PositionNames& names) const;  // "layer 2 (Block), micro-batch 1, ForwardPass"; "": unknown

 private:
  explicit PositionPage(int64_t* words) : words_(words) {}

  int64_t own_[kWords] = {};
  int64_t* words_ = own_;
  SharedFile file_;
};

}  // namespace ds::comm
