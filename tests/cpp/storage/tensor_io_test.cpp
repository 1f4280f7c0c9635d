// Tensors in files: any layout and dtype, several threads, errors, page-locked memory.
#include "storage/tensor_io.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "../on_threads.h"
#include "io/file_error.h"
#include "storage/buffered_writer.h"

namespace ds::storage {
namespace {

using How = TensorIo::How;

class TensorFiles : public testing::Test {
 protected:
  TensorFiles() {
    std::string pattern = "/tmp/ds_tensor_io_XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    options_.block_bytes = 8192;
    options_.queue_depth = 4;
  }
  ~TensorFiles() override { std::filesystem::remove_all(folder_); }

  std::shared_ptr<TensorIo> handle(int threads = 1) {
    return std::make_shared<TensorIo>(files_, pool_, options_, threads);
  }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  static std::string content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static std::string bytes(const at::Tensor& contiguous) {
    return {static_cast<const char*>(contiguous.data_ptr()), contiguous.nbytes()};
  }

  std::string folder_;
  io::TransferOptions options_;
  std::shared_ptr<io::Files> files_ = std::make_shared<io::Files>();
  std::shared_ptr<io::LockedPool> pool_ = std::make_shared<io::LockedPool>();
};

TEST_F(TensorFiles, AnyLayoutAndDtypeInRowMajorOrder) {
  const auto io = handle(3);
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kByte, at::kLong}) {
    const at::Tensor whole = at::arange(120 * 101, at::kLong).to(type).view({120, 101});
    for (const at::Tensor& tensor :
         {whole, whole.t(), whole.slice(1, 3, 90, 2), whole.slice(0, 7, 9), whole.select(0, 5).select(0, 5)}) {
      for (const How how : {How::kAlone, How::kWait, How::kBackground}) {
        io->write(tensor, {path("x")}, how, true);
        EXPECT_EQ(io->wait(), how == How::kBackground ? 1 : 0);
        ASSERT_EQ(content(path("x")).substr(0, tensor.nbytes()) == bytes(tensor.contiguous()), true);
        at::Tensor back = at::empty_like(tensor).zero_();
        if (!tensor.is_contiguous()) back = at::zeros_like(whole).slice(1, 0, tensor.size(1) * 2, 2).t().t();
        if (back.sizes() != tensor.sizes()) back = at::zeros_like(tensor);
        io->read(back, {path("x")}, how, true);
        io->wait();
        ASSERT_TRUE(at::equal(back, tensor));
      }
    }
  }
  const at::Tensor none = at::empty({0});
  io->write(none, {path("empty")}, How::kWait, true);
  EXPECT_EQ(content(path("empty")), "");
}

TEST_F(TensorFiles, AtOffsetsByNameAndByDescriptor) {
  const auto io = handle(2);
  const at::Tensor part = at::arange(5000, at::kInt);
  const int number = ::open(path("x").c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
  ASSERT_GE(number, 0);
  for (uint64_t i = 0; i < 4; ++i) io->write(part, {"", number, i * part.nbytes()}, How::kBackground, false);
  EXPECT_EQ(io->pending(), 4);
  EXPECT_EQ(io->wait(), 4);
  ::close(number);
  EXPECT_EQ(content(path("x")).size(), 4 * part.nbytes());
  const at::Tensor back = at::zeros({5000}, at::kInt);
  io->read(back, {path("x"), -1, 2 * part.nbytes()}, How::kWait, false);
  EXPECT_TRUE(at::equal(back, part));
}

TEST_F(TensorFiles, ErrorsOfTheBackgroundComeFromWait) {
  const auto io = handle(2);
  const at::Tensor tensor = at::zeros({100000});
  EXPECT_THROW(io->read(tensor, {path("none")}, How::kBackground, false), io::FileError);
  EXPECT_EQ(io->wait(), 0);
  files_->inject("write:3:enospc");
  io->write(tensor, {path("x")}, How::kBackground, false);
  io->write(tensor, {path("y")}, How::kBackground, false);
  EXPECT_THROW(io->wait(), io::FileError);
  files_->inject("");
  io->write(tensor, {path("x")}, How::kBackground, false);
  EXPECT_EQ(io->wait(), 1);
  EXPECT_THROW(io->read(at::zeros({200000}), {path("x")}, How::kWait, false), io::FileError);
}

TEST_F(TensorFiles, SeveralThreadsShareAHandle) {
  const auto io = handle(2);
  on_threads(4, [&](int user) {
    for (int i = 0; i < 10; ++i) {
      const at::Tensor tensor = at::arange(user * 1000, user * 1000 + 9999, at::kLong);
      const std::string file = path(std::to_string(user));
      io->write(tensor, {file}, i % 2 ? How::kWait : How::kAlone, false);
      const at::Tensor back = at::zeros_like(tensor);
      io->read(back, {file}, How::kWait, false);
      EXPECT_TRUE(at::equal(back, tensor));
    }
  });
}

TEST_F(TensorFiles, LockedTensorsOfAllHandles) {
  const auto io = handle();
  const auto other = handle();
  at::Tensor tensor = io->new_locked(1000, at::empty({0}, at::kHalf));
  EXPECT_EQ(tensor.numel(), 1000);
  EXPECT_EQ(tensor.scalar_type(), at::kHalf);
  EXPECT_TRUE(other->is_pinned(tensor));
  EXPECT_TRUE(other->is_pinned(tensor.slice(0, 10, 20)));
  EXPECT_FALSE(other->is_pinned(at::zeros({3})));
  EXPECT_FALSE(other->free_locked(at::zeros({3})));
  const at::Tensor view = tensor.slice(0, 10, 20);
  EXPECT_TRUE(other->free_locked(tensor));
  EXPECT_FALSE(io->is_pinned(tensor));
  view.fill_(2);  // its memory is there
  tensor = at::Tensor();
  EXPECT_EQ(view.sum().item<double>(), 20);
  at::Tensor dropped = io->new_locked(5000, at::empty({0}));
  dropped = at::Tensor();
  EXPECT_EQ(pool_->locked_bytes(), 0u);
  EXPECT_THROW(io->new_locked(-1, tensor.defined() ? tensor : view), Error);
}

TEST_F(TensorFiles, OnlyDeviceHandlesPinOnDevices) {
  const auto io = handle();
  EXPECT_THROW(io->pin_device(at::zeros({3})), Error);
  EXPECT_THROW(io->unpin_device(at::zeros({3})), Error);
  EXPECT_THROW(io->new_device(3, at::zeros({3})), Error);
}

TEST_F(TensorFiles, CopiesBytes) {
  const at::Tensor from = at::arange(3000000, at::kInt);
  at::Tensor to = at::zeros({3000000}, at::kFloat);
  copy_bytes(to, from, 2);
  EXPECT_EQ(bytes(to) == bytes(from), true);
  EXPECT_THROW(copy_bytes(to, from.slice(0, 1), 2), Error);
  EXPECT_THROW(copy_bytes(to, at::zeros({3000, 1000}, at::kInt).t(), 2), Error);
}

// ---- BufferedWriter ------------------------------------------------------------------------------------------------

at::Tensor numbers(int64_t numel, int64_t seed) {
  return at::arange(seed, seed + numel * 7, 7, at::kLong).fmod(251).to(at::kByte);
}

TEST_F(TensorFiles, AWriterOfPieces) {
  const auto io = handle(2);
  const at::Tensor data = numbers(300000, 5);
  const std::string wanted = bytes(data);
  for (const bool two : {true, false}) {
    for (const int64_t memory : {20000, 65536}) {
      BufferedWriter writer(io, path("x"), at::empty({memory}, at::kByte), {two, 1, 0});
      size_t at = 0;
      for (size_t piece = 1; at < wanted.size(); piece = piece * 3 + 1) {
        const size_t now = std::min(piece, wanted.size() - at);
        writer.write(wanted.data() + at, now);
        at += now;
        if (piece % 2) writer.flush();
      }
      EXPECT_EQ(writer.position(), wanted.size());
      EXPECT_EQ(writer.close(), wanted.size());
      EXPECT_EQ(writer.close(), wanted.size());
      EXPECT_EQ(writer.written(), wanted.size());
      ASSERT_EQ(content(path("x")) == wanted, true);
      EXPECT_THROW(writer.write(wanted.data(), 1), Error);
    }
  }
  EXPECT_EQ(io->wait(), 0);  // the handle's user has started nothing
}

TEST_F(TensorFiles, OthersWriteThroughTheDescriptorInBetween) {
  const auto io = handle();
  std::ofstream(path("x")) << std::string(1 << 20, 'o');  // longer, and gone
  BufferedWriter writer(io, path("x"), at::empty({65536}, at::kByte), {});
  const std::string first(10001, 'a');
  const std::string second(20003, 'b');
  const std::string third(100007, 'c');
  writer.write(first.data(), first.size());
  const int number = writer.descriptor();
  ASSERT_EQ(::write(number, second.data(), second.size()), ssize_t(second.size()));
  EXPECT_EQ(writer.descriptor(), number);
  writer.write(third.data(), third.size());
  writer.descriptor();
  ASSERT_EQ(::write(number, "!", 1), 1);
  EXPECT_EQ(writer.close(), first.size() + second.size() + third.size() + 1);
  EXPECT_EQ(content(path("x")) == first + second + third + "!", true);
}

TEST_F(TensorFiles, SeveralWritersMakeOneFile) {
  const std::string wanted = bytes(numbers(1000000, 3));
  std::ofstream(path("x")) << std::string(2 << 20, 'o');
  for (const int writers : {2, 3}) {
    uint64_t written = 0;
    for (int rank = 0; rank < writers; ++rank) {
      // at a page, or one byte after it: the memory of each writer lies elsewhere
      const at::Tensor all = at::empty({65536 + 2 * 4096}, at::kByte);
      const auto address = reinterpret_cast<uintptr_t>(all.data_ptr());
      const auto page = static_cast<int64_t>((4096 - address % 4096) % 4096);
      BufferedWriter writer(handle(), path("x"), all.narrow(0, page + rank % 2, 65536), {true, writers, rank});
      writer.write(wanted.data(), wanted.size());
      EXPECT_EQ(writer.close(), wanted.size());
      EXPECT_LT(writer.written(), wanted.size() * 2 / 3);
      written += writer.written();
      EXPECT_THROW(writer.descriptor(), Error);
    }
    EXPECT_EQ(written, wanted.size());
    EXPECT_EQ(content(path("x")) == wanted, true);
    std::filesystem::remove(path("x"));
  }
}

TEST_F(TensorFiles, AWriterRefusesWhatDoesNotWork) {
  const auto io = handle();
  EXPECT_THROW(BufferedWriter(io, path("x"), at::empty({4096}, at::kByte), {}), Error);
  EXPECT_THROW(BufferedWriter(io, path("x"), at::empty({100, 100}).t(), {}), Error);
  EXPECT_THROW(BufferedWriter(io, path("x"), at::empty({65536}), {true, 2, 2}), Error);
  EXPECT_THROW(BufferedWriter(io, path("none/x"), at::empty({65536}), {}), io::FileError);
  BufferedWriter writer(io, path("x"), at::empty({65536}, at::kByte), {});
  files_->inject("write:2+:eio");
  const std::string data(1 << 20, 'd');
  EXPECT_THROW(writer.write(data.data(), data.size()), io::FileError);
}

}  // namespace
}  // namespace ds::storage
