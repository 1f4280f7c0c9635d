// Values that are written come back: random values as pickles, random tensors as files of each kind, by one writer or
// several. DS_FUZZ_CASES: how many, a tenth of it here; 1,000 without.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>

#include "base/error.h"
#include "formats/format_error.h"
#include "formats/pickle_machine.h"
#include "formats/pickle_writer.h"
#include "formats/prepared_file.h"
#include "formats/safetensors_header.h"
#include "formats/shared_archive.h"
#include "formats/torch_archive.h"
#include "io/crc32.h"
#include "temporary.h"

namespace ds::formats {
namespace {

int cases() {
  const char* asked = std::getenv("DS_FUZZ_CASES");
  return asked ? std::max(1, std::atoi(asked) / 10) : 1000;
}

struct Random {
  explicit Random(unsigned seed) : engine(seed) {}
  size_t pick(size_t n) { return engine() % n; }
  std::string text(size_t most) {
    std::string made;
    for (size_t i = pick(most); i > 0; --i)
      made += pick(20) == 0 ? "\xc3\xa9" : std::string(1, "abc \"\\\n\x01/"[pick(9)]);
    return made;
  }
  std::mt19937_64 engine;
};

struct Value {
  Kind kind = Kind::kNone;
  int64_t number = 0;
  double real = 0;
  std::string text;  // or the bytes of a big number
  std::vector<Value> items;
};

Value random_value(Random& random, int depth) {
  constexpr Kind kKinds[] = {Kind::kNone, Kind::kBool,  Kind::kInt,  Kind::kBigInt, Kind::kFloat,
                             Kind::kText, Kind::kTuple, Kind::kList, Kind::kDict};
  Value made;
  made.kind = kKinds[random.pick(depth > 0 ? 9 : 6)];
  switch (made.kind) {
    case Kind::kBool: made.number = static_cast<int64_t>(random.pick(2)); break;
    case Kind::kInt: {
      made.number = static_cast<int64_t>(random.engine()) >> random.pick(64);
      break;
    }
    case Kind::kBigInt:
      made.text = std::string(8 + random.pick(300), '\x5a') + static_cast<char>(random.pick(2) == 0 ? 0x11 : 0x91);
      break;
    case Kind::kFloat: made.real = static_cast<double>(static_cast<int64_t>(random.engine())) / 3; break;
    case Kind::kText: made.text = random.text(random.pick(50) == 0 ? 2000 : 12); break;
    case Kind::kDict:
    case Kind::kTuple:
    case Kind::kList: {
      const size_t count = random.pick(40) == 0 ? 1000 + random.pick(3) : random.pick(6);
      for (size_t i = 0; i < count; ++i) {
        if (made.kind == Kind::kDict) {
          Value key;
          key.kind = Kind::kInt;
          key.number = static_cast<int64_t>(i);
          made.items.push_back(key);
        }
        made.items.push_back(random_value(random, count > 10 ? 0 : depth - 1));
      }
      break;
    }
    default: break;
  }
  return made;
}

void write(PickleWriter& out, const Value& value) {
  const size_t step = value.kind == Kind::kDict ? 2 : 1;
  switch (value.kind) {
    case Kind::kBool: return out.boolean(value.number != 0);
    case Kind::kInt: return out.integer(value.number);
    case Kind::kBigInt: return out.big_integer(value.text);
    case Kind::kFloat: return out.real(value.real);
    case Kind::kText: out.text(value.text); break;
    case Kind::kTuple:
      if (value.items.size() > 3) out.mark();
      for (const Value& item : value.items) write(out, item);
      out.tuple(value.items.size());
      break;
    case Kind::kList:
    case Kind::kDict:
      value.kind == Kind::kDict ? out.empty_dict() : out.empty_list();
      for (size_t begin = 0; begin < value.items.size(); begin += step * PickleWriter::kBatch) {
        const size_t end = std::min(value.items.size(), begin + step * PickleWriter::kBatch);
        const bool one = end - begin == step;
        if (!one) out.mark();
        for (size_t i = begin; i < end; ++i) write(out, value.items[i]);
        value.kind == Kind::kDict ? out.set_items(one) : out.append(one);
      }
      break;
    default: return out.none();
  }
  // Met again at once, inside of itself.
  const uint32_t number = out.put();
  out.pop();
  out.get(number);
}

void expect_same(const PickleGraph& graph, Ref ref, const Value& value) {
  const Node& node = graph.nodes[ref];
  const size_t count = node.kind == Kind::kTuple                              ? node.count
                       : node.kind == Kind::kList || node.kind == Kind::kDict ? graph.contents[node.index].size()
                                                                              : 0;
  ASSERT_EQ(node.kind, value.kind);
  ASSERT_EQ(count, value.items.size());
  if (node.kind == Kind::kBool || node.kind == Kind::kInt) {
    ASSERT_EQ(node.number, value.number);
  }
  if (node.kind == Kind::kFloat) {
    ASSERT_EQ(node.real, value.real);
  }
  if (node.kind == Kind::kText || node.kind == Kind::kBigInt) {
    ASSERT_EQ(graph.text(ref), value.text);
  }
  const Ref* items = node.kind == Kind::kTuple ? graph.parts_of(ref)
                     : count > 0               ? graph.contents[node.index].data()
                                               : nullptr;
  for (size_t i = 0; i < count; ++i) expect_same(graph, items[i], value.items[i]);
}

TEST(RoundTrip, PickledValuesAreReadAsTheyWere) {
  Random random(3);
  for (int i = 0; i < cases(); ++i) {
    const Value value = random_value(random, 4);
    PickleWriter out;
    write(out, value);
    const std::string bytes = out.take();
    NameResolver names;
    uint64_t position = 0;
    const PickleGraph graph = PickleMachine(bytes, names, nullptr).read(&position);
    ASSERT_EQ(position, bytes.size());
    expect_same(graph, graph.root, value);
    if (HasFatalFailure()) return;
  }
}

// ---- files
struct Tensors {
  std::vector<std::string> memory;  // bytes of the storages, which the sources show
  std::vector<std::string> keys;
  std::vector<io::SourcePtr> sources;
  std::vector<uint64_t> counts;
  std::vector<NamedTensor> named;
};

Tensors random_tensors(Random& random) {
  Tensors made;
  const size_t count = random.pick(6);
  made.memory.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t numel = random.pick(4) == 0 ? 0 : random.pick(random.pick(8) == 0 ? 9000 : 40);
    std::string bytes(4 * numel, '\0');
    for (char& c : bytes) c = static_cast<char>(random.engine());
    made.memory.push_back(std::move(bytes));
    const std::string& kept = made.memory.back();
    const uint64_t cut = kept.empty() ? 0 : random.pick(kept.size());
    std::vector<io::SourcePtr> parts = {
        std::make_shared<io::MemorySource>(std::vector<io::MemoryPiece>{{kept.data(), cut}}),
        std::make_shared<io::MemorySource>(std::vector<io::MemoryPiece>{{kept.data() + cut, kept.size() - cut}})};
    made.sources.push_back(std::make_shared<io::JoinedSource>(std::move(parts)));
    made.keys.push_back(std::to_string(i));
    made.counts.push_back(numel);
    made.named.push_back({"w" + std::to_string(i), "float32", {static_cast<int64_t>(numel)}, i});
  }
  return made;
}

// A list of the tensors.
void write(PickleWriter& out, const Tensors& tensors, bool stream) {
  out.empty_list();
  out.mark();
  for (size_t i = 0; i < tensors.keys.size(); ++i) {
    out.global("torch._utils", "_rebuild_tensor_v2");
    out.mark();
    out.mark();
    out.text("storage");
    out.global("torch", "FloatStorage");
    out.text(tensors.keys[i]);
    out.text("cpu");
    out.integer(static_cast<int64_t>(tensors.counts[i]));
    if (stream) out.none();
    out.tuple(stream ? 6 : 5);
    out.persistent();
    out.integer(0);
    out.integer(static_cast<int64_t>(tensors.counts[i]));
    out.tuple(1);
    out.integer(1);
    out.tuple(1);
    out.boolean(false);
    out.global("collections", "OrderedDict");
    out.empty_tuple();
    out.reduce();
    out.tuple(6);
    out.reduce();
  }
  out.append(false);
}

std::string pickled(const std::function<void(PickleWriter&)>& fill) {
  PickleWriter out;
  fill(out);
  return out.take();
}

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void expect_record(const std::string& path, const FileRecord& record, const Tensors& tensors) {
  const std::string content = content_of(path);
  ASSERT_EQ(record.bytes, content.size());
  ASSERT_EQ(record.crc32, io::crc32_of(content.data(), content.size()));
  ASSERT_EQ(record.tensors.size(), tensors.named.size());
  for (const TensorRecord& tensor : record.tensors) {
    const std::string& wanted = tensors.memory[std::stoul(tensor.name.substr(1))];
    ASSERT_EQ(content.substr(tensor.offset, tensor.bytes), wanted);
    ASSERT_EQ(tensor.crc32, io::crc32_of(wanted.data(), wanted.size()));
  }
}

void expect_archive(const std::string& path, const Tensors& tensors) {
  TorchArchive archive(path);
  NameResolver names;
  const PickleGraph graph = archive.read_structure(names);
  ASSERT_EQ(graph.tensors.size(), tensors.keys.size());
  for (size_t i = 0; i < graph.storages.size(); ++i) {
    const StorageRecord record = archive.record_of(graph.storages[i]);
    ASSERT_EQ(archive.file().text(record.offset, record.bytes), tensors.memory[std::stoul(graph.storages[i].key)]);
  }
}

TorchZipFile zip_of(const Tensors& tensors) {
  return TorchZipFile(pickled([&](PickleWriter& out) { write(out, tensors, false); }), tensors.keys, tensors.sources,
                      tensors.named);
}

io::StreamOptions small_options() {
  io::StreamOptions options;
  options.buffer_bytes = 8192;
  options.sync = false;
  return options;
}

TEST(RoundTrip, FilesOfEachKindHaveTheirTensors) {
  const Temporary file("written");
  io::Files files;
  Random random(4);
  for (int i = 0; i < cases() / 10 + 1; ++i) {
    const Tensors tensors = random_tensors(random);
    io::Staging staging;
    const TorchZipFile zip = zip_of(tensors);
    expect_record(file.path(), zip.write(files, file.path(), small_options(), staging), tensors);
    expect_archive(file.path(), tensors);

    std::string head;
    head += pickled([](PickleWriter& out) { out.big_integer("\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"); });
    head += pickled([](PickleWriter& out) { out.integer(1001); });
    head += pickled([](PickleWriter& out) { out.empty_dict(); });
    head += pickled([&](PickleWriter& out) { write(out, tensors, true); });
    head += pickled([&](PickleWriter& out) {
      out.empty_list();
      out.mark();
      for (const std::string& key : tensors.keys) out.text(key);
      out.append(false);
    });
    const TorchStreamFile stream(head, tensors.counts, tensors.sources, tensors.named);
    expect_record(file.path(), stream.write(files, file.path(), small_options(), staging), tensors);
    expect_archive(file.path(), tensors);

    std::vector<NamedTensor> named = tensors.named;
    const SafetensorsFile safe(named, tensors.sources, {{"format", random.text(9)}});
    expect_record(file.path(), safe.write(files, file.path(), small_options(), staging), tensors);
    const CheckedFile checked(file.path());
    const SafetensorsHeader header = read_safetensors_header(
        checked, [](const Element&) { return true; }, "1");
    ASSERT_EQ(header.tensors.size(), tensors.named.size());
    for (const SafetensorsEntry& entry : header.tensors) {
      ASSERT_EQ(checked.text(entry.offset, entry.bytes), tensors.memory[std::stoul(entry.name.substr(1))]);
    }
    if (HasFatalFailure()) return;
  }
}

TEST(RoundTrip, SeveralWritersMakeTheFileOfOne) {
  const Temporary one("one"), many("many");
  io::Files files;
  Random random(5);
  for (int i = 0; i < cases() / 10 + 1; ++i) {
    const Tensors tensors = random_tensors(random);
    io::Staging staging;
    const TorchZipFile zip = zip_of(tensors);
    const FileRecord whole = zip.write(files, one.path(), small_options(), staging);
    const size_t count = 1 + random.pick(5);
    const ArchiveCuts cuts(zip.entries(), zip.texts().size(), count);
    std::vector<WrittenRun> runs;
    for (size_t index = count; index-- > 0;) {
      for (const WrittenRun& run : ArchivePart(zip, cuts, index).write(files, many.path(), small_options(), staging)) {
        runs.push_back(run);
      }
    }
    const FileRecord made = complete_archive(many.path(), zip, cuts, runs);
    ASSERT_EQ(content_of(many.path()), content_of(one.path()));
    ASSERT_EQ(made.crc32, whole.crc32);
    ASSERT_EQ(made.tensors.size(), whole.tensors.size());
    if (!runs.empty()) {
      runs.pop_back();
      EXPECT_THROW(complete_archive(many.path(), zip, cuts, runs), Error);
    }
    std::ofstream(many.path(), std::ios::trunc).close();
  }
}

}  // namespace
}  // namespace ds::formats
