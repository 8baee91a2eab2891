// One row of logits: its terms added up, what it does not see hidden.
#pragma once

#include "products.h"

namespace {

// What a thread writes a row of factors and of outer products to.
struct RowSpace {
  float* inner[MOST_OUTERS];  // (a,) and zeros
  float* outer[MOST_OUTERS];  // (b,)
  float* made;                // a row of outer products, with room before and behind

  static int64_t numbers(const Problem& problem) {
    int64_t needed = 0;
    for (int64_t n = 0; n < problem.outers; ++n)
      needed = std::max(needed, round_up(problem.outer[n].a, LANES) + LANES);
    int64_t total = KEYS + 2 * needed + 4 * LANES;
    for (int64_t n = 0; n < problem.outers; ++n)
      total += round_up(problem.outer[n].a, LANES) + round_up(problem.outer[n].b, LANES) + 2 * LANES;
    return round_up(total, LANES);
  }

  RowSpace(const Problem& problem, float* memory) {
    for (int64_t n = 0; n < problem.outers; ++n) {
      inner[n] = memory;
      memory += round_up(problem.outer[n].a, LANES) + LANES;
      outer[n] = memory;
      memory += round_up(problem.outer[n].b, LANES) + LANES;
    }
    made = memory;
  }
};

// The factors of a query's outer products, in float32 and with zeros behind.
inline void read_factors(const Problem& problem, RowSpace& space, int64_t batch, int64_t head, int64_t query) {
  for (int64_t n = 0; n < problem.outers; ++n) {
    const Outer& term = problem.outer[n];
    of_kind(term.inner, batch, head, query,
            [&](auto* from) { copy_row(space.inner[n], from, term.a, round_up(term.a, LANES)); });
    of_kind(term.outer, batch, head, query, [&](auto* from) { copy_row(space.outer[n], from, term.b, term.b); });
  }
}

// inner[j mod a] · outer[j div a] for the keys j from `first` on; returns where the first of them stands in `made`.
inline float* outer_product(float* made, const float* inner, const float* outer, int64_t a, int64_t first, int64_t count) {
  const int64_t begin = first / a, skipped = first - begin * a;
  float* place = made;
  for (int64_t part = begin; place < made + skipped + count; ++part, place += a) {
    const float factor = outer[part];
    for (int64_t column = 0; column < a; column += LANES) store(place + column, load(inner + column) * factor);
  }
  return made + skipped;
}

template <class Target, class Source>
inline void add_row(Target* to, const Source* from, float weight, int64_t count, bool fresh) {
  int64_t column = 0;
  if (fresh) {
    for (; column + LANES <= count; column += LANES) store(to + column, load(from + column) * weight);
    for (; column < count; ++column) put(to + column, number(from[column]) * weight);
  } else {
    for (; column + LANES <= count; column += LANES) store(to + column, load(to + column) + load(from + column) * weight);
    for (; column < count; ++column) put(to + column, number(to[column]) + number(from[column]) * weight);
  }
}

inline void hide(float* row, const uint8_t* keep, int64_t count) {
  int64_t column = 0;
  for (; column + LANES <= count; column += LANES) {
    Bytes bytes;
    std::memcpy(&bytes, keep + column, sizeof bytes);
    const Ints seen = __builtin_convertvector(bytes, Ints) != 0;
    store(row + column, seen ? load(row + column) : all(HIDDEN));
  }
  for (; column < count; ++column) row[column] = keep[column] ? row[column] : HIDDEN;
}

// The logits of a query for the keys first … first + count, of which it sees the first `seen`; `row` holds its low-rank terms
// where there are any. Returns where they stand; behind those that are seen it is hidden up to `size`.
inline const float* logits_of(const Problem& problem, RowSpace& space, float* row, int64_t batch, int64_t head,
                              int64_t query, int64_t first, int64_t seen, int64_t size) {
  bool fresh = problem.rank == 0;
  const Added& alone = problem.added[0];
  if (fresh && problem.addeds == 1 && !problem.outers && !alone.weight && alone.tensor.kind == FLOAT32 && !problem.keep.data &&
      seen == size)
    return at<float>(alone.tensor, batch, head, query) + first;  // nothing is to be added to it
  for (int64_t n = 0; n < problem.outers && seen > 0; ++n) {
    float* made = outer_product(space.made, space.inner[n], space.outer[n], problem.outer[n].a, first, seen);
    if (fresh && problem.outers == 1)
      row = made;
    else
      add_row(row, made, 1.0f, seen, fresh);
    fresh = false;
  }
  for (int64_t n = 0; n < problem.addeds; ++n) {
    const Added& term = problem.added[n];
    const float weight = term.weight ? term.weight[head] : 1.0f;
    of_kind(term.tensor, batch, head, query, [&](auto* from) { add_row(row, from + first, weight, seen, fresh); });
    fresh = false;
  }
  if (problem.keep.data) hide(row, at<uint8_t>(problem.keep, batch, head, query) + first, seen);
  for (int64_t column = seen; column < size; ++column) row[column] = HIDDEN;
  return row;
}

// GCC takes a function that does nothing else than `__builtin_prefetch` for one without an effect, and drops its calls.
inline void fetch_line(const void* place) { asm volatile("prefetcht0 %0" : : "m"(*(const char*)place)); }

// Ask the memory for what tables hold of the row that comes AHEAD rows after `row`; behind the last one of a tile, that is a row
// of the next KEYS keys.
inline void fetch_ahead(const Problem& problem, int64_t batch, int64_t head, int64_t first_query, int64_t row, int64_t rows,
                        int64_t first, int64_t end) {
  const int64_t query = first_query + (row + AHEAD) % rows, from_key = row + AHEAD < rows ? first : first + KEYS;
  for (int64_t n = 0; n < problem.addeds; ++n) {
    const Tensor& table = problem.added[n].tensor;
    if (!table.row) continue;
    of_kind(table, batch, head, query, [&](auto* from) {
      const int64_t line = 64 / sizeof *from;
      for (int64_t key = from_key; key < std::min(from_key + KEYS, end); key += line) fetch_line(from + key);
    });
  }
}

inline bool has_nan(const float* row, int64_t count) {
  Ints found{};
  for (int64_t column = 0; column < count; column += LANES) found |= load(row + column) != load(row + column);
  for (int64_t lane = 0; lane < LANES; ++lane)
    if (found[lane]) return true;
  return false;
}

// Zeros for the keys first … first + size that a query does not see.
inline void clear_hidden(const Problem& problem, float* row, int64_t batch, int64_t head, int64_t query, int64_t first,
                         int64_t seen, int64_t size) {
  for (int64_t column = 0; column < size; ++column)
    if (column >= seen || (problem.keep.data && !at<uint8_t>(problem.keep, batch, head, query)[first + column])) row[column] = 0.0f;
}

// How many of the keys first … first + count a query sees.
inline int64_t seen_of(const Problem& problem, int64_t query, int64_t first, int64_t count) {
  return std::max<int64_t>(0, std::min(count, query + problem.causal_offset + 1 - first));
}

inline int64_t keys_of(const Problem& problem, int64_t batch) { return problem.ends ? problem.ends[batch] : problem.keys; }

inline uint64_t number_of_row(const Problem& problem, int64_t batch, int64_t head, int64_t query) {
  return (uint64_t)((batch * problem.heads + head) * problem.queries + query);
}

}  // namespace
