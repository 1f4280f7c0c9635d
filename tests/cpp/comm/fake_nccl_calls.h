// Calls of the library that stands in for NCCL (fake_nccl/), and a fixture whose tests leave nothing in it.
#pragma once
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "../stand_in.h"
#include "fake_nccl/fake_nccl.h"

namespace ds::comm {

inline const std::string& fake_nccl_path() {
  static const std::string path = stand_in("fake_nccl");
  return path;
}

template <typename Function>
Function* fake_nccl_function(const char* name) {
  return reinterpret_cast<Function*>(dlsym(dlopen(fake_nccl_path().c_str(), RTLD_NOW), name));
}
#define FAKE_NCCL(function) fake_nccl_function<decltype(function)>(#function)

// NcclMember::on_device of a rank that is a thread: the calling one.
inline std::function<void(const std::function<void()>&)> as_this_thread() {
  return [thread = FAKE_NCCL(fake_nccl_this_thread)()](const std::function<void()>& body) {
    FAKE_NCCL(fake_nccl_act_as)(thread);
    body();
    FAKE_NCCL(fake_nccl_act_as)(0);
  };
}

class FakeNcclTest : public testing::Test {
 protected:
  void SetUp() override { FAKE_NCCL(fake_nccl_reset)(); }
  void TearDown() override {
    EXPECT_EQ(FAKE_NCCL(fake_nccl_count)("alive"), 0);
    unsetenv("FAKE_NCCL_EAGER");
  }
};

}  // namespace ds::comm
