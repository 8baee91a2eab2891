// The arguments of the kernels. hf_synthesizer/attend/native/operands.py declares the same structures for ctypes.
#pragma once

#include <cstdint>

extern "C" {

enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, BOOL = 2 };

// An input tensor. Strides of batch, head and row (a query or a key) count numbers, not bytes. The stride of columns is 1.
struct Tensor {
  const void* data;
  int64_t batch, head, row, kind;
};

// An outer product: inner (B, H, Lq, a), outer (B, H, Lq, b). Gradients (B, H, Lq, …) are contiguous float32, or null.
struct Outer {
  Tensor inner, outer;
  int64_t a, b;
  float *inner_gradient, *outer_gradient;
};

// A tensor that is added to the logits, multiplied by a weight for each head if `weight` is not null. A stride of 0 means that
// the gradient is summed over that dimension. A gradient that is not `gradient_zeroed` has its own row for each query: the first
// row of the batch overwrites it, and the others add to it. Every other gradient starts as zeros. Logits by
// distance have `columns` numbers for a query, of which `zero` is that of distance 0; the first and the last serve all farther keys.
struct Added {
  Tensor tensor;
  int64_t columns, zero;                                        // of logits by distance; 0 for logits with one number for each key
  const float* weight;                                          // (H,) or null
  void* gradient;                                               // or null; bfloat16 only if one row of the batch writes it
  int64_t gradient_kind, gradient_part, gradient_batch, gradient_head, gradient_row, gradient_zeroed;
  float* weight_gradient;                                       // (parts, B, H), or null
};

constexpr int64_t MOST_OUTERS = 2, MOST_ADDED = 8;

struct KernelArguments {
  int64_t batch, heads, queries, keys, width, rank;             // width of values, rank of all low-rank terms together
  Tensor value, query, key, keep;                               // data is null if the tensor is missing
  int64_t outers, addeds;
  Outer outer[MOST_OUTERS];
  Added added[MOST_ADDED];
  int64_t causal_offset;                                        // at least `keys` without a causal mask
  const int64_t* ends;                                          // (B,): index of the last visible key + 1, or null
  int64_t window, sinks, start;                                 // window 0: no limit. Query i is at index `start` + i of the keys
  int64_t by_tiles;                                             // whether all queries of a tile see what one of them sees
  const int64_t* tokens;                                        // (B,): index of a row's first token, or null for 0
  double dropout;
  uint64_t seed;
  int64_t threads, parts, together, bfloat16_products;          // `together`: rows of the batch in one item of work
  int64_t shared;                                               // whether all rows of the batch have the same weights
  Tensor factor;                                                // (1 or B, 1 or H, 1, Lk): multiplies shared weights
  void* output;                                                 // (B, Lq, H, width), in the values' kind
  float* normaliser;                                            // (B, H, Lq): log Σ exp of a row's logits, or null
  Tensor output_gradient, forward_output;                       // inputs of the backward
  const float* normaliser_gradient;                             // (B, H, Lq), or null
  float *value_gradient, *query_gradient, *key_gradient;        // (parts, B, Lk, H, w), (B, Lq, H, r), (parts, B, Lk, H, r)
};

}
