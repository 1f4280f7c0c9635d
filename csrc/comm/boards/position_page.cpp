#include "comm/boards/position_page.h"

#include <sys/mman.h>
#include <unistd.h>

namespace ds::comm {

namespace {

constexpr size_t kPageBytes = PositionPage::kWords * sizeof(int64_t);

int64_t* map_words(int file) {
  void* const data = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return data == MAP_FAILED ? nullptr : static_cast<int64_t*>(data);
}

std::string word_name(const std::vector<std::string>& names, int64_t number) {
  return number > 0 && number <= static_cast<int64_t>(names.size()) ? names[number - 1] : "";
}

}  // namespace

PositionPage::PositionPage() {
  const SharedFile made = make_shared_file();
  const int file = static_cast<int>(made.file);
  if (file < 0) return;
  int64_t* const words = ftruncate(file, kPageBytes) == 0 ? map_words(file) : nullptr;
  if (!words) {
    close(file);
    return;
  }
  file_ = made;
  words_ = words;
}

std::shared_ptr<PositionPage> PositionPage::of(const SharedFile& file) {
  const int opened = open_shared_file(file);
  if (opened < 0) return nullptr;
  const bool fits = lseek(opened, 0, SEEK_END) == static_cast<off_t>(kPageBytes);
  int64_t* const words = fits ? map_words(opened) : nullptr;
  close(opened);
  return words ? std::shared_ptr<PositionPage>(new PositionPage(words)) : nullptr;
}

PositionPage::~PositionPage() {
  if (words_ != own_) munmap(words_, kPageBytes);
  if (file_.file >= 0) close(static_cast<int>(file_.file));
}

std::string PositionPage::text(const PositionNames& names) const {
  std::string found;
  const auto add = [&](const std::string& words) {
    if (!words.empty()) found += (found.empty() ? "" : ", ") + words;
  };
  add(word_name(names.layers, words_[kLayer]));
  if (words_[kMicroBatch] > 0) add("micro-batch " + std::to_string(words_[kMicroBatch] - 1));
  add(word_name(names.instructions, words_[kInstruction]));
  return found;
}

}  // namespace ds::comm
