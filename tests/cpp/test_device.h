// The device of tests that take any: the CPU, or with DS_TEST_DEVICE=standin the stand-in device of tests/device, where
// standin_runs.cpp repeats them. Included as "../test_device.h".
#pragma once
#include <c10/core/Device.h>
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "../device/standin.h"
#include "stand_in.h"

namespace ds {

inline bool on_standin() {
  const char* name = std::getenv("DS_TEST_DEVICE");
  return name && std::string(name) == "standin";
}

inline c10::Device test_device() {
  return on_standin() ? c10::Device(c10::DeviceType::PrivateUse1, 0) : c10::Device(c10::DeviceType::CPU);
}

template <typename Function>
Function* standin_function(const char* name) {
  static void* const library = dlopen(stand_in("standin").c_str(), RTLD_NOW | RTLD_GLOBAL);
  return reinterpret_cast<Function*>(dlsym(library, name));
}
#define STANDIN(function) standin_function<decltype(function)>(#function)

// Waits for all queued work and returns the faults that the stand-in device has found since the last call.
inline std::vector<std::string> standin_faults_found() {
  STANDIN(standin_empty_cache)();
  std::vector<std::string> texts;
  for (int i = 0; i < STANDIN(standin_faults)(0); ++i) texts.emplace_back(STANDIN(standin_fault)(i));
  STANDIN(standin_faults)(1);
  return texts;
}

// Runs body(true); on the stand-in also body(false) once for each wait of these kinds that it makes, which is left out
// in that run: a fault of the order must be found each time. Gives those of which none was, as "stream wait 2". The
// body makes the same waits each time, and looks at values only where it gets true.
template <typename Body>
std::vector<std::string> waits_that_nothing_misses(const Body& body,
                                                   const std::vector<StandinWait>& audited = {
                                                       kStandinStreamWait, kStandinKeptMemory, kStandinHostWait}) {
  if (!on_standin()) return body(true), std::vector<std::string>{};
  std::vector<std::string> found;
  for (const StandinWait kind : audited) {
    const char* const name = std::array{"stream wait ", "kept memory ", "host wait "}[kind];
    STANDIN(standin_leave_out)(kind, 0);
    body(true);
    const int waits = STANDIN(standin_waits)(kind);
    for (const std::string& text : standin_faults_found()) found.push_back("nothing left out, and " + text);
    for (int number = 1; number <= waits; ++number) {
      STANDIN(standin_leave_out)(kind, number);
      body(false);
      if (standin_faults_found().empty()) found.push_back(name + std::to_string(number));
    }
    STANDIN(standin_leave_out)(kind, 0);
  }
  return found;
}

}  // namespace ds
