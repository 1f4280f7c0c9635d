// The states of a bucket of gradients: which may follow which, and that whatever happens in whatever order, no bucket
// makes another transition and every gradient is in the sum once.
//
// DS_REDUCER_SEQUENCES: random sequences of events, 3,000 without. Under sanitizers:
// DS_REDUCER_SEQUENCES=100000 ROOMS=zero tools/sanitize.sh address,undefined
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <numeric>
#include <random>
#include <set>

#include "../error_of.h"
#include "../every_case.h"
#include "base/error.h"
#include "comm/transports/thread_communicator.h"
#include "small_engine.h"
#include "trained_ranks.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

using State = BucketState;

TEST(GradStates, IllegalTransitionsAreRefusedWithBothStatesAndTheBucket) {
  // The way of a bucket to each state, and the states that may follow.
  const std::vector<std::pair<std::vector<State>, std::set<State>>> rows = {
      {{}, {State::kFilling, State::kLaunched, State::kArrived, State::kAbandoned}},
      {{State::kLaunched}, {State::kReceived, State::kLeaving, State::kReduced, State::kAbandoned}},
      {{State::kLaunched, State::kReceived}, {State::kReduced, State::kAbandoned}},
      {{State::kLaunched, State::kLeaving}, {State::kReduced, State::kAbandoned}},
      {{State::kLaunched, State::kReduced}, {State::kArrived, State::kFilling, State::kAbandoned}},
      {{State::kArrived}, {State::kFilling, State::kAbandoned}},
      {{State::kAbandoned}, {State::kFilling}},
  };
  ASSERT_EQ(rows.size(), kBucketStates);
  int refused = 0;
  for (const auto& [path, followers] : rows) {
    for (int number = 0; number < kBucketStates; ++number) {
      BucketFacts facts{};
      facts.space = 2;
      facts.number = 5;
      facts.name = "layer.weight";
      GradBucket bucket(facts);
      for (State state : path) bucket.enter(state);
      const State from = bucket.state(), to = static_cast<State>(number);
      const std::string what = std::string(name_of(from)) + " to " + name_of(to);
      try {
        bucket.enter(to);
        EXPECT_TRUE(followers.count(to)) << what;
        EXPECT_EQ(bucket.state(), to);
      } catch (const Error& error) {
        EXPECT_FALSE(followers.count(to)) << what;
        EXPECT_EQ(bucket.state(), from) << what << ": refused, and yet it moved";
        EXPECT_EQ(std::string(error.what()),
                  "gradient bucket 5 of space 2 (from parameter \"layer.weight\") cannot go from state " + what);
        ++refused;
      }
    }
  }
  EXPECT_EQ(refused, 49 - 18);
}

constexpr int kParams = 6;
constexpr int64_t kBucket = 16;  // elements; parameters have 4 to 14

// The engines of one batch of sequences.
struct Setting {
  int world, stage;
  bool overlap, waits, on_host, alike;  // alike: all ranks get gradients of the same parameters in the same order
  bool sums;                            // over ranks instead of means
};

// One rank of the machine under test and, for every rank, the model: numbers that each element of a parameter has.
class Player : public GradArrivals {
 public:
  Player(const Setting& setting, comm::CommunicatorPtr ranks, unsigned seed)
      : setting_(setting), rank_(ranks->rank()), random_(seed), local_(setting.world), reduced_{} {
    for (int i = 0; i < kParams; ++i) weights_.push_back(at::zeros({4 + 2 * i}).set_requires_grad(true));
    EngineOptions options;
    options.policy = stage_policy(setting.stage);
    options.gatherer.persistence_numel = 7;  // two parameters stay whole
    options.reducer.bucket_numel = kBucket;
    options.reducer.overlap = setting.overlap;
    options.reducer.waits = setting.waits;
    options.reducer.predivide = setting.sums ? 1.0 : 1.0 / setting.world;
    if (setting.on_host) options.placements.grad.rest = storage::Medium::kHost;
    engine_ = engine_of(specs_of(weights_), options, {ranks});
    in_place_ = engine_->params().space_of(0).in_place;
    grads().tell(this);
  }

  void play_sequence() {
    const int events = 1 + below(8);
    const bool gathers = setting_.stage == 3 && below(2) == 0;  // parameters are whole; else they are slices
    if (gathers) engine_->gatherer()->acquire(sharded());
    for (int event = 0; event < events; ++event) {
      switch (below(6)) {
        case 0: backward(false); break;
        case 1: alone_in_time(); break;
        case 2: setting_.world > 1 && below(2) == 0 ? raise_on_one() : raise(); break;
        default: backward(true);
      }
    }
    finish();
    check();
    clear();
    if (gathers) engine_->gatherer()->release(sharded());
  }

  // GradArrivals: which buckets have been told and not been withdrawn.
  bool wanted() const override { return listens_; }
  void arrived(int32_t space, int32_t bucket, const std::vector<int32_t>& used) override {
    EXPECT_TRUE(told_.insert({space, bucket}).second) << "told twice";
  }
  void changed(int32_t space, int32_t bucket) override {
    EXPECT_TRUE(told_.count({space, bucket})) << "changed, and was never told";
  }
  void ended() override {}
  void withdrawn() override { told_.clear(); }

 private:
  std::vector<ShardedParam*> sharded() const {
    std::vector<ShardedParam*> params;
    for (const ShardedParamPtr& param : engine_->gatherer()->params()) params.push_back(param.get());
    return params;
  }
  GradReducer& grads() { return engine_->grads(); }
  int below(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }
  bool holds_nothing() const {
    double sum = in_place_ ? std::accumulate(reduced_.begin(), reduced_.end(), 0.0) : 0.0;
    for (const auto& of_rank : local_) sum += std::accumulate(of_rank.begin(), of_rank.end(), 0.0);
    return sum == 0.0;
  }

  // Parameters in the order in which their gradients come on one rank: from last to first, some never, some twice.
  std::vector<int> order(std::mt19937& random) {
    std::vector<int> params;
    for (int param = kParams - 1; param >= 0; --param)
      if (param == 0 || random() % 8 != 0) params.push_back(param);
    if (random() % 4 == 0) std::swap(params[random() % params.size()], params[random() % params.size()]);
    if (random() % 4 == 0) params.push_back(static_cast<int>(random() % kParams));
    return params;
  }
  // The gradients that come on each rank. All ranks draw it for all, so that they know what the sum is to be.
  std::vector<std::vector<int>> orders() {
    const unsigned seed = random_();
    std::vector<std::vector<int>> all;
    for (int rank = 0; rank < setting_.world; ++rank) {
      std::mt19937 own(setting_.alike ? seed : seed + static_cast<unsigned>(rank));
      all.push_back(order(own));
    }
    return all;
  }
  // Another integer for each gradient; a mean over up to four ranks is exact.
  static double value(int rank, int number) { return 4.0 * (1 + rank + 5 * number); }
  at::Tensor gradient(int param, double value) { return at::full({4 + 2 * param}, value); }
  void come(int param, double value) {  // as autograd accumulates it
    const at::NoGradGuard guard;
    at::Tensor& grad = weights_[param].mutable_grad();
    if (grad.defined()) {
      grad.add_(gradient(param, value));
    } else {
      grad = gradient(param, value);
    }
    grads().on_grad(param);
  }

  void backward(bool reduce) {
    listens_ = below(2) == 0;
    const auto all = orders();
    const int joins = setting_.world > 1 && reduce && !setting_.alike && below(4) == 0 ? below(setting_.world) : -1;
    if (joins == rank_) {
      listens_ = false;
      grads().join();
    } else {
      grads().begin(reduce);
    }
    for (int rank = 0; rank < setting_.world; ++rank) {
      if (rank == joins) continue;
      for (size_t i = 0; i < all[rank].size(); ++i) {
        const double number = value(rank, static_cast<int>(i));
        if (rank == rank_) come(all[rank][i], number);
        local_[rank][all[rank][i]] += number;
      }
    }
    if (joins != rank_) grads().end();
    if (reduce) reduce_model();
    EXPECT_FALSE(grads().active());
  }

  void reduce_model() {
    for (auto& of_rank : local_) {
      for (int param = 0; param < kParams; ++param)
        reduced_[param] += of_rank[param] / (setting_.sums ? 1 : setting_.world);
      of_rank.fill(0.0);
    }
  }

  // Between backwards, on all ranks: a backward that nobody announced, or a gradient that somebody has written.
  void alone_in_time() {
    const int param = below(kParams), kind = below(3);
    if (in_place_ ? setting_.sums || kind > 0 : kind < 2 && weights_[param].grad().defined()) return;
    const double number = value(rank_, below(5));
    const double first = number - 4.0 * rank_;
    for (int rank = 0; rank < setting_.world; ++rank)
      local_[rank][param] = (kind == 2 ? 0.0 : local_[rank][param]) + first + 4.0 * rank;
    if (kind == 0) {
      come(param, number);
    } else if (kind == 1) {
      weights_[param].mutable_grad() = gradient(param, number);  // adopted when the next backward begins, or the step
      if (below(2) == 0) finish();
    } else {
      grads().set_local(param, gradient(param, number));
    }
  }

  // A backward that raises. Where nothing of earlier ones was on the way, they are as they were.
  void raise() {
    listens_ = below(2) == 0;
    const bool reduces = below(4) != 0, survives = holds_nothing();
    const auto all = orders();
    const int count = setting_.alike || setting_.world == 1 ? below(static_cast<int>(all[rank_].size()) + 1) : 0;
    grads().begin(reduces);
    for (int i = 0; i < count; ++i) come(all[rank_][i], 1000.0);
    const bool lost = grads().abort();
    EXPECT_TRUE(told_.empty()) << "what has been told of a backward that raised is withdrawn";
    EXPECT_FALSE(survives && lost);
    if (!survives && count > 0) clear();
  }

  // A backward that raises on one rank, anywhere: all ranks drop what they have, and go on.
  void raise_on_one() {
    listens_ = below(2) == 0;
    const auto all = orders();
    const int raising = below(setting_.world), until = below(static_cast<int>(all[raising].size()) + 1);
    const int count = rank_ == raising ? until : static_cast<int>(all[rank_].size());
    grads().begin(true);
    for (int i = 0; i < count; ++i) come(all[rank_][i], 1000.0);
    if (rank_ == raising) {
      grads().abort_together();
    } else {
      EXPECT_TRUE(says(failure_of([&] { grads().end(); }), "could not compute its gradients"));
    }
    EXPECT_TRUE(told_.empty()) << "what has been told of a backward that raised is withdrawn";
    EXPECT_FALSE(grads().any());
    clear();
  }

  void finish() {
    grads().finish();
    reduce_model();
  }

  void check() {
    for (int param = 0; param < kParams; ++param)
      EXPECT_EQ(grads().used(param), reduced_[param] != 0.0) << "parameter " << param;
    for (size_t number = 0; number < engine_->params().pieces().size(); ++number) {
      const Piece& piece = engine_->params().pieces()[number];
      if (reduced_[piece.param] == 0.0 || piece.numel == 0) continue;
      const auto [lease, grad] = engine_->states().piece(StateKind::kGrad, 0, number, storage::Access::kRead);
      ASSERT_TRUE(grad.defined());
      const float* data = grad.data_ptr<float>();
      for (int64_t i = 0; i < grad.numel(); ++i)
        ASSERT_EQ(data[i], static_cast<float>(reduced_[piece.param])) << "element " << i << " of w" << piece.param;
    }
  }

  void clear() {
    grads().clear();
    told_.clear();
    for (auto& of_rank : local_) of_rank.fill(0.0);
    reduced_.fill(0.0);
    EXPECT_FALSE(grads().any());
  }

  const Setting setting_;
  const int rank_;
  std::mt19937 random_;  // the same numbers on all ranks
  std::vector<at::Tensor> weights_;
  std::shared_ptr<Engine> engine_;
  bool in_place_ = false, listens_ = false;
  std::vector<std::array<double, kParams>> local_;  // of each rank, what has not been reduced
  std::array<double, kParams> reduced_;
  std::set<std::pair<int32_t, int32_t>> told_;
};

TEST(GradStates, RandomSequencesReduceEveryGradientOnce) {
  const int wanted = cases_of("DS_REDUCER_SEQUENCES", 3000, 1000);
  constexpr int kBatch = 25;  // sequences of one set of engines
  std::mt19937 random(11);
  for (int played = 0; played < wanted && !testing::Test::HasFailure(); played += kBatch) {
    const auto coin = [&] { return random() % 2 == 0; };
    const int world = std::array<int, 4>{1, 1, 2, 4}[random() % 4];
    const int stage = static_cast<int>(random() % 4);
    const Setting setting{world, stage, coin(), coin(), stage > 0 && random() % 3 == 0, coin(), coin()};
    const unsigned seed = random();
    const auto comms = comm::thread_communicators(world);
    const auto said = on_ranks<std::string>(world, [&](int rank) -> std::string {
      try {
        Player player(setting, comms[rank], seed);
        for (int i = 0; i < kBatch && !testing::Test::HasFailure(); ++i) player.play_sequence();
      } catch (const std::exception& error) {
        comms[rank]->abort(error.what());
        return error.what();
      }
      return "";
    });
    for (const std::string& text : said)
      EXPECT_EQ(text, "") << "batch from sequence " << played << ": world " << world << ", stage " << setting.stage
                          << ", overlap " << setting.overlap << ", waits " << setting.waits << ", on host "
                          << setting.on_host << ", alike " << setting.alike << ", sums " << setting.sums;
  }
}

}  // namespace
}  // namespace ds::zero
