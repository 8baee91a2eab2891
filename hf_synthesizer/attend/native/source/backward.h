// The backward: each tile of weights is recomputed from its rows' normalisers and used for all gradients at once.
#pragma once

#include <utility>

#include "gradients.h"

namespace {

// `Number` is the type of the products' operands; sums are in float32. Let w be the weights, k the factors of dropout, and g the
// gradient of k · w. The gradient of a logit is w · (k · g − Σ k · g · w). The sum equals Σ gradient · output of the row.
template <class Number>
class Backward {
 public:
  explicit Backward(const KernelArguments& arguments)
      : arguments_(arguments),
        rank_(arguments.query_gradient ? arguments.rank : 0),
        deep_rank_(round_up(arguments.rank, EVEN<Number>)),
        deep_width_(round_up(arguments.width, EVEN<Number>)),
        padded_(round_up(arguments.keys, STEP)),
        memory_(numbers(arguments)),
        space_(arguments, memory_.take(RowSpace::numbers(arguments))) {
    const int64_t width = arguments.width, rank = arguments.rank;
    keys_across_ = (Number*)memory_.take(padded_ * deep_rank_);
    values_across_ = (Number*)memory_.take(padded_ * deep_width_);
    key_sums_ = memory_.take(padded_ * rank);
    value_sums_ = memory_.take(padded_ * width);
    keys_ = (Number*)memory_.take(padded_ * rank);
    spare_ = memory_.take(KEYS * std::max(deep_rank_, deep_width_));
    query_ = (Number*)memory_.take(QUERIES * deep_rank_);
    query_across_ = (Number*)memory_.take(QUERIES * rank);
    query_sums_ = memory_.take(QUERIES * rank);
    gradient_ = (Number*)memory_.take(QUERIES * deep_width_);
    gradient_across_ = (Number*)memory_.take(QUERIES * width);
    across_ = memory_.take(QUERIES * std::max(rank, width));
    output_row_ = memory_.take(width);
    weights_ = memory_.take(QUERIES * KEYS);
    logits_ = memory_.take(QUERIES * KEYS);
    weight_rows_ = (Number*)weights_;
    weight_pairs_ = (Number*)weights_;
    gradient_pairs_ = gradient_rows_ = (Number*)logits_;
    if (sizeof(Number) == 2) {
      weight_rows_ = (Number*)memory_.take(QUERIES * KEYS / 2);
      gradient_rows_ = (Number*)memory_.take(QUERIES * KEYS / 2);
      weight_pairs_ = (Number*)memory_.take(QUERIES * KEYS / 2);
      gradient_pairs_ = (Number*)memory_.take(QUERIES * KEYS / 2);
    }
    for (int64_t n = 0; n < arguments.outers; ++n) {
      inner_[n] = memory_.take(QUERIES * wide(arguments.outer[n].a));
      outer_[n] = memory_.take(QUERIES * arguments.outer[n].b);
    }
  }

  static int64_t numbers(const KernelArguments& arguments) {
    const int64_t padded = round_up(arguments.keys, STEP), both = arguments.rank + arguments.width;
    int64_t total = RowSpace::numbers(arguments) + padded * (2 * both + arguments.rank + 2) + KEYS * (both + 2) +
                    QUERIES * (4 * arguments.rank + 3 * arguments.width + 4 * KEYS + 4) + arguments.width + 48 * LANES;
    for (int64_t n = 0; n < arguments.outers; ++n)
      total += QUERIES * (wide(arguments.outer[n].a) + arguments.outer[n].b) + 2 * LANES;
    return total;
  }

  void work(const Item& item) {
    for (int64_t batch = item.first_batch; batch < item.last_batch; ++batch) {
      lay_out(item, batch);
      for (int64_t first = item.first_query; first < item.last_query; first += QUERIES)
        tile_of_queries(item, batch, first, std::min(QUERIES, item.last_query - first));
      hand_over(arguments_.value_gradient, value_sums_, arguments_.width, item, batch);
      if (rank_) hand_over(arguments_.key_gradient, key_sums_, rank_, item, batch);
    }
  }

 private:
  static int64_t wide(int64_t size) { return round_up(size, LANES) + LANES; }

  void lay_out(const Item& item, int64_t batch) {
    const int64_t count = keys_of(arguments_, batch), rank = arguments_.rank, width = arguments_.width;
    for (int64_t first = 0; first < count; first += KEYS) {
      const int64_t here = std::min(KEYS, count - first), size = round_up(here, STEP);
      if (rank) {
        lay_transposed(keys_across_ + first * deep_rank_, size, arguments_.key, batch, item.head, first, here, rank, spare_);
        lay_straight(keys_ + first * rank, arguments_.key, batch, item.head, first, here, size, rank, spare_);
      }
      lay_transposed(values_across_ + first * deep_width_, size, arguments_.value, batch, item.head, first, here, width, spare_);
    }
    std::memset(value_sums_, 0, padded_ * width * 4);
    if (rank_) std::memset(key_sums_, 0, padded_ * rank_ * 4);
  }

  // Copies sums for keys or values from tiles (columns, ld) to (parts, B, Lk, H, columns). Keys that no query sees get zeros.
  void hand_over(float* to, const float* sums, int64_t columns, const Item& item, int64_t batch) {
    const int64_t count = keys_of(arguments_, batch), stride = arguments_.heads * columns;
    float* place = to + ((item.part * arguments_.batch + batch) * arguments_.keys * arguments_.heads + item.head) * columns;
    for (int64_t first = 0; first < count; first += KEYS) {
      const int64_t here = std::min(KEYS, count - first), ld = round_up(here, STEP);
      transpose_tile(place + first * stride, stride, sums + first * columns, ld, columns, here);
    }
    for (int64_t key = count; key < arguments_.keys; ++key) std::memset(place + key * stride, 0, columns * 4);
  }

  void tile_of_queries(const Item& item, int64_t batch, int64_t first_query, int64_t rows) {
    const int64_t all_rows = round_up(rows, 8), width = arguments_.width, rank = arguments_.rank;
    const int64_t all_keys = keys_of(arguments_, batch);
    const int64_t end = std::min(all_keys, first_query + rows + arguments_.causal_offset);
    read_queries(item, batch, first_query, rows, all_rows);
    for (const Span& span : Spans(arguments_, batch, first_query, rows, end))
      for (int64_t first = span.first, count; first < span.last; first += count) {
        const int64_t tile = first / KEYS * KEYS, ld = round_up(std::min(KEYS, all_keys - tile), STEP);
        count = std::min(tile + KEYS, span.last) - first;
        const int64_t size = round_up(count, STEP), inside = first - tile, across = inside * EVEN<Number>;
        if (rank)
          multiply(all_rows, size, deep_rank_, query_, deep_rank_, keys_across_ + tile * deep_rank_ + across, ld, weights_, KEYS,
                   false);
        multiply(all_rows, size, deep_width_, gradient_, deep_width_, values_across_ + tile * deep_width_ + across, ld, logits_,
                 KEYS, false);
        for (int64_t row = 0; row < rows; ++row) {
          fetch_ahead(arguments_, batch, item.head, first_query, row, rows, first, span.last);
          row_of_gradients(item, batch, first_query, row, first, count, size);
        }
        lay_pairs(rows, all_rows, size);
        multiply(width, size, all_rows, gradient_across_, QUERIES, weight_pairs_, KEYS, value_sums_ + tile * width + inside, ld,
                 true);
        if (rank_) {
          multiply(rank, size, all_rows, query_across_, QUERIES, gradient_pairs_, KEYS, key_sums_ + tile * rank + inside, ld, true);
          multiply(all_rows, rank, size, gradient_rows_, KEYS, keys_ + first * rank, rank, query_sums_, rank, true);
        }
      }
    for (int64_t row = 0; row < rows; ++row) {
      if (rank_) {
        const int64_t place = (batch * arguments_.queries + first_query + row) * arguments_.heads + item.head;
        std::memcpy(arguments_.query_gradient + place * rank, query_sums_ + row * rank, rank * 4);
      }
      clear_unseen(arguments_, item, batch, first_query + row, seen_of(arguments_, first_query + row, 0, all_keys));
      const int64_t number = number_of_row(arguments_, batch, item.head, first_query + row);
      for (int64_t n = 0; n < arguments_.outers; ++n) {
        const Outer& term = arguments_.outer[n];
        std::memcpy(term.inner_gradient + number * term.a, inner_[n] + row * wide(term.a), term.a * 4);
        std::memcpy(term.outer_gradient + number * term.b, outer_[n] + row * term.b, term.b * 4);
      }
    }
  }

  // Loads the queries of a tile and clears their gradients.
  void read_queries(const Item& item, int64_t batch, int64_t first_query, int64_t rows, int64_t all_rows) {
    const int64_t width = arguments_.width, rank = arguments_.rank;
    if (rank) {
      copy_rows(query_, arguments_.query, batch, item.head, first_query, rows, all_rows, rank, deep_rank_);
      lay_across(query_across_, arguments_.query, batch, item.head, first_query, rows, all_rows, rank);
      std::memset(query_sums_, 0, all_rows * rank * 4);
    }
    copy_rows(gradient_, arguments_.output_gradient, batch, item.head, first_query, rows, all_rows, width, deep_width_);
    lay_across(gradient_across_, arguments_.output_gradient, batch, item.head, first_query, rows, all_rows, width);  // fills `spare_`
    for (int64_t row = 0; row < rows; ++row) {
      of_kind(arguments_.forward_output, batch, item.head, first_query + row, [&](auto* from) { copy_row(output_row_, from, width, width); });
      expected_[row] = dot(spare_ + row * width, output_row_, width);
      if (arguments_.normaliser_gradient)
        expected_[row] -= arguments_.normaliser_gradient[number_of_row(arguments_, batch, item.head, first_query + row)];
    }
    for (int64_t n = 0; n < arguments_.outers; ++n) {
      std::memset(inner_[n], 0, rows * wide(arguments_.outer[n].a) * 4);
      std::memset(outer_[n], 0, rows * arguments_.outer[n].b * 4);
    }
  }

  // Transposes a tile of queries or gradients to (columns, QUERIES), and leaves it in float32 in `spare_`.
  void lay_across(Number* to, const Tensor& tensor, int64_t batch, int64_t head, int64_t first, int64_t rows,
                  int64_t all_rows, int64_t columns) {
    copy_rows(spare_, tensor, batch, head, first, rows, all_rows, columns, columns);
    float* transposed = sizeof(Number) == 4 ? (float*)to : across_;
    transpose_tile(transposed, QUERIES, spare_, columns, all_rows, columns);
    if (sizeof(Number) == 2)
      for (int64_t column = 0; column < columns; ++column)
        copy_row(to + column * QUERIES, transposed + column * QUERIES, all_rows, all_rows);
  }

  // Copies weights and gradients of a tile into the layout of the products, with zeros for the rows that pad it.
  void lay_pairs(int64_t rows, int64_t all_rows, int64_t size) {
    if (sizeof(Number) == 4) {
      std::memset(weights_ + rows * KEYS, 0, (all_rows - rows) * KEYS * 4);
      std::memset(logits_ + rows * KEYS, 0, (all_rows - rows) * KEYS * 4);
      return;
    }
    for (int64_t row = 0; row < all_rows; ++row)
      for (auto [to, from] : {std::pair{weight_rows_, weights_}, std::pair{gradient_rows_, logits_}})
        if (row < rows)
          copy_row(to + row * KEYS, from + row * KEYS, size, size);
        else
          std::memset((void*)(to + row * KEYS), 0, KEYS * sizeof(Number));
    interleave((Bfloat16*)weight_pairs_, (const Bfloat16*)weight_rows_, all_rows, size, KEYS);
    interleave((Bfloat16*)gradient_pairs_, (const Bfloat16*)gradient_rows_, all_rows, size, KEYS);
  }

  // One row of a tile: `weights_` becomes the weights after dropout; `logits_`, which holds g, becomes the gradient of the logits.
  void row_of_gradients(const Item& item, int64_t batch, int64_t first_query, int64_t row, int64_t first, int64_t count,
                        int64_t size) {
    const int64_t query = first_query + row, seen = seen_of(arguments_, query, first, count);
    if (arguments_.outers) read_factors(arguments_, space_, batch, item.head, query);
    float *weights = weights_ + row * KEYS, *gradient = logits_ + row * KEYS;
    const float* logits = logits_of(arguments_, space_, weights, batch, item.head, query, first, seen, size);
    const uint64_t number = number_of_row(arguments_, batch, item.head, query);
    const float normaliser = arguments_.normaliser[number], expected = expected_[row];
    if (arguments_.dropout > 0) {
      const RowOfDropout drawn(arguments_.seed, number, arguments_.dropout);
      const float scale = (float)(1.0 / (1.0 - arguments_.dropout));
      for (int64_t key = 0; key < size; key += LANES) {
        const Floats weight = exponential(load(logits + key) - normaliser), kept = drawn.kept(first + key) * scale;
        store(weights + key, weight * kept);
        store(gradient + key, weight * (kept * load(gradient + key) - expected));
      }
    } else {
      for (int64_t key = 0; key < size; key += LANES) {
        const Floats weight = exponential(load(logits + key) - normaliser);
        store(weights + key, weight);
        store(gradient + key, weight * (load(gradient + key) - expected));
      }
    }
    if (!is_finite(normaliser) || !is_finite(expected))  // hidden keys get no NaN from a row that is NaN
      for (float* numbers : {weights, gradient}) clear_hidden(arguments_, numbers, batch, item.head, query, first, seen, size);
    for (int64_t n = 0; n < arguments_.outers; ++n) {
      const Outer& term = arguments_.outer[n];
      factor_gradients(space_.products, gradient, space_.inner[n], space_.outer[n], term.a, first, seen,
                       inner_[n] + row * wide(term.a), outer_[n] + row * term.b);
    }
    added_gradients(arguments_, gradient, item, batch, query, first, seen);
  }

  const KernelArguments& arguments_;
  const int64_t rank_, deep_rank_, deep_width_, padded_;
  Memory memory_;
  RowSpace space_;
  Number *keys_across_, *values_across_, *keys_, *query_, *query_across_, *gradient_, *gradient_across_;
  Number *weight_rows_, *gradient_rows_, *weight_pairs_, *gradient_pairs_;
  float *key_sums_, *value_sums_, *spare_, *query_sums_, *across_, *output_row_, *weights_, *logits_;
  float *inner_[MOST_OUTERS], *outer_[MOST_OUTERS];
  float expected_[QUERIES];
};

}  // namespace
