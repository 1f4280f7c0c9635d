// Messages between stages: ranks as threads.
#include "comm/pipe/pipe_channel.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "../on_threads.h"
#include "../error_of.h"
#include "base/error.h"
#include "comm/transports/counted_communicator.h"
#include "comm/transports/thread_communicator.h"
#include "transports.h"

namespace ds::comm {
namespace {

using Body = std::function<void(int rank, PipeChannel&)>;

const char* transport_of_device() { return on_standin() ? "nccl_on_device" : "thread"; }

// Two ranks for each edge, which any of the channels' ranks may have.
struct OpenEdges {
  std::map<PipeEdge, std::pair<std::vector<CommunicatorPtr>, nccl::UniqueId>> all;
  explicit OpenEdges(int size) {
    for (int from = 0; from < size; ++from)
      for (int to = 0; to < size; ++to)
        for (const auto stream : {PipeStream::kActivations, PipeStream::kGrads})
          if (from != to)
            all[{stream, from, to}] = {thread_communicators(2), NcclLibrary::open(fake_nccl_path())->make_id()};
  }
  PipeEdges of(int rank) {
    PipeEdges edges;
    for (const auto& [edge, made] : all) edges.all.insert(edge);
    edges.open = [this, rank](const PipeEdge& edge) {
      const auto& [threads, id] = all.at(edge);
      return testing_transports::nccl_on_device(threads[edge.from == rank ? 0 : 1], id);
    };
    return edges;
  }
};

// One channel on each of `size` threads, over that transport.
void on_channels(const std::string& transport, int size, const Body& body, const PipeChannelOptions& options = {}) {
  const auto first = thread_communicators(size), second = thread_communicators(size);
  nccl::UniqueId ids[2];
  std::optional<OpenEdges> edges;
  if (transport == "nccl_on_device") {
    edges.emplace(size);
    for (auto& id : ids) id = NcclLibrary::open(fake_nccl_path())->make_id();
  }
  on_threads(size, [&](int rank) {
    const c10::Device device = testing_transports::device_of(rank);
    const c10::DeviceGuard current(device);
    const auto make = [&](const CommunicatorPtr& thread, const nccl::UniqueId& id) {
      return edges ? testing_transports::nccl_on_device(thread, id) : testing_transports::make(transport, thread, id);
    };
    const auto activations = make(first[rank], ids[0]), grads = make(second[rank], ids[1]);
    {
      PipeChannelOptions mine = options;
      mine.device = device;
      PipeChannel channel(activations, grads, mine, edges ? edges->of(rank) : PipeEdges{});
      body(rank, channel);
      channel.settle();
    }
    try {
      activations->barrier();  // nobody goes while another still receives
    } catch (const Error&) {   // aborted
      return;
    }
  });
}

// The same on both ends: message `number` of that stream.
PipeMessage message_of(int from, int to, PipeStream stream, int number) {
  std::mt19937 random(static_cast<unsigned>(from * 1000003 + to * 10007 + static_cast<int>(stream) * 101 + number));
  const at::ScalarType types[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,
                                  at::kInt,   at::kChar,   at::kByte, at::kBool,     at::kComplexFloat};
  PipeMessage message;
  message.packed = random() % 2;
  const int pieces = number % 7 == 6 ? 12 : 1 + static_cast<int>(random() % 3);  // 12: more than a note has room for
  for (int piece = 0; piece < pieces; ++piece) {
    if (random() % 6 == 0) {
      message.pieces.emplace_back();
      continue;
    }
    std::vector<int64_t> sizes(random() % 4);
    for (int64_t& each : sizes) each = static_cast<int64_t>(random() % 5);  // 0 is a size, too
    if (number % 5 == 3) sizes = {100, 131};                                // read out of the sender's memory
    const at::ScalarType type = types[random() % 10];
    int64_t numel = 1;
    for (const int64_t each : sizes) numel *= each;
    at::Tensor tensor = at::arange(numel).add(static_cast<int64_t>(random() % 7)).view(sizes).to(type);
    if (tensor.dim() == 2) tensor = tensor.t();  // not contiguous
    message.pieces.push_back({tensor, at::isFloatingType(type) && random() % 2 == 0});
  }
  return message;
}

// The same on the rank's device, without waiting.
PipeMessage on_device(int rank, PipeMessage message) {
  for (PipePiece& piece : message.pieces)
    if (piece.tensor.defined()) piece.tensor = piece.tensor.to(testing_transports::device_of(rank), true);
  return message;
}

void expect_equal(const PipeMessage& found, const PipeMessage& wanted) {
  ASSERT_EQ(found.pieces.size(), wanted.pieces.size());
  EXPECT_EQ(found.packed, wanted.packed);
  for (size_t index = 0; index < wanted.pieces.size(); ++index) {
    const PipePiece &a = found.pieces[index], &b = wanted.pieces[index];
    ASSERT_EQ(a.tensor.defined(), b.tensor.defined());
    EXPECT_EQ(a.wants_grad, b.wants_grad);
    if (!b.tensor.defined()) continue;
    EXPECT_EQ(a.tensor.scalar_type(), b.tensor.scalar_type());
    EXPECT_TRUE(at::equal(a.tensor.cpu(), b.tensor));
  }
}

class PipeChannels : public testing::TestWithParam<std::tuple<std::string, int>> {};

// Every rank sends to every other, both streams, in orders of its own; shapes and types differ with every message.
TEST_P(PipeChannels, CarryAnything) {
  const auto [transport, size] = GetParam();
  constexpr int kMessages = 15;
  on_channels(transport, size, [size = size](int rank, PipeChannel& channel) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int other = 0; other < size; ++other)
      for (const auto stream : {PipeStream::kActivations, PipeStream::kGrads})
        if (other != rank) channel.expect(stream, other, kMessages);
    for (int number = 0; number < kMessages; ++number) {
      std::vector<std::pair<int, PipeStream>> order;
      for (int other = 0; other < size; ++other)
        for (const auto stream : {PipeStream::kActivations, PipeStream::kGrads})
          if (other != rank) order.emplace_back(other, stream);
      std::shuffle(order.begin(), order.end(), random);
      for (const auto& [to, stream] : order)
        channel.send(stream, to, on_device(rank, message_of(rank, to, stream, number)));
      std::shuffle(order.begin(), order.end(), random);
      for (const auto& [from, stream] : order)
        expect_equal(channel.recv(stream, from), message_of(from, rank, stream, number));
    }
  });
}

// Both ranks send before either allocates what it receives, and no cached memory has room for that. On the stand-in an
// allocation that grows its memory waits for the operations of NCCL that run.
TEST_P(PipeChannels, ReceivesAllocateWhileSendsAreOnTheirWay) {
  const auto [transport, size] = GetParam();
  on_channels(transport, size, [size = size](int rank, PipeChannel& channel) {
    const auto options = at::TensorOptions().device(testing_transports::device_of(rank));
    for (int64_t round = 1; round <= 3; ++round) {
      const at::Tensor mine = at::full({round << 20}, rank + 1, options);
      for (int other = 0; other < size; ++other) {
        if (other == rank) continue;
        for (const auto stream : {PipeStream::kActivations, PipeStream::kGrads}) {
          channel.send(stream, other, {{{mine, false}}, false});
          channel.expect(stream, other, 1);
        }
      }
      for (int other = 0; other < size; ++other) {
        if (other == rank) continue;
        for (const auto stream : {PipeStream::kActivations, PipeStream::kGrads})
          EXPECT_TRUE(at::all(channel.recv(stream, other).pieces[0].tensor.eq(other + 1)).item<bool>());
      }
    }
  });
}

std::vector<std::string> transports() {
  if (on_standin()) return {transport_of_device()};
  return {"thread", "shm", "send_and_recv_only"};
}
std::vector<int> sizes() { return on_standin() ? std::vector<int>{2} : std::vector<int>{2, 3, 4}; }

INSTANTIATE_TEST_SUITE_P(Transports, PipeChannels,
                         testing::Combine(testing::ValuesIn(transports()), testing::ValuesIn(sizes())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param));
                         });

TEST(PipeChannel, ReceivesAheadOfBeingAsked) {
  on_channels("thread", 2, [](int rank, PipeChannel& channel) {
    if (rank == 0) {
      channel.send(PipeStream::kActivations, 1, {{{at::ones({3}), true}}, false});
      return;
    }
    channel.expect(PipeStream::kActivations, 0, 1);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!channel.arrived(PipeStream::kActivations, 0) && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(channel.arrived(PipeStream::kActivations, 0));
    EXPECT_TRUE(channel.recv(PipeStream::kActivations, 0).pieces[0].wants_grad);
  });
}

TEST(PipeChannel, PlannedRanksSendShapes) {
  PipeChannelOptions options;
  options.device = at::kMeta;
  options.ahead = 0;
  const PlannedPeers stores[] = {c10::make_intrusive<c10d::HashStore>(), c10::make_intrusive<c10d::HashStore>()};
  const auto made = [&](int rank) {
    return std::make_unique<PipeChannel>(counted_communicator(rank, 2, "pipe", {}, stores[0]),
                                         counted_communicator(rank, 2, "pipe_grads", {}, stores[1]), options);
  };
  const auto first = made(0), second = made(1);
  const auto meta = at::TensorOptions().device(at::kMeta);
  EXPECT_TRUE(says(error_of([&] { second->recv(PipeStream::kActivations, 0); }), "no message of activations"));
  for (int number = 0; number < 5; ++number) {  // more than a sender may have under way
    PipeMessage message{{{at::empty({3, 4}, meta.dtype(at::kHalf)).t(), true}, {}}, true};
    for (int more = 0; more < 4 * number; ++more) message.pieces.push_back({at::empty({2, 2, 2, number}, meta), false});
    first->send(PipeStream::kActivations, 1, message);
    second->expect(PipeStream::kActivations, 0, 1);
    const PipeMessage got = second->recv(PipeStream::kActivations, 0);
    ASSERT_EQ(got.pieces.size(), message.pieces.size());
    EXPECT_TRUE(got.packed && got.pieces[0].wants_grad && !got.pieces[1].tensor.defined());
    EXPECT_TRUE(got.pieces[0].tensor.is_meta() && got.pieces[0].tensor.scalar_type() == at::kHalf);
    for (const size_t index : {size_t{0}, got.pieces.size() - 1})
      if (got.pieces[index].tensor.defined()) {
        EXPECT_EQ(got.pieces[index].tensor.sizes(), message.pieces[index].tensor.sizes());
      }
  }
  first->settle();
  EXPECT_EQ(first->traffic().messages, 5);
}

TEST(PipeChannel, RefusesWhatCannotBe) {
  on_channels("thread", 2, [](int rank, PipeChannel& channel) {
    if (rank == 1) return;
    EXPECT_TRUE(says(error_of([&] { channel.recv(PipeStream::kGrads, 1); }), "no message of gradients is expected"));
    const at::Tensor sparse = at::eye(3).to_sparse();
    EXPECT_TRUE(says(error_of([&] { channel.send(PipeStream::kGrads, 1, {{{sparse, false}}, false}); }), "is sparse"));
  });
}

TEST(PipeChannel, EndsAllWaitsWithOneText) {
  on_channels("thread", 3, [](int rank, PipeChannel& channel) {
    const int other = (rank + 1) % 3;
    channel.expect(PipeStream::kActivations, other, 1);
    std::thread teller([&, rank = rank] {
      if (rank != 0) return;  // the others hear of it through the group
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      channel.abort("stage 2 could not go on");
    });
    const std::string text = error_of([&] { channel.recv(PipeStream::kActivations, other); });
    EXPECT_EQ(text, "stage 2 could not go on");
    teller.join();
    channel.abort("stage 2 could not go on");
    EXPECT_EQ(error_of([&] { channel.send(PipeStream::kGrads, other, {}); }), "stage 2 could not go on");
    EXPECT_EQ(channel.failed(), "stage 2 could not go on");
  });
}

// A message is written on another stream than the one that uses it, and its memory is used for the next message.
TEST(PipeChannel, MessagesWaitForStreams) {
  constexpr int kMessages = 5;
  const auto body = [](bool sound) {
    on_channels(transport_of_device(), 2, [&](int rank, PipeChannel& channel) {
      const auto options = at::TensorOptions().device(testing_transports::device_of(rank));
      if (rank == 0) {
        for (int number = 0; number < kMessages; ++number)
          channel.send(PipeStream::kActivations, 1, {{{at::full({5000}, 1.0 * number, options).mul(2), false}}, false});
        return;
      }
      at::Tensor total = at::zeros({5000}, options);
      for (int number = 0; number < kMessages; ++number) {
        channel.expect(PipeStream::kActivations, 0, 1);  // it takes the memory of the last one
        total.add_(channel.recv(PipeStream::kActivations, 0).pieces[0].tensor);
      }
      if (sound) {
        EXPECT_TRUE(total.cpu().eq(kMessages * (kMessages - 1)).all().item<bool>());
      }
    });
  };
  // Behind the last messages comes nothing that would miss a wait: the sender's last to make room, and those of
  // settle(), which are not among the first nine. Later messages may take other memory than that of the one before.
  for (const std::string& wait : waits_that_nothing_misses(body)) {
    const auto number = wait.find_last_of(' ');
    EXPECT_NE(number, std::string::npos);
    EXPECT_GT(std::stoi(wait.substr(number)), wait.rfind("stream wait", 0) == 0 ? 9 : 1) << wait;
  }
}

// By the caller, who waits, and by the thread, in parts; or by the thread alone, while nobody waits.
TEST(PipeChannel, CopiesLargeTensors) {
  constexpr int kMessages = 8;
  on_channels("thread", 2, [](int rank, PipeChannel& channel) {
    const auto value = [](int number) { return at::arange(number, 1'300'001 + number, at::kInt); };  // 5 MB and a bit
    if (rank == 0) {
      for (int number = 0; number < kMessages; ++number)
        channel.send(PipeStream::kActivations, 1, {{{value(number), false}, {at::ones({3}), false}}, true});
      return;
    }
    channel.expect(PipeStream::kActivations, 0, kMessages);
    for (int number = 0; number < kMessages; ++number) {
      if (number % 3 == 2) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const PipeMessage message = channel.recv(PipeStream::kActivations, 0);
      EXPECT_TRUE(message.pieces[0].tensor.equal(value(number)));
      EXPECT_EQ(message.pieces[1].tensor.sum().item<float>(), 3);
    }
  });
}

// Tensors are read out of the sender's memory: it has them until then, and no longer.
TEST(PipeChannel, HoldsWhatHasNotBeenTaken) {
  std::atomic<int> step{0};
  const auto reach = [&](int wanted) {
    while (step < wanted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  on_channels("thread", 2, [&](int rank, PipeChannel& channel) {
    if (rank == 0) {
      at::Tensor sent = at::full({5000}, 3.0);
      c10::weak_intrusive_ptr<c10::StorageImpl> storage(sent.storage().getWeakStorageImpl());
      channel.send(PipeStream::kActivations, 1, {{{sent, false}}, false});
      sent.reset();
      EXPECT_FALSE(storage.expired());
      step = 1;
      reach(2);
      channel.expect(PipeStream::kActivations, 1, 1);
      channel.recv(PipeStream::kActivations, 1);
      EXPECT_TRUE(storage.expired());
      return;
    }
    reach(1);
    channel.expect(PipeStream::kActivations, 0, 1);
    EXPECT_TRUE(channel.recv(PipeStream::kActivations, 0).pieces[0].tensor.eq(3).all().item<bool>());
    channel.send(PipeStream::kActivations, 0, {});
    step = 2;
  });
}

TEST(PipeChannel, GivesUpAfterTheTimeout) {
  std::atomic<bool> gave_up{false};
  PipeChannelOptions options;
  options.timeout = std::chrono::seconds(1);
  const auto body = [&](int rank, PipeChannel& channel) {
    const PipeMessage message{{{at::ones({3}), false}}, false};
    if (rank == 0) {
      for (int number = 0; number < 2; ++number) channel.send(PipeStream::kGrads, 1, message);
      EXPECT_EQ(error_of([&] { channel.send(PipeStream::kGrads, 1, message); }),
                "stage 1 of the pipeline has not taken message 0 within 1 s (comm.timeout)");
      gave_up = true;
      return;
    }
    channel.expect(PipeStream::kActivations, 0, 1);
    EXPECT_EQ(error_of([&] { channel.recv(PipeStream::kActivations, 0); }),
              "message 0 of activations from stage 0 of the pipeline has not come within 1 s (comm.timeout)");
    while (!gave_up) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    channel.expect(PipeStream::kGrads, 0, 2);
    for (int number = 0; number < 2; ++number) EXPECT_EQ(channel.recv(PipeStream::kGrads, 0).pieces.size(), 1u);
  };
  on_channels("thread", 2, body, options);
}

}  // namespace
}  // namespace ds::comm
