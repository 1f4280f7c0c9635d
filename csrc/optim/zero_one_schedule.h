// The steps of 0/1 Adam at which something travels (arXiv 2202.06009, section 6): intervals that double.
#pragma once
#include <algorithm>
#include <cstdint>

namespace ds::optim {

// Whether the variance is updated in update number `update`, from 1. Updates of the variance are those numbers k(j),
// j > 0, with k(0) = 0 and k(j + 1) - k(j) = 2^floor(j / scaler).
inline bool updates_variance(int64_t update, int64_t scaler) {
  int64_t begin = 0, interval = 1;
  while (update - begin > scaler * interval) {  // `scaler` updates have one interval
    begin += scaler * interval;
    interval *= 2;
  }
  return (update - begin) % interval == 0;
}

// Whether the ranks become equal in local step number `step`, from 1. After step number t the next one is
// min(2^floor(t / scaler), longest) steps later; the first one follows t = 0.
inline bool syncs_weights(int64_t step, int64_t scaler, int64_t longest) {
  int64_t last = 0;
  while (true) {
    int64_t interval = 1;
    for (int64_t i = 0; i < last / scaler && interval < longest; ++i) interval *= 2;
    interval = std::min(interval, longest);
    if (interval == longest) return step > last && (step - last) % interval == 0;
    // The syncs that have this interval: up to the first one that is not below the next multiple of `scaler`.
    const int64_t end = (last / scaler + 1) * scaler, syncs = (end - last + interval - 1) / interval;
    if (step <= last + syncs * interval) return (step - last) % interval == 0;
    last += syncs * interval;
  }
}

}  // namespace ds::optim
