// One row of logits: the sum of its terms. Keys that the query does not see are hidden.
#pragma once

#include "products.h"

namespace {

// A thread's memory for one row of factors and of outer products.
struct RowSpace {
  float* inner[MOST_OUTERS];  // (a,) and zeros
  float* outer[MOST_OUTERS];  // (b,)
  float* products;            // a row of outer products, with room before and behind

  static int64_t numbers(const KernelArguments& arguments) {
    int64_t needed = 0;
    for (int64_t n = 0; n < arguments.outers; ++n)
      needed = std::max(needed, round_up(arguments.outer[n].a, LANES) + LANES);
    int64_t total = KEYS + 2 * needed + 4 * LANES;
    for (int64_t n = 0; n < arguments.outers; ++n)
      total += round_up(arguments.outer[n].a, LANES) + round_up(arguments.outer[n].b, LANES) + 2 * LANES;
    return round_up(total, LANES);
  }

  RowSpace(const KernelArguments& arguments, float* memory) {
    for (int64_t n = 0; n < arguments.outers; ++n) {
      inner[n] = memory;
      memory += round_up(arguments.outer[n].a, LANES) + LANES;
      outer[n] = memory;
      memory += round_up(arguments.outer[n].b, LANES) + LANES;
    }
    products = memory;
  }
};

// The factors of a query's outer products, in float32 and followed by zeros.
inline void read_factors(const KernelArguments& arguments, RowSpace& space, int64_t batch, int64_t head, int64_t query) {
  for (int64_t n = 0; n < arguments.outers; ++n) {
    const Outer& term = arguments.outer[n];
    of_kind(term.inner, batch, head, query,
            [&](auto* from) { copy_row(space.inner[n], from, term.a, round_up(term.a, LANES)); });
    of_kind(term.outer, batch, head, query, [&](auto* from) { copy_row(space.outer[n], from, term.b, term.b); });
  }
}

// Writes inner[j mod a] · outer[j div a] for the keys j = first … first + count to `products`. Returns a pointer to key `first`.
inline float* outer_product(float* products, const float* inner, const float* outer, int64_t a, int64_t first, int64_t count) {
  const int64_t begin = first / a, skipped = first - begin * a;
  float* place = products;
  for (int64_t part = begin; place < products + skipped + count; ++part, place += a) {
    const float factor = outer[part];
    for (int64_t column = 0; column < a; column += LANES) store(place + column, load(inner + column) * factor);
  }
  return products + skipped;
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

// The keys of a term by distance: those before `near` take the first column, those from `far` on the last one. Both count from `first`.
struct Distances {
  int64_t near, far, column;  // `column` is that of the key `near`

  Distances(const KernelArguments& arguments, const Added& term, int64_t query, int64_t first, int64_t count) {
    const int64_t begin = query + arguments.start - term.zero - first;  // the key of column 0
    near = std::clamp<int64_t>(begin, 0, count);
    far = std::clamp<int64_t>(begin + term.columns, near, count);
    column = near - begin;
  }
};

// Adds the logits by distance of a query for the keys first … first + count.
template <class Source>
inline void add_by_distance(const KernelArguments& arguments, const Added& term, float* row, const Source* from, float weight,
                            int64_t query, int64_t first, int64_t count, bool fresh) {
  const Distances keys(arguments, term, query, first, count);
  const float before = number(from[0]) * weight, behind = number(from[term.columns - 1]) * weight;
  if (fresh) {
    for (int64_t key = 0; key < keys.near; ++key) row[key] = before;
    for (int64_t key = keys.far; key < count; ++key) row[key] = behind;
  } else {
    for (int64_t key = 0; key < keys.near; ++key) row[key] += before;
    for (int64_t key = keys.far; key < count; ++key) row[key] += behind;
  }
  add_row(row + keys.near, from + keys.column, weight, keys.far - keys.near, fresh);
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

// Keys first … last − 1.
struct Span {
  int64_t first, last;
};

// The keys less than `window` places away from the queries first_query … first_query + rows − 1.
inline Span near_keys(const KernelArguments& arguments, int64_t first_query, int64_t rows) {
  const int64_t index = first_query + arguments.start;
  if (arguments.by_tiles)
    return {(index - arguments.window + 1) / QUERIES * QUERIES, round_up(index / QUERIES * QUERIES + QUERIES - 1 + arguments.window, QUERIES)};
  return {index - arguments.window + 1, index + rows - 1 + arguments.window};
}

// The first tokens of a row, which all its queries see.
inline Span sink_keys(const KernelArguments& arguments, int64_t batch) {
  const int64_t first = arguments.tokens ? arguments.tokens[batch] : 0;
  return {first, first + arguments.sinks};
}

// The keys before `end` that some of the queries first_query … first_query + rows − 1 see: at most two spans, in order. They start at
// multiples of STEP.
struct Spans {
  Span spans[2];
  int64_t count = 0;

  Spans(const KernelArguments& arguments, int64_t batch, int64_t first_query, int64_t rows, int64_t end) {
    if (!arguments.window) {
      add({0, end}, end);
      return;
    }
    add(sink_keys(arguments, batch), end);
    add(near_keys(arguments, first_query, rows), end);
  }

  const Span* begin() const { return spans; }
  const Span* end() const { return spans + count; }

 private:
  void add(Span span, int64_t end) {
    span.first = std::max<int64_t>(0, span.first) / STEP * STEP;
    span.last = std::min(span.last, end);
    if (span.last <= span.first) return;
    if (count && span.first <= spans[count - 1].last) {
      spans[count - 1] = {std::min(span.first, spans[count - 1].first), std::max(span.last, spans[count - 1].last)};
      return;
    }
    spans[count++] = span;
  }
};

// Whether a query sees a key, as far as the window says.
inline bool within_reach(const KernelArguments& arguments, int64_t batch, int64_t query, int64_t key) {
  if (!arguments.window || arguments.by_tiles) return true;
  const Span near = near_keys(arguments, query, 1), sinks = sink_keys(arguments, batch);
  return (key >= near.first && key < near.last) || (key >= sinks.first && key < sinks.last);
}

// Hides the keys from first … first + count that are outside the query's window, but for the sinks.
inline void hide_far(const KernelArguments& arguments, float* row, int64_t batch, int64_t query, int64_t first, int64_t count) {
  const Span near = near_keys(arguments, query, 1), sinks = sink_keys(arguments, batch);
  auto hide_until = [&](int64_t from, int64_t to) {
    for (int64_t key = std::max(from, first); key < std::min(to, first + count); ++key) row[key - first] = HIDDEN;
  };
  for (Span far : {Span{first, near.first}, Span{near.last, first + count}}) {
    hide_until(far.first, std::min(far.last, sinks.first));
    hide_until(std::max(far.first, sinks.last), far.last);
  }
}

// The logits of a query for the keys from `first` on. The query sees the first `seen` of them; the others, up to `size`, are
// HIDDEN. `row` holds the low-rank terms, if there are any. Returns a pointer to the logits, which need not be `row`.
inline const float* logits_of(const KernelArguments& arguments, RowSpace& space, float* row, int64_t batch, int64_t head,
                              int64_t query, int64_t first, int64_t seen, int64_t size) {
  bool fresh = arguments.rank == 0;
  const Added& only_term = arguments.added[0];
  if (fresh && arguments.addeds == 1 && !arguments.outers && !only_term.weight && !only_term.columns &&
      only_term.tensor.kind == FLOAT32 && !arguments.keep.data &&
      !arguments.window && seen == size)
    return at<float>(only_term.tensor, batch, head, query) + first;  // the only term: no copy needed
  for (int64_t n = 0; n < arguments.outers && seen > 0; ++n) {
    float* products = outer_product(space.products, space.inner[n], space.outer[n], arguments.outer[n].a, first, seen);
    if (fresh && arguments.outers == 1)
      row = products;
    else
      add_row(row, products, 1.0f, seen, fresh);
    fresh = false;
  }
  for (int64_t n = 0; n < arguments.addeds; ++n) {
    const Added& term = arguments.added[n];
    const float weight = term.weight ? term.weight[head] : 1.0f;
    of_kind(term.tensor, batch, head, query, [&](auto* from) {
      if (term.columns)
        add_by_distance(arguments, term, row, from, weight, query, first, seen, fresh);
      else
        add_row(row, from + first, weight, seen, fresh);
    });
    fresh = false;
  }
  if (arguments.keep.data) hide(row, at<uint8_t>(arguments.keep, batch, head, query) + first, seen);
  if (arguments.window && !arguments.by_tiles) hide_far(arguments, row, batch, query, first, seen);
  for (int64_t column = seen; column < size; ++column) row[column] = HIDDEN;
  return row;
}

// Assembly, because GCC drops calls of a function that only calls `__builtin_prefetch`.
inline void fetch_line(const void* place) { asm volatile("prefetcht0 %0" : : "m"(*(const char*)place)); }

// Prefetches the tables' numbers for the row that comes AHEAD rows after `row`. After a tile's last row, this is a row of the next
// KEYS keys.
inline void fetch_ahead(const KernelArguments& arguments, int64_t batch, int64_t head, int64_t first_query, int64_t row, int64_t rows,
                        int64_t first, int64_t end) {
  const int64_t query = first_query + (row + AHEAD) % rows, from_key = row + AHEAD < rows ? first : first + KEYS;
  for (int64_t n = 0; n < arguments.addeds; ++n) {
    const Tensor& table = arguments.added[n].tensor;
    if (!table.row || arguments.added[n].columns) continue;
    of_kind(table, batch, head, query, [&](auto* from) {
      const int64_t line = 64 / sizeof *from;
      for (int64_t key = from_key; key < std::min(from_key + KEYS, end); key += line) fetch_line(from + key);
    });
  }
}

inline bool has_nan(const float* row, int64_t count) {
  Ints nan_lanes{};
  for (int64_t column = 0; column < count; column += LANES) nan_lanes |= load(row + column) != load(row + column);
  for (int64_t lane = 0; lane < LANES; ++lane)
    if (nan_lanes[lane]) return true;
  return false;
}

// Writes zeros for the keys first … first + size that a query does not see.
inline void clear_hidden(const KernelArguments& arguments, float* row, int64_t batch, int64_t head, int64_t query, int64_t first,
                         int64_t seen, int64_t size) {
  for (int64_t column = 0; column < size; ++column)
    if (column >= seen || (arguments.keep.data && !at<uint8_t>(arguments.keep, batch, head, query)[first + column]) ||
        !within_reach(arguments, batch, query, first + column))
      row[column] = 0.0f;
}

// How many of the keys first … first + count a query sees.
inline int64_t seen_of(const KernelArguments& arguments, int64_t query, int64_t first, int64_t count) {
  return std::max<int64_t>(0, std::min(count, query + arguments.causal_offset + 1 - first));
}

inline int64_t keys_of(const KernelArguments& arguments, int64_t batch) { return arguments.ends ? arguments.ends[batch] : arguments.keys; }

inline uint64_t number_of_row(const KernelArguments& arguments, int64_t batch, int64_t head, int64_t query) {
  return (uint64_t)((batch * arguments.heads + head) * arguments.queries + query);
}

}  // namespace
