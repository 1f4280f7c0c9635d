// The texts of errors that calls fail with. Included as "../error_of.h" by the tests of any room.
#pragma once
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "base/error.h"

namespace ds {

// EXPECT_TRUE(says(text, part)): a failed test prints both.
inline testing::AssertionResult says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess() << "'" << part << "' is in: " << text;
  return testing::AssertionFailure() << "'" << part << "' is not in: " << text;
}

// The error of type `Kind` that `call` throws; a failed test where it comes back.
template <typename Kind, typename Call>
Kind thrown(Call&& call) {
  try {
    call();
  } catch (const Kind& error) {
    return error;
  }
  throw std::logic_error("no error");
}

// The text of the error of type `Kind` that `call` throws; "" when it comes back.
template <typename Kind = std::exception, typename Call>
std::string failure_of(Call&& call) {
  try {
    call();
  } catch (const Kind& error) {
    return error.what();
  }
  return "";
}

// The text of the ds::Error that `call` throws; "no error" when it comes back.
template <typename Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// The same, where the kind is expected as well; a failed test where there is no error.
template <typename Call>
std::string error_of(ErrorKind kind, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

}  // namespace ds
