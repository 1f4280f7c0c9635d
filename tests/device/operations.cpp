// Every operation that the stand-in has not itself: the Meta kernel says what comes out, memory is taken for it, and
// the operation of the CPU is queued. Where there is no Meta kernel, or it cannot know, the host waits and runs it.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unordered_map>

#include "counts.h"
#include "device.h"
#include "graphs.h"
#include "shapes.h"
#include "tensors.h"

namespace standin {

namespace {

using c10::IValue;
using torch::jit::Stack;

// An argument with `function` of every tensor in its place.
template <class Function>
IValue each_tensor(const IValue& value, const Function& function) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector())
      made.push_back(tensor.defined() ? function(tensor) : tensor);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<c10::optional<at::Tensor>> made;
    for (const c10::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      made.push_back(tensor && tensor->defined() ? c10::optional<at::Tensor>(function(*tensor)) : tensor);
    return made;
  }
  return value;
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

bool written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool shares(const c10::Argument& argument, const c10::Argument& result) {
  if (!argument.alias_info() || !result.alias_info()) return false;
  for (const c10::Symbol& name : result.alias_info()->beforeSets())
    if (argument.alias_info()->beforeSets().count(name)) return true;
  return false;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  if (!on_device(tensor) && tensor.dim() == 0) return tensor;
  const c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(), c10::GetAllocator(c10::kMeta), true));
  at::Tensor meta = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
  meta.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return meta;
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& meta) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                             base.key_set(), meta.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), meta.storage_offset());
  return view;
}

// The results of an operation of the CPU go into the tensors that were made for it.
void keep(const Stack& returned, const std::vector<at::Tensor>& outputs, const c10::FunctionSchema& schema) {
  size_t next = 0;
  for (size_t i = 0; i < returned.size(); ++i) {
    if (schema.returns()[i].alias_info()) continue;
    for (const at::Tensor& tensor : tensors_of(returned[i])) {
      const at::Tensor& output = outputs.at(next++);
      if (!tensor.defined() || !output.defined()) continue;
      TORCH_CHECK(output.sizes() == tensor.sizes() && output.dtype() == tensor.dtype(), schema.name(), " has returned ",
                  tensor.dtype(), tensor.sizes(), " where its Meta kernel says ", output.dtype(), output.sizes());
      output.copy_(tensor);
    }
  }
}

// Random numbers are drawn in the order of the calls, as a device does, and are those of the CPU for the same seed.
void with_generator(at::Generator source, const std::function<void()>& work) {
  static auto* one_at_a_time = new std::mutex;
  const std::lock_guard alone(*one_at_a_time);
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  const at::Tensor before = cpu.get_state();
  cpu.set_state(source.get_state());
  work();
  source.set_state(cpu.get_state());
  cpu.set_state(before);
}

// Facts of the schema of an operation, found out once.
struct Facts {
  explicit Facts(const c10::OperatorHandle& op) : has_meta(op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    for (const c10::Argument& argument : op.schema().arguments())
      takes_generator = takes_generator || argument.type()->str().find("Generator") != std::string::npos;
    for (const c10::Argument& result : op.schema().returns())
      gives_tensors = gives_tensors && (result.type()->str() == "Tensor" || result.type()->str() == "Tensor[]");
  }
  static const Facts& of(const c10::OperatorHandle& op) {
    static thread_local std::unordered_map<const c10::FunctionSchema*, Facts> all;
    return all.try_emplace(&op.schema(), op).first->second;
  }

  bool has_meta, takes_generator = false, gives_tensors = true;
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& stack)
      : op_(op),
        schema_(op.schema()),
        facts_(Facts::of(op)),
        arguments_(stack.end() - static_cast<ptrdiff_t>(schema_.arguments().size()), stack.end()) {
    find_device();
    find_generator();
  }

  Stack run() {
    const c10::DeviceGuard guard(device_);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Stream& stream = current_stream(device_.index());
    for_each_argument([&](const at::Tensor& tensor, bool write) {
      if (on_device(tensor)) use(tensor, write);
      TORCH_CHECK(on_device(tensor) || !write, schema_.name(), " has inputs on ", device_, " and an output on ",
                  tensor.device());
    });
    c10::optional<Stack> results = infer();
    if (!results) return run_now(stream);
    if (fresh_.empty() && is_view_) return *results;
    queue(stream);
    return *results;
  }

 private:
  void use(const at::Tensor& tensor, bool write) {
    if (tensor.defined()) bytes_ += tensor.nbytes();
    if (!runs_nothing()) add_access(accesses_, tensor, write);
  }

  template <class Visit>
  void for_each_argument(const Visit& visit) {
    for (size_t i = 0; i < arguments_.size(); ++i)
      each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
        visit(tensor, written(schema_.arguments()[i]));
        return tensor;
      });
  }

  void find_device() {
    c10::optional<c10::Device> found;
    for (const IValue& value : arguments_)
      if (value.isDevice() && value.toDevice().type() == kStandin) found = value.toDevice();
    if (found && !found->has_index()) found->set_index(current_device());
    bool has_tensor = false;
    for_each_argument([&](const at::Tensor& tensor, bool) {
      if (!on_device(tensor)) return;
      TORCH_CHECK(!has_tensor || *found == tensor.device(), schema_.name(),
                  ": all tensors have to be on one device, and ", "there are ", *found, " and ", tensor.device());
      found = tensor.device();
      has_tensor = true;
    });
    device_ = found.value_or(c10::Device(kStandin, current_device()));
    // Indices may lie on the host, and numbers.
    const std::string& name = schema_.name();
    if (name.find("index") != std::string::npos || name == "aten::_pack_padded_sequence") return;
    for_each_argument([&](const at::Tensor& tensor, bool) {
      TORCH_CHECK(on_device(tensor) || tensor.dim() == 0, name,
                  ": all tensors have to be on one device, and there are ", device_, " and ", tensor.device());
    });
  }

  void find_generator() {
    bool takes = op_.hasTag(at::Tag::nondeterministic_seeded);
    for (IValue& value : arguments_) {
      if (!value.isGenerator()) continue;
      generator_ = value.toGenerator();
      TORCH_CHECK(generator_.device() == device_, schema_.name(), ": the generator is one of ", generator_.device(),
                  ", the tensor is on ", device_);
      value = IValue();
    }
    takes = takes || facts_.takes_generator;
    if (takes && !generator_.defined()) generator_ = default_generator(device_.index());
  }

  // The arguments for the CPU. Memory of the host is copied: it may change when the call has returned.
  template <class Opened>
  Stack cpu_arguments(const Opened& open) {
    Stack stack;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (arguments_[i].isDevice()) {
        stack.emplace_back(c10::Device(c10::kCPU));
        continue;
      }
      stack.push_back(each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
        if (on_device(tensor)) return open(tensor, written(schema_.arguments()[i]));
        at::Tensor copy = tensor.clone();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        return copy;
      }));
    }
    return stack;
  }

  // The results of the call, where the Meta kernel knows them. Outputs that were given get their sizes.
  c10::optional<Stack> infer() {
    if (has_outputs())
      return Stack(arguments_.end() - static_cast<ptrdiff_t>(schema_.returns().size()), arguments_.end());
    if (!facts_.has_meta || !facts_.gives_tensors) return c10::nullopt;
    c10::optional<Stack> known;
    if (schema_.overload_name().empty()) known = known_results(schema_.name(), arguments_);
    Stack meta = known ? std::move(*known) : Stack();
    if (!known) {
      for (const IValue& value : arguments_)
        meta.push_back(value.isDevice() ? IValue(c10::Device(c10::kMeta)) : each_tensor(value, meta_of));
      const Stack meta_arguments = meta;
      try {
        op_.callBoxed(meta);
      } catch (const std::exception&) {
        return c10::nullopt;
      }
      for (size_t i = 0; i < arguments_.size(); ++i)
        if (written(schema_.arguments()[i]) && arguments_[i].isTensor() && arguments_[i].toTensor().defined())
          fit(arguments_[i].toTensor(), meta_arguments[i].toTensor());
    }
    Stack results;
    for (size_t i = 0; i < meta.size(); ++i) results.push_back(result(schema_.returns()[i], meta[i]));
    return results;
  }

  // Whether all results are outputs that are given with their sizes, as torch does for an operation that has a
  // structured kernel. Most Meta kernels of such calls are written in Python.
  bool has_outputs() {
    const std::string& name = schema_.overload_name();
    const size_t count = schema_.returns().size();
    const bool out = name == "grad_input" || (name.size() >= 3 && name.substr(name.size() - 3) == "out");
    if (!out || count == 0 || count > arguments_.size()) return false;
    for (size_t i = arguments_.size() - count; i < arguments_.size(); ++i)
      if (!arguments_[i].isTensor() || !written(schema_.arguments()[i]) || !arguments_[i].toTensor().defined() ||
          arguments_[i].toTensor().numel() == 0)
        return false;
    return true;
  }

  void fit(const at::Tensor& tensor, const at::Tensor& meta) {
    if (tensor.sizes() == meta.sizes()) return;
    standin::resize(tensor, meta.sizes(), c10::nullopt);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
    use(tensor, true);
  }

  // The Meta kernels of norms give means in fp32, as on CUDA; on the CPU they have the dtype of the weights.
  at::ScalarType dtype_on_cpu(const at::Tensor& meta) {
    const std::string& name = schema_.name();
    if (name != "aten::native_layer_norm" && name != "aten::native_group_norm") return meta.scalar_type();
    const at::Tensor input = arguments_[0].toTensor();
    if (meta.sizes() == input.sizes()) return meta.scalar_type();
    at::ScalarType type = input.scalar_type();
    for (size_t i = 1; i < arguments_.size(); ++i)
      if (arguments_[i].isTensor() && arguments_[i].toTensor().defined()) type = arguments_[i].toTensor().scalar_type();
    return type;
  }

  IValue result(const c10::Argument& described, const IValue& meta) {
    if (!described.alias_info()) {
      const IValue made = each_tensor(meta, [&](const at::Tensor& tensor) {
        return new_tensor(tensor.sizes(), tensor.strides(), dtype_on_cpu(tensor), device_);
      });
      for (const at::Tensor& tensor : tensors_of(made)) {
        fresh_.push_back(tensor);
        use(tensor, true);
      }
      return made;
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!shares(schema_.arguments()[i], described)) continue;
      is_view_ = !written(described);
      return is_view_ ? IValue(view_of(arguments_[i].toTensor(), meta.toTensor())) : arguments_[i];
    }
    TORCH_CHECK(false, schema_.name(), " returns a part of nothing that it was given");
  }

  // The CPU's arguments are kept as they are, so that each replay runs with them.
  void record(Graph& graph) {
    const Stack cpu = cpu_arguments([](const at::Tensor& tensor, bool) { return opened(tensor); });
    std::vector<at::Tensor> outputs, kept = fresh_;
    for (const at::Tensor& tensor : fresh_) outputs.push_back(tensor.defined() ? opened(tensor) : tensor);
    for_each_argument([&](const at::Tensor& tensor, bool) { kept.push_back(tensor); });
    const auto work = [op = op_, cpu, outputs] {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      Stack stack = cpu;
      op.callBoxed(stack);
      keep(stack, outputs, op.schema());
    };
    if (!generator_.defined()) return graph.add(schema_.name(), std::move(accesses_), kept, work);
    graph.add(schema_.name(), std::move(accesses_), kept,
              [generator = generator_, work] { with_generator(generator, work); });
  }

  void queue(Stream& stream) {
    count(Count::kOperations);
    if (Graph* graph = recording()) return record(*graph);
    if (runs_nothing() && bytes_ > kDecided) return;
    Stack cpu = cpu_arguments([](const at::Tensor& tensor, bool) { return opened(tensor); });
    std::vector<at::Tensor> outputs;
    for (const at::Tensor& tensor : fresh_) outputs.push_back(tensor.defined() ? opened(tensor) : tensor);
    auto work = [op = op_, cpu = std::move(cpu), outputs = std::move(outputs)]() mutable {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const Stack kept = cpu;  // torch returns references to several outputs after it has dropped the arguments
      op.callBoxed(cpu);
      keep(cpu, outputs, op.schema());
    };
    if (runs_nothing()) return work();
    if (!generator_.defined())
      return static_cast<void>(submit(stream, schema_.name(), std::move(accesses_), std::move(work)));
    submit(stream, schema_.name(), std::move(accesses_),
           [generator = generator_, work]() mutable { with_generator(generator, work); });
    wait_unseen(stream);
  }

  Stack run_now(Stream& stream) {
    refuse_while_recording(schema_.name());
    count(Count::kOperations);
    if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output))
      count_host_wait(/*copies=*/false);
    submit(stream, schema_.name(), std::move(accesses_), [] {});
    wait_on_host(mark(stream));
    // Outputs may change their size, which memory of the stand-in cannot.
    const Stack cpu = cpu_arguments(
        [](const at::Tensor& tensor, bool write) { return write ? opened(tensor).clone() : opened(tensor); });
    Stack returned = cpu;
    const auto work = [&] { op_.callBoxed(returned); };
    generator_.defined() ? with_generator(generator_, work) : work();
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!written(schema_.arguments()[i])) continue;
      const std::vector<at::Tensor> targets = tensors_of(arguments_[i]), sources = tensors_of(cpu[i]);
      for (size_t j = 0; j < targets.size(); ++j) {
        if (targets[j].sizes() != sources[j].sizes()) standin::resize(targets[j], sources[j].sizes(), c10::nullopt);
        if (sources[j].numel() > 0) standin::copy(targets[j], sources[j], /*wait=*/true);
      }
    }
    Stack results;
    for (size_t i = 0; i < returned.size(); ++i) {
      const c10::Argument& described = schema_.returns()[i];
      if (described.alias_info()) {
        TORCH_CHECK(written(described), schema_.name(), " returns a view, and its Meta kernel does not know which");
        for (size_t j = 0; j < arguments_.size(); ++j)
          if (shares(schema_.arguments()[j], described)) results.push_back(arguments_[j]);
        continue;
      }
      results.push_back(each_tensor(returned[i], [&](const at::Tensor& tensor) {
        at::Tensor made = new_tensor(tensor.sizes(), tensor.strides(), tensor.scalar_type(), device_);
        if (tensor.numel() > 0) standin::copy(made, tensor, /*wait=*/true);
        return made;
      }));
    }
    return results;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const Facts& facts_;
  Stack arguments_;
  c10::Device device_{kStandin, 0};
  at::Generator generator_;  // undefined: the operation draws no random numbers
  std::vector<Access> accesses_;
  size_t bytes_ = 0;               // of devices, that the operation uses
  std::vector<at::Tensor> fresh_;  // made for results, in their order
  bool is_view_ = false;
};

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, *stack);
  const Stack results = call.run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (const IValue& result : results) stack->push_back(result);
}

TORCH_LIBRARY_IMPL(_, DS_STANDIN_TYPE, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

// torch would make these of other operations here, and on the CPU has kernels of their own, whose bits differ.
TORCH_LIBRARY_IMPL(aten, DS_STANDIN_TYPE, m) {
  for (const char* name : {"_stack", "_stack.out", "addr", "addr.out", "all.dims", "all.dims_out", "any.dims",
                           "any.dims_out", "linalg__powsum", "mish_backward", "mse_loss", "native_channel_shuffle",
                           "native_group_norm", "native_layer_norm", "silu_backward", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace
}  // namespace standin
