// Files of the formats, made by hand, for the tests of reading them.
#pragma once
#include <cstdint>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace ds::formats {

template <typename T>
std::string little(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(T); ++i) bytes.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
  return bytes;
}

// ---- opcodes of pickles
// ------------------------------------------------------------------------------------------------
inline std::string text(const std::string& value) { return "X" + little<uint32_t>(value.size()) + value; }
inline std::string integer(int64_t value) { return std::string("\x8a\x08") + little(value); }
inline std::string name(const std::string& module, const std::string& attribute) {
  return "c" + module + "\n" + attribute + "\n";
}
inline std::string tuple(const std::vector<std::string>& items) {
  std::string code = "(";
  for (const std::string& item : items) code += item;
  return code + "t";
}
inline std::string call(const std::string& module, const std::string& attribute,
                        const std::vector<std::string>& items) {
  return name(module, attribute) + tuple(items) + "R";
}
inline std::string pickled(const std::string& code) { return "\x80\x02" + code + "."; }

inline std::string storage(const std::string& key, const std::string& kind, int64_t numel, bool legacy = false) {
  std::vector<std::string> id = {text("storage"), name("torch", kind), text(key), text("cpu"), integer(numel)};
  if (legacy) id.push_back("N");
  return tuple(id) + "Q";
}

inline std::string tensor(const std::string& stored, int64_t offset, const std::vector<int64_t>& shape,
                          const std::vector<int64_t>& stride) {
  std::vector<std::string> sizes, steps;
  for (const int64_t n : shape) sizes.push_back(integer(n));
  for (const int64_t n : stride) steps.push_back(integer(n));
  return call("torch._utils", "_rebuild_tensor_v2",
              {stored, integer(offset), tuple(sizes), tuple(steps), "\x89", call("collections", "OrderedDict", {})});
}

// A state dict as a checkpoint has it: tensors, numbers, text, dates, arrays.
inline std::string state_dict(bool legacy = false) {
  const std::string weight = tensor(storage("0", "FloatStorage", 6, legacy), 0, {2, 3}, {3, 1});
  const std::string dtype =
      call("numpy", "dtype", {text("f8"), "\x89", "\x88"}) +
      tuple({"K\x03", text("<"), "N", "N", "N", "J\xff\xff\xff\xff", "J\xff\xff\xff\xff", std::string("K\0", 2)}) + "b";
  const std::string array = call("numpy.core.multiarray", "_reconstruct",
                                 {name("numpy", "ndarray"), tuple({std::string("K\0", 2)}),
                                  "C\x01"
                                  "b"}) +
                            tuple({"K\x01", tuple({"K\x01"}), dtype, "\x89", "C\x08" + std::string(8, 'x')}) + "b";
  std::string code = call("collections", "OrderedDict", {}) + "q\x01(";
  code += text("weight") + weight;
  code += text("half") + tensor(storage("1", "BFloat16Storage", 4, legacy), 1, {3}, {1});
  code += text("step") + "K\x07";
  code += text("lr") + "G?\xf0" + std::string(6, '\0');
  code += text("many") + "](K\x01K\x02" + integer(int64_t{1} << 40) + "e";
  code += text("when") + call("datetime", "date", {"M\xe4\x07", "K\x01", "K\x02"});
  code += text("array") + array;
  code += text("set") + call("builtins", "set",
                             {"](K\x01K\x02"
                              "e"});
  code += text("itself") + "h\x01";
  return code + "u";
}

// ---- archives
// ----------------------------------------------------------------------------------------------------------
uint32_t crc32_of_text(const std::string& text);

inline std::string zipped(const std::vector<std::pair<std::string, std::string>>& records) {
  std::string file, directory;
  for (const auto& [key, data] : records) {
    const std::string sizes =
        little<uint32_t>(crc32_of_text(data)) + little<uint32_t>(data.size()) + little<uint32_t>(data.size());
    const std::string common =
        little<uint16_t>(0) + little<uint16_t>(0) + little<uint32_t>(0) + sizes + little<uint16_t>(key.size());
    directory += "PK\x01\x02" + little<uint16_t>(20) + little<uint16_t>(20) + common + little<uint16_t>(0) +
                 little<uint16_t>(0) + little<uint16_t>(0) + little<uint16_t>(0) + little<uint32_t>(0) +
                 little<uint32_t>(file.size()) + key;
    file += "PK\x03\x04" + little<uint16_t>(20) + common + little<uint16_t>(0) + key + data;
  }
  const auto count = static_cast<uint16_t>(records.size());
  const std::string end = "PK\x05\x06" + little<uint32_t>(0) + little(count) + little(count) +
                          little<uint32_t>(directory.size()) + little<uint32_t>(file.size()) + little<uint16_t>(0);
  return file + directory + end;
}

inline std::string torch_zip(const std::string& structure) {
  return zipped({{"archive/data.pkl", structure},
                 {"archive/byteorder", "little"},
                 {"archive/data/0", std::string(24, 'a')},
                 {"archive/data/1", std::string(8, 'b')},
                 {"archive/version", "3\n"}});
}

inline std::string torch_stream(const std::string& structure) {
  std::string file = pickled(std::string("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 12));
  file += pickled("M\xe9\x03") + pickled("}" + text("little_endian") + "\x88s") + structure;
  file += pickled("](" + text("0") + text("1") + "e");
  return file + little<int64_t>(6) + std::string(24, 'a') + little<int64_t>(4) + std::string(8, 'b');
}

inline std::string safetensors(const std::string& header, size_t data) {
  return little<uint64_t>(header.size()) + header + std::string(data, 'z');
}

// ---- indexes of indexed data sets ----------------------------------------------------------------------------------
// Documents of these numbers of elements, one behind the other, each element of `bytes`.
inline std::string mapped_index(int code, const std::vector<int>& sizes, int64_t bytes = 4,
                                const std::vector<int64_t>& doc_idx = {0}) {
  std::string index = std::string("MMIDIDX\0\0", 9) + little<uint64_t>(1) + static_cast<char>(code);
  index += little<uint64_t>(sizes.size()) + little<uint64_t>(doc_idx.size());
  std::string pointers, entries;
  int64_t at = 0;
  for (const int size : sizes) {
    index += little<int32_t>(size);
    pointers += little<int64_t>(at);
    at += size * bytes;
  }
  for (const int64_t entry : doc_idx) entries += little<int64_t>(entry);
  return index + pointers + entries;
}

inline std::string older_index(int code, int64_t bytes, const std::vector<int>& sizes) {
  std::string index =
      std::string("TNTIDX\0\0", 8) + little<uint64_t>(1) + little<uint64_t>(static_cast<uint64_t>(code));
  index +=
      little<int64_t>(bytes) + little<uint64_t>(sizes.size()) + little<uint64_t>(sizes.size()) + little<uint64_t>(1);
  std::string pointers = little<int64_t>(0), lengths;
  int64_t at = 0;
  for (size_t i = 0; i <= sizes.size(); ++i) index += little<uint64_t>(i);
  for (const int size : sizes) {
    pointers += little<int64_t>(at += size);
    lengths += little<int64_t>(size);
  }
  return index + pointers + lengths + little<int64_t>(0);
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

}  // namespace ds::formats
