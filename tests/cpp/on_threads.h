// Bodies that run at the same time. Included as "../on_threads.h" by the tests of any room.
#pragma once
#include <thread>
#include <vector>

namespace ds {

// body(0) ... body(count - 1), each in a thread of its own.
template <typename Body>
void on_threads(int count, const Body& body) {
  std::vector<std::thread> threads;
  for (int number = 0; number < count; ++number) threads.emplace_back([&, number] { body(number); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ds
