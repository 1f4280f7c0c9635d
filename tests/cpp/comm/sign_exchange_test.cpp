// The mean of values that travel as signs, on every transport and for 1 to 8 ranks, against a model of all ranks.
#include "comm/compressed/sign_exchange.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/table.h"
#include "plan/shard_map.h"
#include "sign_model.h"
#include "transports.h"

namespace ds::comm {
namespace {

using namespace testing_transports;

void run_on_cpu(const SignExchange::Call& call) { call(*ds_code_kernels(kernels::kCodesAbi, "cpu"), {}); }

CommunicatorPtr borrowed(Communicator& ranks) { return {std::shared_ptr<void>(), &ranks}; }

at::Tensor values_of(int rank, int round, int64_t numel) {
  return at::sin(at::arange(numel, at::kFloat) * 0.37 + 5 * rank + 0.9 * round) * (1 + rank);
}

// Parameters with room between them, and the room of this rank's slices.
struct Layout {
  std::vector<SignPart> parts;
  int64_t numel = 0, owned = 0;

  Layout(const std::vector<int64_t>& numels, int ranks) {
    for (int64_t one : numels) {
      parts.push_back({numel, one, owned});
      numel += one + 5;
      owned += slice_room(one, ranks);
    }
  }
};

const std::vector<int64_t> kNumels = {40, 1, 0, 7, 129, 64, 3};

// Errors of a rank, or the model of them in fp64.
struct Kept {
  at::Tensor errors, owned;
  Kept(const Layout& layout, at::ScalarType type)
      : errors(at::zeros({layout.numel}, type)), owned(at::zeros({layout.owned}, type)) {}
};

// One exchange of all ranks in fp64, with the errors of `kept`, which are updated.
Tensors model(const Layout& layout, const Tensors& given, const std::vector<Kept>& kept, bool one_scale) {
  std::vector<Tensors> values(given.size()), errors(given.size()), owned(given.size());
  for (size_t rank = 0; rank < given.size(); ++rank) {
    for (const SignPart& part : layout.parts) {
      values[rank].push_back(given[rank].narrow(0, part.begin, part.numel).to(at::kDouble));
      errors[rank].push_back(kept[rank].errors.narrow(0, part.begin, part.numel));
      owned[rank].push_back(kept[rank].owned.narrow(0, part.owned_begin, kept[rank].owned.numel() - part.owned_begin));
    }
  }
  return mean_of_signs(values, errors, owned, one_scale);
}

class SignExchangeTest : public testing::TestWithParam<std::string> {};

TEST_P(SignExchangeTest, EqualsAModelOfAllRanks) {
  for (int size = 1; size <= 8; ++size) {
    if (!exists(GetParam(), size)) continue;
    for (bool one_scale : {false, true}) {
      const Layout layout(kNumels, size);
      std::vector<Kept> kept, own;  // of the model, and of the run
      for (int rank = 0; rank < size; ++rank) {
        kept.emplace_back(layout, at::kDouble);
        own.emplace_back(layout, at::kFloat);
      }
      for (int round = 0; round < 4; ++round) {
        Tensors given, results(size);
        for (int rank = 0; rank < size; ++rank) given.push_back(values_of(rank, round, layout.numel));
        on_transport(GetParam(), size, [&](int rank, Communicator& ranks) {
          results[rank] = given[rank].clone();
          ranks.reset_traffic();
          const SignExchange exchange(borrowed(ranks), layout.parts, one_scale, &run_on_cpu);
          exchange.mean(results[rank], own[rank].errors, own[rank].owned, "values");
          EXPECT_EQ(ranks.traffic().calls, 2);
        });
        const Tensors mean = model(layout, given, kept, one_scale);
        for (int rank = 0; rank < size; ++rank) {
          const std::string what = GetParam() + " " + std::to_string(size) + " ranks, rank " + std::to_string(rank);
          // All ranks have the same bits, and what belongs to no parameter is left alone.
          for (size_t i = 0; i < layout.parts.size(); ++i) {
            const SignPart& part = layout.parts[i];
            const auto of = [&](const at::Tensor& values) { return values.narrow(0, part.begin, part.numel); };
            EXPECT_TRUE(at::equal(of(results[rank]), of(results[0]))) << what;
            EXPECT_LT(largest_difference(of(results[rank]), mean[i]), 1e-5) << what;
            EXPECT_LT(largest_difference(of(own[rank].errors), of(kept[rank].errors)), 1e-5) << what;
            const at::Tensor gap = results[rank].narrow(0, part.begin + part.numel, 5);
            EXPECT_TRUE(at::equal(gap, given[rank].narrow(0, part.begin + part.numel, 5))) << what;
          }
          EXPECT_LT(largest_difference(own[rank].owned, kept[rank].owned), 1e-5) << what;
          // From here on the model has the errors of the run: a sign on the edge would differ in all later rounds.
          kept[rank].errors.copy_(own[rank].errors);
          kept[rank].owned.copy_(own[rank].owned);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, SignExchangeTest, testing::ValuesIn(transport_names()),
                         [](const auto& info) { return info.param; });

TEST(SignExchangeAloneTest, SentPlusErrorsAreTheTrueSum) {
  const int size = 3, rounds = 20;
  const Layout layout({40, 33}, size);
  at::Tensor true_sum = at::zeros({layout.numel}, at::kDouble), received = at::zeros({layout.numel}, at::kDouble);
  Tensors results(size);
  std::vector<Kept> kept;
  for (int rank = 0; rank < size; ++rank) kept.emplace_back(layout, at::kFloat);
  for (int round = 0; round < rounds; ++round) {
    for (int rank = 0; rank < size; ++rank) {
      results[rank] = values_of(rank, round, layout.numel);
      true_sum += results[rank].to(at::kDouble) / size;
    }
    on_transport("thread", size, [&](int rank, Communicator& ranks) {
      SignExchange(borrowed(ranks), layout.parts, false, &run_on_cpu)
          .mean(results[rank], kept[rank].errors, kept[rank].owned, "values");
    });
    received += results[0].to(at::kDouble);
  }
  for (const SignPart& part : layout.parts) {
    const int64_t slice = plan::slice_numel(part.numel, size);
    for (int rank = 0; rank < size; ++rank) {
      received.narrow(0, part.begin, part.numel) += kept[rank].errors.narrow(0, part.begin, part.numel) / size;
      const int64_t begin = std::min(part.numel, rank * slice), numel = std::min(slice, part.numel - begin);
      received.narrow(0, part.begin + begin, numel) += kept[rank].owned.narrow(0, part.owned_begin, numel);
    }
    EXPECT_LT(
        largest_difference(received.narrow(0, part.begin, part.numel), true_sum.narrow(0, part.begin, part.numel)),
        1e-5 * rounds);
  }
}

TEST(SignExchangeAloneTest, TwoBitsForEachElementAndFourBytesForEachScale) {
  const int64_t numel = 1 << 16;
  for (int size : {2, 4, 8}) {
    const Layout layout({numel, numel}, size);
    on_transport("thread", size, [&](int rank, Communicator& ranks) {
      Kept kept(layout, at::kFloat);
      ranks.reset_traffic();
      SignExchange(borrowed(ranks), layout.parts, false, &run_on_cpu)
          .mean(values_of(rank, 0, layout.numel), kept.errors, kept.owned, "values");
      const int64_t bits = 2 * 2 * numel * (size - 1) / size, scales = 2 * 2 * (size - 1);
      EXPECT_EQ(ranks.traffic().calls, 2);
      EXPECT_EQ(ranks.traffic().bytes, bits / 8 + 4 * scales) << size;
    });
  }
}

TEST(SignExchangeAloneTest, NothingToSend) {
  on_transport("thread", 2, [&](int, Communicator& ranks) {
    const at::Tensor none = at::zeros({0});
    SignExchange(borrowed(ranks), {}, false, &run_on_cpu).mean(none, none, none, "nothing");
    SignExchange(borrowed(ranks), {{0, 0, 0}}, true, &run_on_cpu).mean(none, none, none, "an empty parameter");
  });
}

}  // namespace
}  // namespace ds::comm
