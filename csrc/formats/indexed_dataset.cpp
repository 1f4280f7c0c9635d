#include "formats/indexed_dataset.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "formats/format_error.h"

namespace ds::formats {
namespace {

constexpr uint64_t kMostEntries = uint64_t{1} << 48;  // entries of a part: sums of parts cannot overflow
constexpr uint64_t kEntriesAtOnce = 1 << 16;          // entries that are checked at once

struct Code {
  uint64_t code;
  const char* element;
  int64_t bytes;
};

// The first fitting row counts.
constexpr std::array<Code, 11> kCodes{{{1, "uint8", 1},
                                       {2, "int8", 1},
                                       {3, "int16", 2},
                                       {4, "int32", 4},
                                       {5, "int64", 8},
                                       {6, "uint16", 2},
                                       {6, "float64", 8},
                                       {7, "uint32", 4},
                                       {7, "float64", 8},
                                       {8, "uint64", 8},
                                       {8, "uint16", 2}}};

class IndexReader {
 public:
  IndexReader(const CheckedFile& file, uint64_t data_bytes) : file_(file), data_bytes_(data_bytes) {}

  IndexedHeader read() {
    char magic[9];
    take(magic, sizeof magic, "its first bytes");
    const std::string found(magic, sizeof magic);
    if (found == std::string("MMIDIDX\0\0", 9)) return mapped();
    // The magic of the older format has 8 bytes.
    if (found.substr(0, 8) == std::string("TNTIDX\0\0", 8)) {
      at_ = 8;
      return older();
    }
    bad(0, "it begins neither with MMIDIDX nor with TNTIDX: it is not an index of an indexed data set");
  }

 private:
  template <typename... What>
  [[noreturn]] void bad(uint64_t offset, const What&... what) {
    damaged<DamagedIndex>(file_.path(), ", offset ", offset, ": ", what...);
  }

  void take(void* to, uint64_t bytes, const char* what) {
    if (bytes > file_.bytes() - std::min(at_, file_.bytes())) {
      bad(at_, "the file ends after ", file_.bytes(), " bytes, within ", what, ": it was cut");
    }
    file_.read(to, bytes, at_);
    at_ += bytes;
  }

  uint64_t number(const char* what) {
    uint64_t found = 0;
    take(&found, sizeof found, what);
    return found;
  }

  uint64_t count(const char* what) {
    const uint64_t found = number(what);
    if (found > kMostEntries) bad(at_ - 8, "it says that there are ", found, " ", what);
    return found;
  }

  // The offset of a part of `entries` numbers, which has to be in the file.
  uint64_t part(uint64_t entries, uint64_t bytes, const char* what) {
    const uint64_t from = at_;
    if (entries * bytes > file_.bytes() - at_) {
      bad(from, entries, " ", what, " of ", bytes, " bytes are expected, and the file ends after ", file_.bytes(),
          " bytes: it was cut, or its counts are wrong");
    }
    at_ += entries * bytes;
    return from;
  }

  void check_version() {
    const uint64_t version = number("the version");
    if (version != 1) bad(at_ - 8, "version ", version, " is unknown: 1 is expected");
  }

  IndexedHeader mapped() {
    IndexedHeader found;
    check_version();
    unsigned char code = 0;
    take(&code, 1, "the code of the type");
    found.documents = count("documents");
    found.doc_entries = count("entries of doc_idx");
    found.sizes_at = part(found.documents, 4, "sizes");
    found.pointers_at = part(found.documents, 8, "pointers");
    found.doc_idx_at = part(found.doc_entries, 8, "entries of doc_idx");
    // Megatron-Core appends one byte for each document of data with several modes.
    if (at_ != file_.bytes() && file_.bytes() - at_ != found.documents) {
      bad(at_, file_.bytes() - at_, " bytes follow after the last part");
    }
    choose_element(found, code, 0);
    check_documents(found);
    check_doc_idx(found);
    return found;
  }

  IndexedHeader older() {
    IndexedHeader found;
    check_version();
    const uint64_t code = number("the code of the type"), bytes = number("the bytes of an element");
    if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) bad(at_ - 8, "an element has ", bytes, " bytes");
    found.documents = count("documents");
    const uint64_t sizes = count("sizes");
    found.doc_entries = count("entries of doc_idx");
    if (sizes != found.documents) {
      bad(at_ - 16, sizes, " sizes of ", found.documents, " documents: only documents with one dimension are read");
    }
    const uint64_t dimensions_at = part(found.documents + 1, 8, "numbers of dimensions");
    found.pointers_at = part(found.documents + 1, 8, "pointers");
    found.sizes_at = part(sizes, 8, "sizes");
    found.doc_idx_at = part(found.doc_entries, 8, "entries of doc_idx");
    found.size_bytes = 8;
    found.pointer_unit = static_cast<int64_t>(bytes);
    each<int64_t>(dimensions_at, found.documents + 1, [&](uint64_t i, int64_t first) {
      if (first != static_cast<int64_t>(i))
        bad(dimensions_at + 8 * i, "document ", i, " does not have exactly one dimension");
    });
    choose_element(found, code, found.pointer_unit);
    check_documents(found);
    check_doc_idx(found);
    return found;
  }

  // visit(number, value) of each entry of a part.
  template <typename T, typename Visit>
  void each(uint64_t offset, uint64_t entries, const Visit& visit) {
    std::vector<T> block(std::min(entries, kEntriesAtOnce));
    for (uint64_t from = 0; from < entries; from += kEntriesAtOnce) {
      const uint64_t here = std::min(kEntriesAtOnce, entries - from);
      file_.read(block.data(), here * sizeof(T), offset + from * sizeof(T));
      for (uint64_t i = 0; i < here; ++i) visit(from + i, block[i]);
    }
  }

  // visit(number, size, pointer) of each document.
  template <typename Visit>
  void each_document(const IndexedHeader& header, const Visit& visit) {
    std::vector<char> sizes(std::min(header.documents, kEntriesAtOnce) * static_cast<uint64_t>(header.size_bytes));
    each_block(header.documents, [&](uint64_t from, uint64_t here) {
      const auto bytes = static_cast<uint64_t>(header.size_bytes);
      file_.read(sizes.data(), here * bytes, header.sizes_at + from * bytes);
      uint64_t i = 0;
      each<int64_t>(header.pointers_at + 8 * from, here, [&](uint64_t, int64_t pointer) {
        int64_t size = 0;
        if (bytes == 8) {
          std::memcpy(&size, &sizes[8 * i], 8);
        } else {
          int32_t narrow = 0;
          std::memcpy(&narrow, &sizes[4 * i], 4);
          size = narrow;
        }
        visit(from + i++, size, pointer);
      });
    });
  }

  template <typename Visit>
  static void each_block(uint64_t entries, const Visit& visit) {
    for (uint64_t from = 0; from < entries; from += kEntriesAtOnce)
      visit(from, std::min(kEntriesAtOnce, entries - from));
  }

  // See [Note: codes]. `bytes`: of an element, where the file says them, or 0.
  void choose_element(IndexedHeader& header, uint64_t code, int64_t bytes) {
    const bool known = code >= 1 && code <= 8;
    if (!known) bad(header.size_bytes == 4 ? 17 : 16, "the code ", code, " of the type is unknown: codes are 1 to 8");
    std::vector<const Code*> rows;
    for (const Code& row : kCodes) {
      if (row.code == code && (bytes == 0 || row.bytes == bytes)) rows.push_back(&row);
    }
    if (rows.size() > 1) {
      std::vector<bool> fits(rows.size(), true);
      __int128 size = 0, pointer = 0;  // of the document before; the first one begins anywhere
      const auto compare = [&](uint64_t i, __int128 next) {
        for (size_t r = 0; i > 0 && r < rows.size(); ++r) fits[r] = fits[r] && pointer + size * rows[r]->bytes == next;
      };
      each_document(header, [&](uint64_t i, int64_t now, int64_t at) {
        compare(i, at);
        size = now, pointer = at;
      });
      if (header.documents > 0) compare(1, static_cast<__int128>(data_bytes_));
      for (size_t r = rows.size(); r-- > 0;) {
        if (!fits[r]) rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(r));
      }
    }
    if (rows.empty()) {
      bad(header.sizes_at, "no type of the code ", code,
          " fits: documents do not begin where the document before ends");
    }
    header.element = rows.front()->element;
    header.element_bytes = rows.front()->bytes;
  }

  void check_documents(const IndexedHeader& header) {
    each_document(header, [&](uint64_t i, int64_t size, int64_t pointer) {
      const uint64_t at = header.sizes_at + i * static_cast<uint64_t>(header.size_bytes);
      if (size < 0) bad(at, "document ", i, " has ", size, " elements");
      const auto begin = static_cast<__int128>(pointer) * header.pointer_unit;
      const __int128 end = begin + static_cast<__int128>(size) * header.element_bytes;
      if (pointer < 0 || end > static_cast<__int128>(data_bytes_)) {
        bad(header.pointers_at + 8 * i, "document ", i, " of ", size, " elements at ", pointer, " is not within the ",
            data_bytes_, " bytes of the file of values: that file was cut, or belongs to another index");
      }
    });
  }

  void check_doc_idx(const IndexedHeader& header) {
    int64_t before = 0;
    each<int64_t>(header.doc_idx_at, header.doc_entries, [&](uint64_t i, int64_t entry) {
      if (entry < before || static_cast<uint64_t>(entry) > header.documents) {
        bad(header.doc_idx_at + 8 * i, "entry ", i, " of doc_idx is ", entry, ": entries must rise from 0 to ",
            header.documents);
      }
      before = entry;
    });
  }

  const CheckedFile& file_;
  uint64_t data_bytes_, at_ = 0;
};

}  // namespace

IndexedHeader read_indexed_header(const CheckedFile& index, uint64_t data_bytes) {
  return IndexReader(index, data_bytes).read();
}

}  // namespace ds::formats
