// From the gradient of a row of logits to the gradients of its terms.
#pragma once

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include "items.h"

namespace {

constexpr int64_t LARGE = 1 << 27;  // bytes; large pages pay off for gradients at least this large

// Asks the system for large pages (madvise) for gradients of tables that several rows of the batch write. If one row writes the
// gradient once, large pages save no time.
inline void ask_for_large_pages(const KernelArguments& arguments) {
#ifdef MADV_HUGEPAGE
  for (int64_t n = 0; n < arguments.addeds; ++n) {
    const Added& term = arguments.added[n];
    if (!term.gradient || term.gradient_zeroed || term.gradient_batch || arguments.batch == 1) continue;
    const int64_t bytes = arguments.heads * arguments.queries * arguments.keys * 4;
    const uintptr_t start = ((uintptr_t)term.gradient + 4095) / 4096 * 4096;
    if (bytes >= LARGE) madvise((void*)start, ((uintptr_t)term.gradient + bytes - start) / 4096 * 4096, MADV_HUGEPAGE);
  }
#endif
}

// Gradients of an outer product's factors from the gradients of the keys first … first + count. `inner` is followed by zeros, and
// `inner_gradient` by unused memory.
inline void factor_gradients(float* space, const float* gradient, const float* inner, const float* outer, int64_t a,
                             int64_t first, int64_t count, float* inner_gradient, float* outer_gradient) {
  const int64_t begin = first / a, skipped = first - begin * a, end = skipped + count;
  std::memset(space, 0, skipped * 4);
  std::memcpy(space + skipped, gradient, count * 4);
  std::memset(space + end, 0, (a + LANES) * 4);
  for (int64_t part = begin; (part - begin) * a < end; ++part) {
    const float* numbers_of_part = space + (part - begin) * a;
    const float factor = outer[part];
    Floats total{};
    for (int64_t column = 0; column < a; column += LANES) {
      const Floats numbers = load(numbers_of_part + column);
      total += numbers * load(inner + column);
      store(inner_gradient + column, load(inner_gradient + column) + numbers * factor);
    }
    outer_gradient[part] += sum(total);
  }
}

// Calls `act` with a pointer to the row of a term's gradient, and with whether nothing was written there before.
template <class Act>
inline void of_gradient(const Added& term, const Item& item, int64_t batch, int64_t query, Act act) {
  const int64_t place = item.part * term.gradient_part + batch * term.gradient_batch + item.head * term.gradient_head +
                        query * term.gradient_row;
  const bool fresh = !term.gradient_zeroed && (term.gradient_batch || batch == item.first_batch);
  if (term.gradient_kind == FLOAT32)
    act((float*)term.gradient + place, fresh);
  else
    act((Bfloat16*)term.gradient + place, fresh);
}

inline float sum_of(const float* numbers, int64_t count) {
  Floats total{};
  int64_t place = 0;
  for (; place + LANES <= count; place += LANES) total += load(numbers + place);
  float rest = sum(total);
  for (; place < count; ++place) rest += numbers[place];
  return rest;
}

// The same for a term by distance. All keys beyond its last distance share one number.
inline void gradients_by_distance(const KernelArguments& arguments, const Added& term, const float* gradient, const Item& item,
                                  int64_t batch, int64_t query, int64_t first, int64_t seen) {
  const Distances keys(arguments, term, query, first, seen);
  const int64_t last = term.columns - 1, middle = keys.far - keys.near;
  const float before = sum_of(gradient, keys.near), behind = sum_of(gradient + keys.far, seen - keys.far);
  if (term.weight_gradient)
    of_kind(term.tensor, batch, item.head, query, [&](auto* from) {
      term.weight_gradient[(item.part * arguments.batch + batch) * arguments.heads + item.head] +=
          dot(gradient + keys.near, from + keys.column, middle) + before * number(from[0]) + behind * number(from[last]);
    });
  if (term.gradient)
    of_gradient(term, item, batch, query, [&](auto* to, bool) {
      const float weight = term.weight ? term.weight[item.head] : 1.0f;
      add_row(to + keys.column, gradient + keys.near, weight, middle, false);
      put(to, number(to[0]) + before * weight);
      put(to + last, number(to[last]) + behind * weight);
    });
}

// Adds a row's gradient, for the keys first … first + seen, to the gradients of all `added` terms.
inline void added_gradients(const KernelArguments& arguments, const float* gradient, const Item& item, int64_t batch, int64_t query,
                            int64_t first, int64_t seen) {
  for (int64_t n = 0; n < arguments.addeds; ++n) {
    const Added& term = arguments.added[n];
    if (term.columns) {
      gradients_by_distance(arguments, term, gradient, item, batch, query, first, seen);
      continue;
    }
    if (term.weight_gradient)
      of_kind(term.tensor, batch, item.head, query, [&](auto* from) {
        term.weight_gradient[(item.part * arguments.batch + batch) * arguments.heads + item.head] +=
            dot(gradient, from + first, seen);
      });
    if (term.gradient)
      of_gradient(term, item, batch, query, [&](auto* to, bool fresh) {
        add_row(to + first, gradient, term.weight ? term.weight[item.head] : 1.0f, seen, fresh);
      });
  }
}

// Writes zeros for the keys from `seen` on, which a query does not see, if nothing was written there before.
inline void clear_unseen(const KernelArguments& arguments, const Item& item, int64_t batch, int64_t query, int64_t seen) {
  for (int64_t n = 0; n < arguments.addeds; ++n)
    if (arguments.added[n].gradient && !arguments.added[n].columns)
      of_gradient(arguments.added[n], item, batch, query, [&](auto* to, bool fresh) {
        if (fresh) std::memset(to + seen, 0, (arguments.keys - seen) * sizeof *to);
      });
}

}  // namespace
