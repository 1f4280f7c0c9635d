// [Note: dropout]
// Random bits by counting: Philox 4x32-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"). Whether
// the probability of a query and a key is dropped depends on (seed, batch, head, query, key) alone, all of them numbers
// in the whole attention: the same ones are dropped however it is cut into blocks, on every instruction set and device,
// and again in backward. Four neighbouring keys share a counter, (query, key / 4, head, batch); the key of the cipher
// is the seed.
#pragma once
#include <cstdint>

#include "kernels/host_device.h"

namespace ds::kernels {

struct PhiloxBits {
  uint32_t word[4];
};

constexpr uint32_t kPhiloxA = 0xd2511f53u, kPhiloxB = 0xcd9e8d57u;       // factors of words
constexpr uint32_t kPhiloxLow = 0x9e3779b9u, kPhiloxHigh = 0xbb67ae85u;  // added to the key in each round
constexpr int kPhiloxRounds = 10;

DS_HOST_DEVICE static inline PhiloxBits philox(PhiloxBits counter, uint64_t seed) {
  uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  uint32_t* c = counter.word;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxA} * c[0], b = uint64_t{kPhiloxB} * c[2];
    c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ low;
    c[1] = static_cast<uint32_t>(b);
    c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ high;
    c[3] = static_cast<uint32_t>(a);
    low += kPhiloxLow, high += kPhiloxHigh;
  }
  return counter;
}

// The choice of dropped probabilities.
struct AttentionDropout {
  uint64_t seed;
  uint32_t below;             // dropped where the random bits are less, so with a probability of below / 2^32
  float kept;                 // factor of the others; 0: there is no dropout
  uint32_t head, query, key;  // numbers of a block's first ones in the whole attention
};

// The factor of the probability of a block's head, query and key.
DS_HOST_DEVICE static inline float dropout_factor(const AttentionDropout& d, uint32_t batch, uint32_t head,
                                                  uint32_t query, uint32_t key) {
  if (d.kept == 0) return 1;
  const PhiloxBits bits = philox({{d.query + query, (d.key + key) / 4, d.head + head, batch}}, d.seed);
  return bits.word[(d.key + key) % 4] < d.below ? 0 : d.kept;
}

}  // namespace ds::kernels
