// The C functions of the native kernels. Each returns 0 on success and 1 on failure.
// The build needs no header of PyTorch: `hf_bind` receives the addresses of the functions that the kernels call.

#include "backward.h"
#include "forward.h"

extern "C" {

// PyTorch's matrix products, and the function of its OpenMP that runs work on PyTorch's own threads.
void hf_bind(void* float_product, void* bfloat16_product, void* release, void* parallel) {
  library = {(FloatProduct)float_product, (Bfloat16Product)bfloat16_product, (Release)release, (Parallel)parallel};
}

// Returns 0 if matrix products in float32 (or bfloat16) work on this machine.
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

// A test compares this with the size that ctypes computes.
int64_t hf_size() { return sizeof(KernelArguments); }

int64_t hf_forward(const KernelArguments* arguments) {
  return arguments->bfloat16_products ? share<Forward<Bfloat16>>(*arguments) : share<Forward<float>>(*arguments);
}

int64_t hf_backward(const KernelArguments* arguments) {
  ask_for_large_pages(*arguments);
  return arguments->bfloat16_products ? share<Backward<Bfloat16>>(*arguments) : share<Backward<float>>(*arguments);
}

// The factor that dropout gives each weight: 0 or 1 / (1 − p), (B, H, Lq, Lk).
int64_t hf_dropout(const KernelArguments* arguments, float* to) {
  const float scale = (float)(1.0 / (1.0 - arguments->dropout));
  const int64_t rows = arguments->batch * arguments->heads * arguments->queries;
  for (int64_t row = 0; row < rows; ++row) {
    const RowOfDropout drawn(arguments->seed, (uint64_t)row, arguments->dropout);
    float* numbers = to + row * arguments->keys;
    int64_t key = 0;
    for (; key + LANES <= arguments->keys; key += LANES) store(numbers + key, drawn.kept(key) * scale);
    const Floats last = drawn.kept(key) * scale;
    for (int64_t lane = 0; key + lane < arguments->keys; ++lane) numbers[key + lane] = last[lane];
  }
  return 0;
}

}
