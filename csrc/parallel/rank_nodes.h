// Functions of tensors of several ranks, with gradients: gather, scatter, reduce and the exchange of rows. All ranks
// call them in the same order, and their backward passes come in the same order, too. Each function has another one as
// its gradient, so gradients have gradients: gather and scatter, reduce and share, and an exchange and its way back.
// On one rank the first four give what they get.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace ds::parallel {

// A call whose result is needed at once, without gradients.
void run_now(const comm::CommunicatorPtr& ranks, comm::Op op);
// The ranks' `part`, of one shape, joined along `dim` in rank order. Each rank's part of the gradient belongs to its
// input.
at::Tensor gather(const comm::CommunicatorPtr& ranks, const at::Tensor& part, int64_t dim);
// This rank's part along `dim` of a tensor that all ranks have alike.
at::Tensor scatter(const comm::CommunicatorPtr& ranks, const at::Tensor& whole, int64_t dim);
// The sum over the ranks. All ranks use it alike, so its gradient is that of each input.
at::Tensor reduce(const comm::CommunicatorPtr& ranks, const at::Tensor& tensor);
// `tensor` itself, which all ranks have alike and use in different ways: its gradient is the sum over the ranks.
at::Tensor share(const comm::CommunicatorPtr& ranks, const at::Tensor& tensor);
// given[r] rows (of the first dimension) go to rank r in the order of ranks, taken[r] rows come from it.
at::Tensor exchange_rows(const comm::CommunicatorPtr& ranks, const at::Tensor& rows, const std::vector<int64_t>& given,
                         const std::vector<int64_t>& taken);

// reduce() in two calls, with other work between them: it starts when it is made. `part` may change afterwards.
class PendingSum {
 public:
  PendingSum(const comm::CommunicatorPtr& ranks, const at::Tensor& part);
  at::Tensor wait();  // the sum, once

 private:
  at::Tensor sum_;  // to be read when work_ has ended
  comm::WorkPtr work_;
};

// One exchange of rows in two calls, with other work between them. Backward makes the way back in two calls, too: that
// of wait() starts it, that of start() waits for it.
class RowExchange : public std::enable_shared_from_this<RowExchange> {
 public:
  using Started = std::function<void(int64_t bytes)>;  // is told what crosses to other ranks at each start
  using Waited = std::function<void(double seconds)>;  // is told how long each wait was
  // `what`: in front of the text of an error.
  RowExchange(comm::CommunicatorPtr ranks, std::vector<int64_t> given, std::vector<int64_t> taken, std::string what,
              Started started, Waited waited);

  at::Tensor start(const at::Tensor& rows);  // to be read when wait() has returned what it then is
  at::Tensor wait(const at::Tensor& arriving);

 private:
  at::Tensor begin(const at::Tensor& rows, const std::vector<int64_t>& given, const std::vector<int64_t>& taken);
  void finish();
  template <typename Call>
  void explained(const Call& call) const;

  const comm::CommunicatorPtr ranks_;
  const std::vector<int64_t> given_, taken_;
  const std::string what_;
  const Started started_;
  const Waited waited_;
  comm::WorkPtr work_;
  at::Tensor held_;     // the rows that are sent, until then
  at::Tensor on_back_;  // the gradients of the sent rows, which are on their way
};

}  // namespace ds::parallel
