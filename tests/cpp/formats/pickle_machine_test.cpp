// The graphs that pickles describe, and pickles that are refused.
#include "formats/pickle_machine.h"

#include <gtest/gtest.h>

#include "../error_of.h"
#include "formats/format_error.h"
#include "samples.h"

namespace ds::formats {
namespace {

PickleGraph read(const std::string& bytes) {
  NameResolver names;
  uint64_t position = 0;
  return PickleMachine(bytes, names, [](const StoredMemory&) {}).read(&position);
}

std::string complaint(const std::string& code) {
  const std::string bytes = pickled(code);
  return failure_of<DamagedPickle>([&] { read(bytes); });
}

TEST(PickleMachine, NumbersAndText) {
  const std::string bytes = pickled("(K\x05J\xfe\xff\xff\xff\x8a\x09" + std::string(8, '\0') + "\x01" + "I01\nF-1.5\n" +
                                    "S'a\\n\\x41'\nV\\u00e9\nC\x02hiNt");
  const PickleGraph graph = read(bytes);
  ASSERT_TRUE(graph.is(graph.root, Kind::kTuple));
  const Ref* part = graph.parts_of(graph.root);
  EXPECT_EQ(graph.nodes[part[0]].number, 5);
  EXPECT_EQ(graph.nodes[part[1]].number, -2);
  EXPECT_TRUE(graph.is(part[2], Kind::kBigInt));
  EXPECT_TRUE(graph.is(part[3], Kind::kBool));
  EXPECT_EQ(graph.nodes[part[4]].real, -1.5);
  EXPECT_EQ(graph.text(part[5]), "a\nA");
  EXPECT_EQ(graph.text(part[6]), "\xc3\xa9");
  EXPECT_TRUE(graph.is(part[7], Kind::kBytes));
  EXPECT_TRUE(graph.is(part[8], Kind::kNone));
}

TEST(PickleMachine, AStateDictOfTensors) {
  const std::string bytes = pickled(state_dict());
  const PickleGraph graph = read(bytes);
  ASSERT_EQ(graph.tensors.size(), 2u);
  EXPECT_EQ(graph.tensors[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(graph.tensors[1].offset, 1);
  EXPECT_EQ(graph.tensors[1].element->name, "bfloat16");
  ASSERT_EQ(graph.storages.size(), 2u);
  EXPECT_EQ(graph.storages[0].numel, 6);
  const std::vector<Ref>& items = graph.contents[graph.nodes[graph.root].index];
  EXPECT_EQ(items.size(), 18u);
  EXPECT_EQ(items.back(), graph.root);  // it holds itself
}

TEST(PickleMachine, WhatIsRefused) {
  EXPECT_EQ(complaint(call("os", "system", {text("true")})), "os.system");
  EXPECT_EQ(complaint(call("builtins", "eval", {text("1")})), "builtins.eval");
  EXPECT_EQ(complaint(name("collections", "OrderedDict") + "}b"), "collections.OrderedDict");
  EXPECT_TRUE(says(complaint("\x82\x01"), "extension registry"));
  EXPECT_TRUE(says(complaint("X" + little<uint32_t>(1000) + "x"), "cut off"));
  EXPECT_TRUE(says(complaint("]t"), "a mark"));
  EXPECT_TRUE(says(complaint("}]Ns"), "unhashable"));
  EXPECT_TRUE(says(complaint(tensor(storage("0", "FloatStorage", 4), 1, {4}, {1})), "outside of its storage"));
  EXPECT_TRUE(says(complaint(tensor(storage("0", "FloatStorage", 4), 0, {int64_t{1} << 40, int64_t{1} << 40}, {0, 0})),
                   "outside"));
}

TEST(PickleMachine, BoundsWhatAShortFileCanAskFor) {
  std::string laughing = "})";
  for (int i = 0; i < 80; ++i) laughing += "q\x01h\x01\x86";
  EXPECT_TRUE(says(complaint(laughing + "Ns"), "a key"));
  std::string copies = name("builtins", "list") + "q\x01" + "0](" + std::string(100000, 'N') + "eq\x02" + "0(";
  for (int i = 0; i < 1000; ++i) copies += "h\x01h\x02\x85R";
  EXPECT_TRUE(says(complaint(copies + "l"), "copies of copies"));
  EXPECT_TRUE(says(complaint("j\xff\xff\xff\x7f"), "memo"));
}

TEST(PickleMachine, ReadsOnePickleBehindAnother) {
  const std::string bytes = pickled("K\x01") + pickled("K\x02");
  NameResolver names;
  PickleMachine machine(bytes, names);
  uint64_t position = 0;
  const PickleGraph first = machine.read(&position), second = machine.read(&position);
  EXPECT_EQ(first.nodes[first.root].number, 1);
  EXPECT_EQ(second.nodes[second.root].number, 2);
  EXPECT_EQ(position, bytes.size());
}

}  // namespace
}  // namespace ds::formats
