// Handles of torch for collectives of the backend shm.
#pragma once
#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/c10d_compat.h"
#include "comm/shared_memory/shm_queue.h"

namespace ds::comm {

// One collective. Its result is in the tensors themselves.
class ShmC10dWork : public c10d::Work {
 public:
  ShmC10dWork(std::shared_ptr<ShmQueue> queue, c10d::OpType type, std::vector<at::Tensor> results)
      : c10d::Work(-1, type),
        queue_(std::move(queue)),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  void start(std::function<void(ShmGroup&)> run, c10::optional<bool> later) {
    // Not `this` but the future: whoever waits for it may be all that is left of this call.
    const auto how = !later   ? ShmQueue::Start::kPerhapsLater
                     : *later ? ShmQueue::Start::kSoon
                              : ShmQueue::Start::kByWaiting;
    task_ = queue_->submit(std::move(run), how, [future = future_, results = results_](std::exception_ptr error) {
      if (error) {
        future->setError(error);
      } else {
        future->markCompleted(c10::IValue(results));
      }
    });
    if (how == ShmQueue::Start::kByWaiting) queue_->complete(task_);
  }

  bool isCompleted() override { return task_->done(); }
  bool isSuccess() const override { return task_->done() && !task_->error(); }
  std::exception_ptr exception() const override { return task_->done() ? task_->error() : nullptr; }
  bool wait(std::chrono::milliseconds) override {
    queue_->complete(task_);
    return true;
  }
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::shared_ptr<ShmQueue> queue_;
  ShmQueue::TaskPtr task_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Several collectives of another backend as one: fails with the first error of any, once all have ended.
class AllOf : public c10d::Work {
 public:
  AllOf(c10d::OpType type, std::vector<c10::intrusive_ptr<c10d::Work>> parts, std::vector<at::Tensor> results)
      : c10d::Work(-1, type), parts_(std::move(parts)), results_(std::move(results)) {}

  bool isCompleted() override {
    return std::all_of(parts_.begin(), parts_.end(),
                       [](const c10::intrusive_ptr<c10d::Work>& part) { return part->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(parts_.begin(), parts_.end(),
                       [](const c10::intrusive_ptr<c10d::Work>& part) { return part->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const c10::intrusive_ptr<c10d::Work>& part : parts_)
      if (const auto error = part->exception()) return error;
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    std::exception_ptr error;
    for (const c10::intrusive_ptr<c10d::Work>& part : parts_) {
      try {
        part->wait(timeout);
      } catch (const std::exception&) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
    return true;
  }
  void synchronize() override {
    for (const c10::intrusive_ptr<c10d::Work>& part : parts_) part->synchronize();
  }
  std::vector<at::Tensor> result() override { return results_; }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
  const std::vector<at::Tensor> results_;
};

}  // namespace ds::comm
