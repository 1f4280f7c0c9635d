// Files with wrong bytes: whatever comes, a graph or one of the errors of the formats, never anything else, and soon.
// DS_FUZZ_CASES sets how many instead of 100 000: `make test-unit` and the sanitizers run fewer.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <random>

#include "formats/format_error.h"
#include "formats/indexed_dataset.h"
#include "formats/pickle_machine.h"
#include "formats/safetensors_header.h"
#include "formats/torch_archive.h"
#include "samples.h"
#include "temporary.h"

namespace ds::formats {
namespace {

int fuzz_cases() {
  const char* asked = std::getenv("DS_FUZZ_CASES");
  return asked ? std::atoi(asked) : 100000;
}

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  std::string damaged(std::string bytes) {
    for (int i = pick(4); i >= 0 && !bytes.empty(); --i) {
      const size_t at = pick(bytes.size());
      switch (pick(6)) {
        case 0: bytes[at] = static_cast<char>(pick(256)); break;
        case 1: bytes.insert(at, 1 + pick(8), kOpcodes[pick(kOpcodes.size())]); break;
        case 2: bytes.erase(at, 1 + pick(8)); break;
        case 3: bytes.insert(at, bytes.substr(pick(bytes.size()), pick(64))); break;  // something from elsewhere
        case 4:
          for (size_t j = at; j < std::min(bytes.size(), at + 1 + pick(8)); ++j) bytes[j] = "\xff\x7f\0\x80"[pick(4)];
          break;
        default:
          if (pick(8) == 0) bytes.resize(at);
      }
    }
    return bytes;
  }

  size_t pick(size_t n) { return random_() % n; }

 private:
  const std::string kOpcodes =
      "().0125FGIJKLMNQRSTUVX]}abcdeghijloprstuqBC\x80\x81\x85\x86\x87\x88\x8a\x8b\x8c\x8f\x90\x91\x92\x93\x94\x95\x96";
  std::mt19937 random_;
};

// The properties of every graph, whatever it was made of.
void check(const PickleGraph& graph) {
  const auto exists = [&](Ref ref) { return ref < graph.nodes.size(); };
  ASSERT_TRUE(exists(graph.root));
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (node.kind == Kind::kTuple || node.kind == Kind::kFrozenSet || node.kind == Kind::kObject) {
      ASSERT_LE(node.begin + node.count, graph.parts.size());
      for (uint32_t j = 0; j < node.count; ++j) ASSERT_LT(graph.parts[node.begin + j], i);  // earlier ones only
    }
  }
  uint32_t before = 0;
  for (const Step& step : graph.steps) {
    ASSERT_GE(step.nodes, before);
    before = step.nodes;
    ASSERT_LT(step.target, step.nodes);
    for (uint32_t j = 0; j < step.count; ++j) ASSERT_LT(graph.parts[step.begin + j], step.nodes);
  }
  for (const StoredTensor& tensor : graph.tensors) {
    const StoredMemory& memory = graph.storages[tensor.storage];
    int64_t last = tensor.offset;
    bool empty = false;
    for (size_t d = 0; d < tensor.shape.size(); ++d) {
      empty = empty || tensor.shape[d] == 0;
      last += (tensor.shape[d] - 1) * tensor.stride[d];
    }
    if (!empty) {
      ASSERT_LT(last * tensor.element->bytes, memory.numel * memory.element->bytes);
    }
  }
}

struct Count {
  int fine = 0, refused = 0;
};

template <typename Read>
Count run(int cases, const std::vector<std::string>& good, const Read& read) {
  Mutator mutator(11);
  Count count;
  using Clock = std::chrono::steady_clock;
  std::chrono::duration<double> slowest{0};
  for (int i = 0; i < cases; ++i) {
    const std::string bytes = mutator.damaged(good[static_cast<size_t>(i) % good.size()]);
    const auto begin = Clock::now();
    try {
      read(bytes);
      ++count.fine;
    } catch (const DamagedPickle& error) {
      EXPECT_STRNE(error.what(), "");
      ++count.refused;
    } catch (const DamagedZip& error) {
      ++count.refused;
    } catch (const DamagedSafetensors& error) {
      ++count.refused;
    } catch (const DamagedIndex& error) {
      EXPECT_STRNE(error.what(), "");
      ++count.refused;
    }
    slowest = std::max<std::chrono::duration<double>>(slowest, Clock::now() - begin);
  }
  EXPECT_LT(slowest.count(), 2.0);
  EXPECT_GT(count.refused, cases / 4);
  EXPECT_GT(count.fine, cases / 200);
  return count;
}

TEST(Fuzz, Pickles) {
  std::string shapes = "(";
  for (const char* cls : {"list", "set", "frozenset", "dict", "tuple"})
    shapes += call("builtins", cls,
                   {"](K\x01K\x02"
                    "e"});
  const std::string plain =
      pickled("(" + call("collections", "deque", {"]"}) +
              "(K\x01K\x02"
              "e" +
              call("collections", "defaultdict", {name("builtins", "list")}) + text("a") + "]s" +
              call("fractions", "Fraction", {text("1/3")}) + call("pathlib", "PosixPath", {text("/")}) +
              "(K\x01K\x02\x91\x8f(K\x05\x90L123L\nS'x\\'y'\nVa\\u1234\n\x95" + little<uint64_t>(2) + "NNt");
  run(fuzz_cases(),
      {pickled(state_dict()), plain,
       pickled("(" + call("_codecs", "encode", {text("\xc3\xa9"), text("latin1")}) + "t")},
      [](const std::string& bytes) {
        NameResolver names;
        uint64_t position = 0;
        check(PickleMachine(bytes, names, [](const StoredMemory&) {}).read(&position));
        ASSERT_LE(position, bytes.size());
      });
}

TEST(Fuzz, TorchArchives) {
  const Temporary file("fuzz");
  run(fuzz_cases() / 20, {torch_zip(pickled(state_dict())), torch_stream(pickled(state_dict(true)))},
      [&](const std::string& bytes) {
        write_file(file.path(), bytes);
        TorchArchive archive(file.path());
        NameResolver names;
        const PickleGraph graph = archive.read_structure(names);
        check(graph);
        for (const StoredMemory& memory : graph.storages) {
          const StorageRecord record = archive.record_of(memory);
          if (!record.packed) {
            ASSERT_LE(record.offset + record.bytes, bytes.size());
          }
        }
      });
}

TEST(Fuzz, SafetensorsHeaders) {
  const Temporary file("fuzz");
  const std::string header = R"({"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                             R"("y":{"dtype":"I64","shape":[1],"data_offsets":[24,32]}})";
  const auto all = [](const Element&) { return true; };
  run(fuzz_cases() / 20, {safetensors(header, 32)}, [&](const std::string& bytes) {
    write_file(file.path(), bytes);
    const SafetensorsHeader found = read_safetensors_header(CheckedFile(file.path()), all, "2");
    for (const SafetensorsEntry& entry : found.tensors) ASSERT_LE(entry.offset + entry.bytes, bytes.size());
  });
}

TEST(Fuzz, IndexedDatasets) {
  const Temporary file("fuzz");
  run(fuzz_cases() / 20, {mapped_index(4, {3, 0, 5, 1}), mapped_index(8, {2, 2}, 2), older_index(5, 8, {4, 1, 2})},
      [&](const std::string& bytes) {
        write_file(file.path(), bytes);
        const IndexedHeader found = read_indexed_header(CheckedFile(file.path()), 72);
        const uint64_t end = found.sizes_at + found.documents * static_cast<uint64_t>(found.size_bytes);
        ASSERT_LE(end, bytes.size());
        ASSERT_LE(found.pointers_at + 8 * found.documents, bytes.size());
        ASSERT_LE(found.doc_idx_at + 8 * found.doc_entries, bytes.size());
      });
}

}  // namespace
}  // namespace ds::formats
