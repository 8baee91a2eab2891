// What the kernels are given. hf_synthesizer/attend/native/operands.py declares the same for ctypes.
#pragma once

#include <cstdint>

extern "C" {

enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, BOOL = 2 };

// A tensor that is read: the strides of rows of the batch, heads and queries or keys in numbers; that of its columns is 1.
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

// What is added to the logits as it is, times a weight for each head or as it stands. The strides of gradients say which of
// parts, rows of the batch, heads and queries they tell apart. One that tells queries apart is written by the first row of the
// batch that it belongs to, whatever was there, and added to by the others; any other comes with zeros.
struct Added {
  Tensor tensor;
  const float* weight;                                          // (H,) or null
  void* gradient;                                               // or null; bfloat16 only where nothing is added to it
  int64_t gradient_kind, gradient_part, gradient_batch, gradient_head, gradient_row;
  float* weight_gradient;                                       // (parts, B, H), or null
};

constexpr int64_t MOST_OUTERS = 2, MOST_ADDED = 8;

struct Problem {
  int64_t batch, heads, queries, keys, width, rank;             // width of values, rank of all low-rank terms together
  Tensor value, query, key, keep;                               // data is null where there is none
  int64_t outers, addeds;
  Outer outer[MOST_OUTERS];
  Added added[MOST_ADDED];
  int64_t causal_offset;                                        // at least `keys` where there is none
  const int64_t* ends;                                          // (B,): keys up to the last that is seen, or null
  double dropout;
  uint64_t seed;
  int64_t threads, parts, together, bfloat16_products;          // so many rows of the batch belong to one item of work
  int64_t shared;                                               // whether weights are the same for all rows of the batch
  Tensor factor;                                                // (1 or B, 1 or H, 1, Lk): what they are multiplied with then
  void* output;                                                 // (B, Lq, H, width), in the values' kind
  float* normaliser;                                            // (B, H, Lq): log Σ exp of a row's logits, or null
  Tensor output_gradient, forward_output;                                     // of the output, and the output, for the backward
  float *value_gradient, *query_gradient, *key_gradient;        // (parts, B, Lk, H, w), (B, Lq, H, r), (parts, B, Lk, H, r)
};

}
