// Schedules of pipelines over sends that end when their receives run (fake_nccl/): ranks are threads.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../error_of.h"
#include "../every_case.h"
#include "../on_threads.h"
#include "base/error.h"
#include "comm/calls/one_queue.h"
#include "comm/decorators/forwarding.h"
#include "comm/nccl/nccl_comm.h"
#include "comm/pipe/pipe_channel.h"
#include "comm/transports/thread_communicator.h"
#include "fake_nccl_calls.h"
#include "plan/pipe_check.h"
#include "plan/pipe_schedule.h"

namespace ds::comm {
namespace {

using plan::PipeOp;
using plan::PipePlan;

// A send or receive on an opaque stream. The host waits for it, because host memory has no device that could.
class QueuedWork : public Work {
 public:
  QueuedWork(void* stream, at::Tensor tensor)
      : stream_(stream), number_(FAKE_NCCL(fake_nccl_record)(stream)), tensor_(std::move(tensor)) {}
  ~QueuedWork() override { FAKE_NCCL(fake_nccl_wait)(stream_, number_); }
  void wait() override {
    const int result = FAKE_NCCL(fake_nccl_wait)(stream_, number_);
    if (result != 0) fail(ErrorKind::kRuntime, "NCCL ended with code ", result);
  }

 private:
  void* const stream_;
  const int64_t number_;
  const at::Tensor tensor_;
};

// The receive of a note, which takes its time: whatever can be sent meanwhile goes before the receives that it causes.
class LateWork : public Work {
 public:
  explicit LateWork(WorkPtr note) : note_(std::move(note)) {}
  void wait() override {
    note_->wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }

 private:
  const WorkPtr note_;
};

// A communicator like NcclCommunicator on a GPU: tensors of messages go through NCCL, on one stream for the
// communicator; notes go over the host.
class QueuedNccl : public Communicator, public OneQueue {
 public:
  QueuedNccl(NcclCommPtr nccl, CommunicatorPtr host, bool says_it)
      : nccl_(std::move(nccl)), host_(std::move(host)), says_it_(says_it) {}
  ~QueuedNccl() override { nccl_->leave(); }
  bool has_one_queue() const override { return says_it_; }
  int rank() const override { return nccl_->rank(); }
  int size() const override { return nccl_->size(); }
  std::string name() const override { return "queued"; }
  bool carries(const Op&) const override { return true; }
  PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }
  void abort(const std::string& why) noexcept override {
    nccl_->abort(why);
    host_->abort(why);
  }

 protected:
  WorkPtr start(const Op& op) override {
    const at::Tensor& own = op.own();
    if (own.scalar_type() == at::kByte)
      return op.verb == Verb::kRecv ? std::make_shared<LateWork>(host_->run(op)) : host_->run(op);
    const auto n = static_cast<size_t>(own.numel());
    op.verb == Verb::kSend ? nccl_->send(own.data_ptr(), n, nccl::kFloat32, op.peer, this)
                           : nccl_->recv(own.data_ptr(), n, nccl::kFloat32, op.peer, this);
    return std::make_shared<QueuedWork>(this, own);
  }

 private:
  const NcclCommPtr nccl_;
  const CommunicatorPtr host_;
  const bool says_it_;
};

CommunicatorPtr queued_nccl(const CommunicatorPtr& thread, const nccl::UniqueId& id, bool says_it) {
  NcclMember place;
  place.name = "pipe";
  place.rank = thread->rank();
  place.size = thread->size();
  place.timeout = std::chrono::seconds(60);
  place.on_device = as_this_thread();
  return std::make_shared<QueuedNccl>(NcclComm::join(NcclLibrary::open(fake_nccl_path()), id, place), thread, says_it);
}

// ---- what ranks compute
// ----------------------------------------------------------------------------------------------

// Runs the list of one rank. Returns a sum over what it has computed: equal bits where every message has come right.
at::Tensor run_rank(const PipePlan& plan, int rank, PipeChannel& channel, int64_t numel) {
  const plan::PipeShape& shape = plan.shape;
  std::map<std::pair<int, int>, at::Tensor> outputs, grads;  // by micro-batch and virtual stage
  at::Tensor total = at::zeros({numel});
  std::map<std::pair<PipeStream, int>, int64_t> expected;
  for (const plan::PipeAct& act : plan.ranks[rank])
    if (plan::receives(act.op))
      ++expected[{act.op == PipeOp::kRecvGrad ? PipeStream::kGrads : PipeStream::kActivations, act.peer}];
  for (const auto& [stream, messages] : expected) channel.expect(stream.first, stream.second, messages);
  const auto message = [](const at::Tensor& tensor) { return PipeMessage{{{tensor, true}}, false}; };
  for (const plan::PipeAct& act : plan.ranks[rank]) {
    const int part = shape.virtual_stage(rank, act.chunk);
    const std::pair<int, int> here(act.micro, part), before(act.micro, part - 1), after(act.micro, part + 1);
    switch (act.op) {
      case PipeOp::kRecvActivation:
        outputs[before] = channel.recv(PipeStream::kActivations, act.peer).pieces[0].tensor;
        break;
      case PipeOp::kForward: {
        const at::Tensor in = part == 0 ? at::arange(numel, at::kFloat).mul(act.micro + 1) : outputs.at(before);
        outputs[here] = in.mul(0.5).add(part + 1);
        total.add_(outputs[here]);
        break;
      }
      case PipeOp::kSendActivation: channel.send(PipeStream::kActivations, act.peer, message(outputs.at(here))); break;
      case PipeOp::kRecvGrad: grads[after] = channel.recv(PipeStream::kGrads, act.peer).pieces[0].tensor; break;
      case PipeOp::kBackward:
      case PipeOp::kBackwardInput: {
        const bool last = part + 1 == shape.virtual_stages();
        grads[here] = (last ? outputs.at(here) : grads.at(after)).mul(0.25).sub(part);
        total.add_(grads[here]);
        break;
      }
      case PipeOp::kBackwardWeight: break;
      case PipeOp::kSendGrad: channel.send(PipeStream::kGrads, act.peer, message(grads.at(here))); break;
    }
  }
  channel.settle();
  return total;
}

struct Outcome {
  std::vector<at::Tensor> totals;  // of each rank; undefined: it has failed
  std::vector<std::string> errors;
  bool finished() const {
    return std::all_of(errors.begin(), errors.end(), [](const std::string& error) { return error.empty(); });
  }
};

// `open(rank)`: the channel of a rank. The first one that fails ends the others.
template <typename Open>
Outcome run_plan(const PipePlan& plan, int64_t numel, const Open& open) {
  const int size = plan.shape.stages;
  Outcome outcome{std::vector<at::Tensor>(size), std::vector<std::string>(size)};
  const auto meeting = thread_communicators(size);
  std::vector<std::unique_ptr<PipeChannel>> channels(size);
  on_threads(size, [&](int rank) {
    channels[rank] = open(rank);
    meeting[rank]->barrier();
    try {
      outcome.totals[rank] = run_rank(plan, rank, *channels[rank], numel);
    } catch (const Error& error) {
      outcome.errors[rank] = error.what();
      for (const auto& channel : channels) channel->abort("another rank has failed");
    }
    meeting[rank]->barrier();
    channels[rank] = nullptr;
  });
  return outcome;
}

PipeChannelOptions options_of_test() {
  PipeChannelOptions options;
  options.direct = false;  // so that messages go over the communicators
  options.bound = options.ahead = plan::kPipeSendBound;
  return options;
}

Outcome by_threads(const PipePlan& plan, int64_t numel) {
  const auto first = thread_communicators(plan.shape.stages), second = thread_communicators(plan.shape.stages);
  return run_plan(plan, numel, [&](int rank) {
    return std::make_unique<PipeChannel>(first[rank], second[rank], options_of_test());
  });
}

// The layout of transports whose messages travel each by itself: two communicators over all ranks. Here their sends and
// receives share a stream.
Outcome by_two_communicators(const PipePlan& plan, int64_t numel) {
  const auto first = thread_communicators(plan.shape.stages), second = thread_communicators(plan.shape.stages);
  const auto library = NcclLibrary::open(fake_nccl_path());
  const nccl::UniqueId ids[] = {library->make_id(), library->make_id()};
  return run_plan(plan, numel, [&](int rank) {
    const auto activations = queued_nccl(first[rank], ids[0], false), grads = queued_nccl(second[rank], ids[1], false);
    return std::make_unique<PipeChannel>(activations, grads, options_of_test());
  });
}

// Both ranks of an edge open it with these.
struct EdgeMeeting {
  nccl::UniqueId id;
  std::vector<CommunicatorPtr> threads;
};
using EdgeMeetings = std::map<PipeEdge, EdgeMeeting>;

EdgeMeetings ids_of(const PipePlan& plan) {
  EdgeMeetings made;
  for (const PipeEdge& edge : pipe_edges(plan.shape))
    made[edge] = {NcclLibrary::open(fake_nccl_path())->make_id(), thread_communicators(2)};
  return made;
}

// `all`: over all ranks; it says that it has one queue, and carries nothing.
std::unique_ptr<PipeChannel> channel_over_edges(const PipePlan& plan, int rank, const CommunicatorPtr& all,
                                                const EdgeMeetings& meetings,
                                                const PipeChannelOptions& options = options_of_test()) {
  class Asked : public ForwardingCommunicator, public OneQueue {
   public:
    using ForwardingCommunicator::ForwardingCommunicator;
    Communicator& bare() override { return *this; }

   protected:
    WorkPtr start(const Op&) override { fail(ErrorKind::kRuntime, "nothing goes over it"); }
  };
  const auto asked = std::make_shared<Asked>(all);
  const auto open = [&](const PipeEdge& edge) {
    const EdgeMeeting& meeting = meetings.at(edge);
    return queued_nccl(meeting.threads[rank == edge.from ? 0 : 1], meeting.id, true);
  };
  return std::make_unique<PipeChannel>(asked, asked, options, PipeEdges{pipe_edges(plan.shape), open});
}

Outcome by_edges(const PipePlan& plan, int64_t numel) {
  const auto all = thread_communicators(plan.shape.stages);
  const EdgeMeetings meetings = ids_of(plan);
  return run_plan(plan, numel, [&](int rank) { return channel_over_edges(plan, rank, all[rank], meetings); });
}

// ---- the tests
// -------------------------------------------------------------------------------------------------------

struct Case {
  std::string schedule;
  int stages, chunks;
  plan::PipePlacement placement = plan::PipePlacement::kLoop;

  PipePlan plan() const { return pipe_schedule(schedule, stages, chunks, 2 * stages, placement); }
  std::string name() const {
    return schedule + (placement == plan::PipePlacement::kV ? " (v)" : "") + ", " + std::to_string(stages) +
           " stages x " + std::to_string(chunks);
  }
};

// Every schedule with 2 to 4 stages and 1 or 2 chunks that it can have.
std::vector<Case> cases() {
  std::vector<Case> made;
  for (const plan::PipeScheduleKind& kind : plan::pipe_schedule_kinds())
    for (int stages = 2; stages <= 4; ++stages)
      for (int chunks = std::max(1, kind.min_chunks); chunks <= std::min(2, kind.max_chunks); ++chunks) {
        made.push_back({kind.name, stages, chunks, kind.placement});
        if (!kind.trains && chunks == 2) made.push_back({kind.name, stages, chunks, plan::PipePlacement::kV});
      }
  return made;
}

class PipesOnNccl : public FakeNcclTest {};

// The rank of a schedule that sends to ranks that send to it, at last, waits for them while they wait for it.
bool hangs_in_two_communicators(const Case& one) {
  return one.chunks == 2 && (one.schedule != "inference" || one.placement == plan::PipePlacement::kLoop);
}

TEST_F(PipesOnNccl, TwoCommunicatorsHangWhereMessagesGoBothWays) {
  std::set<std::string> hung;
  for (const Case& one : cases()) {
    FAKE_NCCL(fake_nccl_reset)();
    const auto begin = std::chrono::steady_clock::now();
    const bool finished = by_two_communicators(one.plan(), 1000).finished();
    EXPECT_EQ(finished, !hangs_in_two_communicators(one)) << one.name();
    if (finished) continue;
    hung.insert(one.schedule);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2)) << one.name();
    const std::string report = FAKE_NCCL(fake_nccl_report)();
    EXPECT_TRUE(says(report, "operations wait for each other in a circle")) << one.name() << ": " << report;
  }
  EXPECT_EQ(hung, (std::set<std::string>{"dualpipe-v", "inference", "interleaved", "zb-v"}));
}

class PipesOnNcclWithBytesAhead : public PipesOnNccl, public testing::WithParamInterface<int> {};

TEST_P(PipesOnNcclWithBytesAhead, ACommunicatorForEachEdgeFinishesWithTheResultsOfThreads) {
  setenv("FAKE_NCCL_EAGER", std::to_string(GetParam()).c_str(), 1);
  const int64_t numel = GetParam() == 0 ? 1000 : 150'000;  // one message of 0.6 MB may travel ahead, two may not
  NewPairs sample;
  for (const Case& one : cases()) {
    const auto schedule = static_cast<long long>(std::hash<std::string>{}(one.schedule));
    if (!sample({schedule, one.stages, one.chunks, static_cast<int>(one.placement)})) continue;
    const PipePlan plan = one.plan();
    const Outcome found = by_edges(plan, numel), wanted = by_threads(plan, numel);
    for (int rank = 0; rank < one.stages; ++rank) {
      EXPECT_EQ(found.errors[rank], "") << one.name() << ": " << FAKE_NCCL(fake_nccl_report)();
      if (!found.errors[rank].empty()) continue;
      EXPECT_TRUE(at::equal(found.totals[rank], wanted.totals[rank])) << one.name() << ", rank " << rank;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Bytes, PipesOnNcclWithBytesAhead, testing::Values(0, 1'000'000));

// A transport with one queue and no way to open more.
TEST_F(PipesOnNccl, AChannelSaysWhatIsMissing) {
  const auto library = NcclLibrary::open(fake_nccl_path());
  const auto thread = thread_communicators(1);
  const auto alone = queued_nccl(thread[0], library->make_id(), true);
  EXPECT_TRUE(says(error_of(ErrorKind::kValue, [&] { PipeChannel(alone, alone, options_of_test()); }),
                   "sends and receives of queued share one queue"));
}

// The receiver expects nothing, so it grants nothing.
TEST_F(PipesOnNccl, AReceiverThatMakesNoRoomIsNamed) {
  const PipePlan plan = Case{"1f1b", 2, 1}.plan();
  const auto ids = ids_of(plan);
  const auto first = thread_communicators(2);
  PipeChannelOptions options = options_of_test();
  options.timeout = std::chrono::seconds(1);
  on_threads(2, [&](int rank) {
    const auto channel = channel_over_edges(plan, rank, first[rank], ids, options);
    const auto send = [&] { channel->send(PipeStream::kActivations, 1, {{{at::ones({3}), false}}, false}); };
    if (rank == 0) {
      for (int number = 0; number < options.bound; ++number) send();
      EXPECT_TRUE(says(error_of(ErrorKind::kRuntime, send),
                       "stage 1 of the pipeline has not made room for message 0 of activations within 1 s"));
    }
    first[rank]->barrier();
  });
}

// Ranks that are no neighbours in the plan.
TEST_F(PipesOnNccl, AnEdgeThatThePlanHasNotIsRefused) {
  const PipePlan plan = Case{"1f1b", 3, 1}.plan();
  const auto ids = ids_of(plan);
  const auto first = thread_communicators(3);
  on_threads(3, [&](int rank) {
    const auto channel = channel_over_edges(plan, rank, first[rank], ids);
    const int other = rank == 2 ? 0 : 2;
    if (rank != 1) {
      EXPECT_TRUE(says(error_of(ErrorKind::kValue,
                                [&] {
                                  channel->send(PipeStream::kGrads, other, {{{at::ones({3}), false}}, false});
                                }),
                       "no gradients go from stage " + std::to_string(rank) + " to stage " + std::to_string(other)));
    }
    first[rank]->barrier();
  });
}

}  // namespace
}  // namespace ds::comm
