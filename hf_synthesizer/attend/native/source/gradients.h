// What the gradient of a row of logits gives to the terms that it was added up from.
#pragma once

#include "rows.h"

namespace {

inline void add_scaled(float* to, const float* from, float factor, int64_t count) {
  add_row(to, from, factor, count, false);
}

// Gradients of an outer product's factors, from those of the keys first … first + count. `inner` has zeros behind, as has
// `inner_gradient` room.
inline void factor_gradients(float* space, const float* gradient, const float* inner, const float* outer, int64_t a,
                             int64_t first, int64_t count, float* inner_gradient, float* outer_gradient) {
  const int64_t begin = first / a, skipped = first - begin * a, end = skipped + count;
  std::memset(space, 0, skipped * 4);
  std::memcpy(space + skipped, gradient, count * 4);
  std::memset(space + end, 0, (a + LANES) * 4);
  for (int64_t part = begin; (part - begin) * a < end; ++part) {
    const float* own = space + (part - begin) * a;
    const float factor = outer[part];
    Floats total{};
    for (int64_t column = 0; column < a; column += LANES) {
      const Floats numbers = load(own + column);
      total += numbers * load(inner + column);
      store(inner_gradient + column, load(inner_gradient + column) + numbers * factor);
    }
    outer_gradient[part] += sum(total);
  }
}

// Adds a row's gradient to those of all that is added to the logits as it stands.
inline void added_gradients(const Problem& problem, const float* gradient, int64_t part, int64_t batch, int64_t head,
                            int64_t query, int64_t first, int64_t seen) {
  for (int64_t n = 0; n < problem.addeds; ++n) {
    const Added& term = problem.added[n];
    if (term.weight_gradient)
      of_kind(term.tensor, batch, head, query, [&](auto* from) {
        term.weight_gradient[(part * problem.batch + batch) * problem.heads + head] += dot(gradient, from + first, seen);
      });
    if (term.gradient)
      add_scaled(term.gradient + part * term.gradient_part + batch * term.gradient_batch + head * term.gradient_head +
                     query * term.gradient_row + first,
                 gradient, term.weight ? term.weight[head] : 1.0f, seen);
  }
}

}  // namespace
