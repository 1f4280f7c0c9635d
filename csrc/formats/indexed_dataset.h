// The index of an indexed data set: the `.idx` file beside a `.bin` file with the values of its documents, as Megatron
// and fairseq write them. Little-endian, and nothing in it is trusted.
//
//   MMIDIDX\0\0  u64 version 1, u8 code of the type, u64 documents, u64 entries of doc_idx,
//                i32 sizes [documents], i64 pointers in bytes [documents], i64 doc_idx [entries]
//   TNTIDX\0\0   u64 version 1, u64 code, u64 bytes of an element, u64 documents, u64 sizes, u64 entries of doc_idx,
//                i64 first size of each document [documents + 1], i64 pointers in elements [documents + 1],
//                i64 sizes, i64 doc_idx
//
// [Note: codes] Codes 1 to 5 mean the same everywhere. 6, 7 and 8 are uint16, uint32 and uint64 in files of DeepSpeed,
// and float64, float64 or float32, and uint16 in files of Megatron. The bytes of an element decide: with the right
// type, each document begins where the document before ends.
#pragma once
#include <cstdint>

#include "formats/checked_file.h"

namespace ds::formats {

// The places of the parts of an index. Each size is at least 0, and each document lies in the file of values.
struct IndexedHeader {
  const char* element = nullptr;  // numpy's name of the type: "uint16"
  int64_t element_bytes = 0;
  uint64_t documents = 0;
  uint64_t sizes_at = 0;  // offsets in the index
  uint64_t pointers_at = 0;
  uint64_t doc_idx_at = 0;
  uint64_t doc_entries = 0;
  int64_t size_bytes = 4;    // of one size in the index: 4 or 8
  int64_t pointer_unit = 1;  // bytes that a pointer counts
};

// The header of an index whose values are in a file of `data_bytes`. Throws DamagedIndex with the file, the offset and
// the fault if the index contradicts itself or that file, and io::FileError.
IndexedHeader read_indexed_header(const CheckedFile& index, uint64_t data_bytes);

}  // namespace ds::formats
