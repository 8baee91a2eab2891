// The native kernels of hf_synthesizer as functions of C, each of which returns 0, or 1 where it failed and did nothing.
// Nothing of PyTorch is needed to build this: what it calls is handed over by `bind`.

#include "backward.h"
#include "forward.h"

extern "C" {

// PyTorch's matrix products, and the function of its OpenMP that starts the threads it has already.
void hf_bind(void* float_product, void* bfloat16_product, void* release, void* parallel) {
  library = {(FloatProduct)float_product, (Bfloat16Product)bfloat16_product, (Release)release, (Parallel)parallel};
}

// Whether the products work on this machine: those of float32, or those of bfloat16.
int64_t hf_probe(int64_t bfloat16) {
  try {
    alignas(64) float c[32 * 32];
    if (bfloat16) {
      alignas(64) Bfloat16 ones[32 * 32];
      for (auto& one : ones) one = 0x3f80;
      multiply(32, 32, 32, ones, 32, ones, 32, c, 32, false);
    } else {
      alignas(64) float ones[32 * 32];
      for (auto& one : ones) one = 1.0f;
      multiply(32, 32, 32, ones, 32, ones, 32, c, 32, false);
    }
    library.release(bfloat16);
    for (float number : c)
      if (number != 32.0f) return 1;
    return 0;
  } catch (...) {
    return 1;
  }
}

// For ctypes to compare with.
int64_t hf_size() { return sizeof(Problem); }

int64_t hf_forward(const Problem* problem) {
  return problem->bfloat16_products ? share<Forward<Bfloat16>>(*problem) : share<Forward<float>>(*problem);
}

int64_t hf_backward(const Problem* problem) {
  ask_for_large_pages(*problem);
  return problem->bfloat16_products ? share<Backward<Bfloat16>>(*problem) : share<Backward<float>>(*problem);
}

// What dropout does to each weight: 0, or 1 / (1 − p), (B, H, Lq, Lk).
int64_t hf_dropout(const Problem* problem, float* to) {
  const float scale = (float)(1.0 / (1.0 - problem->dropout));
  const int64_t rows = problem->batch * problem->heads * problem->queries;
  for (int64_t row = 0; row < rows; ++row) {
    const RowOfDropout drawn(problem->seed, (uint64_t)row, problem->dropout);
    float* numbers = to + row * problem->keys;
    int64_t key = 0;
    for (; key + LANES <= problem->keys; key += LANES) store(numbers + key, drawn.kept(key) * scale);
    const Floats last = drawn.kept(key) * scale;
    for (int64_t lane = 0; key + lane < problem->keys; ++lane) numbers[key + lane] = last[lane];
  }
  return 0;
}

}
