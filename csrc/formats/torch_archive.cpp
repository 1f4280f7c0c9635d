#include "formats/torch_archive.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>

#include "base/sizes.h"
#include "formats/format_error.h"
#include "formats/pickle_machine.h"
#include "io/file_error.h"

namespace ds::formats {
namespace {

constexpr uint64_t kMostPackedPickle = 1 << 30;
constexpr std::string_view kMagic("\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 10);  // 0x1950A86A20F9469CFC6C
constexpr std::string_view kMagicDigits = "119547037146038801333356";
constexpr int64_t kVersion = 1001;

template <typename... What>
[[noreturn]] void broken(const CheckedFile& file, const What&... what) {
  damaged<DamagedPickle>(file.path(), " is damaged or no file of torch.save: ", what...);
}

uint64_t bytes_of(const CheckedFile& file, const StoredMemory& memory) {
  uint64_t bytes = 0;
  if (memory.numel < 0 ||
      !sizes::multiply<uint64_t>(static_cast<uint64_t>(memory.numel), memory.element->bytes, &bytes))
    broken(file, "the storage '", memory.key, "' has ", memory.numel, " elements, more than any file can hold");
  return bytes;
}

bool little_endian_machine() {
  const uint16_t one = 1;
  return *reinterpret_cast<const uint8_t*>(&one) == 1;
}

}  // namespace

TorchArchive::TorchArchive(const std::string& path) : file_(path) {
  const uint64_t start = std::min<uint64_t>(file_.bytes(), 2);
  if (file_.text(0, start) == "PK") {
    open_zip();
  } else {
    open_legacy();
  }
}

void TorchArchive::open_zip() {
  zip_ = std::make_unique<ZipDirectory>(file_);
  int roots = 0;
  constexpr std::string_view kStructure = "/data.pkl";
  for (const std::string& name : zip_->names()) {
    if (name.size() <= kStructure.size() || name.find('/') != name.size() - kStructure.size()) continue;
    if (name.compare(name.size() - kStructure.size(), kStructure.size(), kStructure) != 0) continue;
    root_ = name.substr(0, name.size() - kStructure.size() + 1);
    ++roots;
  }
  if (roots != 1) broken(file_, "it has ", roots, " records data.pkl");
  if (zip_->has(root_ + "constants.pkl")) broken(file_, "it is a TorchScript program; load it with torch.jit.load");
  const auto bytes_of = [this](const std::string& name) {
    const ZipRecord record = zip_->record(name);
    if (record.packed && record.bytes > kMostPackedPickle) {
      broken(file_, "its packed structure grows to ", record.bytes, " bytes");
    }
    if (!record.packed) return file_.text(record.offset, record.bytes);
    std::string unpacked;
    // Grown as it comes: what a record says of itself must not take memory.
    for (uint64_t at = 0; at < record.bytes;) {
      const uint64_t next = std::min<uint64_t>(record.bytes, std::max<uint64_t>(4 * at, 1 << 22));
      unpacked.resize(next);
      zip_->unpack(name, 0, next, unpacked.data());
      at = next;
    }
    return unpacked;
  };
  owned_ = bytes_of(root_ + "data.pkl");
  structure_ = owned_;
  const std::string order = root_ + "byteorder";
  if (zip_->has(order)) swapped_ = bytes_of(order) != (little_endian_machine() ? "little" : "big");
}

void TorchArchive::check(const StoredMemory& memory) {
  const uint64_t wanted = bytes_of(file_, memory);
  StorageRecord found;
  if (zip_ != nullptr) {
    const ZipRecord record = zip_->record(root_ + "data/" + memory.key);
    if (wanted > record.bytes) {
      broken(file_, "the storage '", memory.key, "' has ", record.bytes, " bytes, not ", memory.numel,
             " elements of torch.", memory.element->name);
    }
    found = {record.offset, wanted, record.packed, root_ + "data/" + memory.key};
  } else {
    if (wanted > file_.bytes()) broken(file_, "the storage '", memory.key, "' is larger than the file");
    found = {0, wanted, false, {}};
  }
  records_[memory.key] = found;
}

StorageRecord TorchArchive::record_of(const StoredMemory& memory) {
  if (records_.find(memory.key) == records_.end()) check(memory);
  return records_.at(memory.key);
}

PickleGraph TorchArchive::read_structure(NameResolver& names) {
  PickleMachine machine(structure_, names, [this](const StoredMemory& memory) { check(memory); });
  uint64_t position = begin_;
  PickleGraph graph = machine.read(&position);
  if (zip_ == nullptr) find_legacy_storages(position, graph.storages);
  return graph;
}

// ---- the older format: five pickles (magic, version, system, object, keys of storages), then each storage after its
// numel
void TorchArchive::map() {
  const io::Descriptor file(::open(file_.path().c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) io::fail_file(errno, "open", file_.path());
  const size_t bytes = file_.bytes();
  void* memory = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (memory == MAP_FAILED) io::fail_file(errno, "map", file_.path());
  mapped_ = std::shared_ptr<void>(memory, [bytes](void* at) { ::munmap(at, bytes); });
  structure_ = {static_cast<const char*>(memory), bytes};
}

void TorchArchive::open_legacy() {
  if (file_.bytes() == 0) broken(file_, "it is empty");
  map();
  NameResolver table;
  const auto plain = [&](uint64_t* position) { return PickleMachine(structure_, table).read(position); };
  const auto is_magic = [](const PickleGraph& graph) {
    const bool wide = graph.is(graph.root, Kind::kBigInt) && graph.text(graph.root) == kMagic;
    return wide || (graph.is(graph.root, Kind::kDecimal) && graph.text(graph.root) == kMagicDigits);
  };
  try {
    if (!is_magic(plain(&begin_))) broken(file_, "it does not begin as one");
  } catch (const RefusedName&) {
    throw;
  } catch (const DamagedPickle&) {
    broken(file_, "it does not begin as one");
  }
  const PickleGraph version = plain(&begin_), system = plain(&begin_);
  const bool known = version.is(version.root, Kind::kInt) && version.nodes[version.root].number == kVersion;
  if (!known || !system.is(system.root, Kind::kDict)) broken(file_, "it is of an unknown version");
  bool little = true;
  const std::vector<Ref>& facts = system.contents[system.nodes[system.root].index];
  for (size_t i = 0; i < facts.size(); i += 2) {
    if (!system.is(facts[i], Kind::kText) || system.text(facts[i]) != "little_endian") continue;
    little = system.is(facts[i + 1], Kind::kBool) && system.nodes[facts[i + 1]].number != 0;
  }
  swapped_ = little != little_endian_machine();
}

void TorchArchive::find_legacy_storages(uint64_t position, const std::vector<StoredMemory>& named) {
  NameResolver table;
  const PickleGraph keys = PickleMachine(structure_, table).read(&position);
  if (!keys.is(keys.root, Kind::kList)) broken(file_, "its storages are not those that its tensors name");
  std::unordered_map<std::string, const StoredMemory*> waiting;
  for (const StoredMemory& memory : named) waiting.emplace(memory.key, &memory);
  for (const Ref ref : keys.contents[keys.nodes[keys.root].index]) {
    // Very old files have numbers for keys.
    const bool text = keys.is(ref, Kind::kText), number = keys.is(ref, Kind::kInt);
    const std::string key = text     ? std::string(keys.text(ref))
                            : number ? std::to_string(keys.nodes[ref].number)
                                     : std::string();
    const auto known = waiting.find(key);
    if ((!text && !number) || known == waiting.end()) {
      broken(file_, "its storages are not those that its tensors name");
    }
    if (position > file_.bytes() || file_.bytes() - position < 8) broken(file_, "it is cut off");
    uint64_t numel = 0;
    for (int i = 0; i < 8; ++i) {
      const int at = (swapped_ == little_endian_machine()) ? i : 7 - i;
      numel = numel << 8 | static_cast<uint8_t>(structure_[position + static_cast<uint64_t>(at)]);
    }
    position += 8;
    const uint64_t bytes = bytes_of(file_, *known->second);
    if (numel != static_cast<uint64_t>(known->second->numel) || bytes > file_.bytes() - position) {
      broken(file_, "the storage '", key, "' is cut off or of another size");
    }
    records_[key] = {position, bytes, false, {}};
    position += bytes;
    waiting.erase(known);
  }
  if (!waiting.empty()) broken(file_, "its storages are not those that its tensors name");
}

}  // namespace ds::formats
