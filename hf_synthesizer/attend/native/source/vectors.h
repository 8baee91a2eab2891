// Vectors as wide as the target's instruction set, by the compiler's vector types.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = VECTOR_BYTES / 4;
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES / 4)));
typedef uint16_t Bfloat16;  // its bits

inline Floats all(float number) { return Floats{} + number; }

inline Floats load(const float* from) {
  Floats numbers;
  std::memcpy(&numbers, from, sizeof numbers);
  return numbers;
}

inline Floats load(const Bfloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats numbers) { std::memcpy(to, &numbers, sizeof numbers); }

// Rounds to nearest, ties to even.
inline void store(Bfloat16* to, Floats numbers) {
#if defined(__AVX512BF16__)
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)numbers);
  std::memcpy(to, &halves, sizeof halves);
#else
  const Words bits = (Words)numbers;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words quiet = (bits >> 16) | 0x40;  // keeps a NaN a NaN: rounding could make it an infinity
  const Halves halves = __builtin_convertvector((numbers == numbers) ? rounded : quiet, Halves);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

inline float number(float bits) { return bits; }

inline float number(Bfloat16 bits) {
  const uint32_t word = (uint32_t)bits << 16;
  float numbers;
  std::memcpy(&numbers, &word, 4);
  return numbers;
}

inline void put(float* to, float from) { *to = from; }

inline void put(Bfloat16* to, float from) {
  uint32_t bits;
  std::memcpy(&bits, &from, 4);
  *to = from == from ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 0x40;
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float largest(Floats numbers) {
  float most = numbers[0];
  for (int64_t lane = 1; lane < LANES; ++lane) most = numbers[lane] > most ? numbers[lane] : most;
  return most;
}

inline bool is_finite(float number) { return number - number == 0.0f; }

inline float sum(Floats numbers) {
  float total[LANES];
  store(total, numbers);
  for (int64_t half = LANES / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) total[lane] += total[lane + half];
  return total[0];
}

// e^x for x ≤ 0 within two units of the last place; 0 below −87, where it is no longer a normal number; NaN for NaN.
// e^x = 2^n · e^r with n = round(x / ln 2), |r| ≤ ln 2 / 2, and e^r by a polynomial.
inline Floats exponential(Floats x) {
  const float shift = 12582912.0f;  // 1.5 · 2²³: adding it rounds a number to an integer, held in the last bits
  const Floats shifted = x * 1.44269504f + shift;
  const Floats n = shifted - shift;
  Floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats power = all(1.9875691500e-4f);
  power = power * r + 1.3981999507e-3f;
  power = power * r + 8.3334519073e-3f;
  power = power * r + 4.1665795894e-2f;
  power = power * r + 1.6666665459e-1f;
  power = power * r + 5.0000001201e-1f;
  power = power * (r * r) + r + 1.0f;
  power = (Floats)((Words)power + ((Words)shifted << 23));
  power = power + x * 0.0f;  // the last bits of a NaN, all ones in one that a GPU made, were shifted into its exponent
  return x < -87.0f ? Floats{} : power;
}

// Dropout is a function of a seed and of a weight's position. A hash with two multiplications gives 32 bits for each weight.
struct RowOfDropout {
  uint32_t first, second, threshold;

  RowOfDropout(uint64_t seed, uint64_t row, double dropout) {
    uint64_t bits = seed + 0x9e3779b97f4a7c15u * (row + 1);
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    bits ^= bits >> 31;
    first = (uint32_t)bits;
    second = (uint32_t)(bits >> 32);
    threshold = dropout >= 1.0 ? 0xffffffffu : (uint32_t)(dropout * 4294967296.0);
  }

  // For LANES keys from `key` on: 1 if the weight is kept, 0 if it is dropped.
  Floats kept(int64_t key) const {
    Words bits;
    for (int64_t lane = 0; lane < LANES; ++lane) bits[lane] = (uint32_t)lane;
    bits = (bits + (uint32_t)key) * 0x9e3779b1u + first;
    bits = (bits ^ (bits >> 16)) * 0x21f0aaadu;
    bits = (bits ^ (bits >> 15)) + second;
    bits = bits * 0x735a2d97u;
    bits ^= bits >> 15;
    return bits >= threshold ? all(1.0f) : Floats{};
  }
};

}  // namespace
