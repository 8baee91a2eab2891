// The backward: each tile of weights is made again from the number that normalised its rows, and gives its gradients at once.
#pragma once

#include <utility>

#include "gradients.h"

namespace {

// `Number` is what the products are made of; sums are of float32. With w the weights, k what dropout does to them and g the gradient of
// (k · w) V: the gradient of a logit is w · (k · g − Σ k · g · w), and the sum is that of gradient times output.
template <class Number>
class Backward {
 public:
  explicit Backward(const Problem& problem)
      : problem_(problem),
        rank_(problem.query_gradient ? problem.rank : 0),
        deep_rank_(round_up(problem.rank, EVEN<Number>)),
        deep_width_(round_up(problem.width, EVEN<Number>)),
        padded_(round_up(problem.keys, STEP)),
        memory_(numbers(problem)),
        space_(problem, memory_.take(RowSpace::numbers(problem))) {
    const int64_t width = problem.width, rank = problem.rank;
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
    made_ = memory_.take(width);
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
    for (int64_t n = 0; n < problem.outers; ++n) {
      inner_[n] = memory_.take(QUERIES * wide(problem.outer[n].a));
      outer_[n] = memory_.take(QUERIES * problem.outer[n].b);
    }
  }

  static int64_t numbers(const Problem& problem) {
    const int64_t padded = round_up(problem.keys, STEP), both = problem.rank + problem.width;
    int64_t total = RowSpace::numbers(problem) + padded * (2 * both + problem.rank + 2) + KEYS * (both + 2) +
                    QUERIES * (4 * problem.rank + 3 * problem.width + 4 * KEYS + 4) + problem.width + 48 * LANES;
    for (int64_t n = 0; n < problem.outers; ++n)
      total += QUERIES * (wide(problem.outer[n].a) + problem.outer[n].b) + 2 * LANES;
    return total;
  }

  void work(const Item& item) {
    for (int64_t batch = item.first_batch; batch < item.last_batch; ++batch) {
      lay_out(item, batch);
      for (int64_t first = item.first_query; first < item.last_query; first += QUERIES)
        tile_of_queries(item, batch, first, std::min(QUERIES, item.last_query - first));
      hand_over(problem_.value_gradient, value_sums_, problem_.width, item, batch);
      if (rank_) hand_over(problem_.key_gradient, key_sums_, rank_, item, batch);
    }
  }

 private:
  static int64_t wide(int64_t size) { return round_up(size, LANES) + LANES; }

  void lay_out(const Item& item, int64_t batch) {
    const int64_t count = keys_of(problem_, batch), rank = problem_.rank, width = problem_.width;
    for (int64_t first = 0; first < count; first += KEYS) {
      const int64_t here = std::min(KEYS, count - first), size = round_up(here, STEP);
      if (rank) {
        lay_transposed(keys_across_ + first * deep_rank_, size, problem_.key, batch, item.head, first, here, rank, spare_);
        lay_straight(keys_ + first * rank, problem_.key, batch, item.head, first, here, size, rank, spare_);
      }
      lay_transposed(values_across_ + first * deep_width_, size, problem_.value, batch, item.head, first, here, width, spare_);
    }
    std::memset(value_sums_, 0, padded_ * width * 4);
    if (rank_) std::memset(key_sums_, 0, padded_ * rank_ * 4);
  }

  // Sums of keys or values, tile after tile (columns, ld), to (parts, B, Lk, H, columns); what no query saw has zeros.
  void hand_over(float* to, const float* sums, int64_t columns, const Item& item, int64_t batch) {
    const int64_t count = keys_of(problem_, batch), stride = problem_.heads * columns;
    float* place = to + ((item.part * problem_.batch + batch) * problem_.keys * problem_.heads + item.head) * columns;
    for (int64_t first = 0; first < count; first += KEYS) {
      const int64_t here = std::min(KEYS, count - first), ld = round_up(here, STEP);
      transpose_tile(place + first * stride, stride, sums + first * columns, ld, columns, here);
    }
    for (int64_t key = count; key < problem_.keys; ++key) std::memset(place + key * stride, 0, columns * 4);
  }

  void tile_of_queries(const Item& item, int64_t batch, int64_t first_query, int64_t rows) {
    const int64_t all_rows = round_up(rows, 8), width = problem_.width, rank = problem_.rank;
    const int64_t all_keys = keys_of(problem_, batch);
    const int64_t end = std::min(all_keys, first_query + rows + problem_.causal_offset);
    read_queries(item, batch, first_query, rows, all_rows);
    for (int64_t first = 0; first < end; first += KEYS) {
      const int64_t here = std::min(KEYS, all_keys - first), ld = round_up(here, STEP);
      const int64_t count = std::min(here, end - first), size = round_up(count, STEP);
      if (rank)
        multiply(all_rows, size, deep_rank_, query_, deep_rank_, keys_across_ + first * deep_rank_, ld, weights_, KEYS, false);
      multiply(all_rows, size, deep_width_, gradient_, deep_width_, values_across_ + first * deep_width_, ld, logits_, KEYS,
               false);
      for (int64_t row = 0; row < rows; ++row) {
        fetch_ahead(problem_, batch, item.head, first_query, row, rows, first, end);
        row_of_gradients(item, batch, first_query, row, first, count, size);
      }
      lay_pairs(rows, all_rows, size);
      multiply(width, size, all_rows, gradient_across_, QUERIES, weight_pairs_, KEYS, value_sums_ + first * width, ld, true);
      if (rank_) {
        multiply(rank, size, all_rows, query_across_, QUERIES, gradient_pairs_, KEYS, key_sums_ + first * rank, ld, true);
        multiply(all_rows, rank, size, gradient_rows_, KEYS, keys_ + first * rank, rank, query_sums_, rank, true);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      if (rank_) {
        const int64_t place = (batch * problem_.queries + first_query + row) * problem_.heads + item.head;
        std::memcpy(problem_.query_gradient + place * rank, query_sums_ + row * rank, rank * 4);
      }
      clear_unseen(problem_, item, batch, first_query + row, seen_of(problem_, first_query + row, 0, all_keys));
      const int64_t number = number_of_row(problem_, batch, item.head, first_query + row);
      for (int64_t n = 0; n < problem_.outers; ++n) {
        const Outer& term = problem_.outer[n];
        std::memcpy(term.inner_gradient + number * term.a, inner_[n] + row * wide(term.a), term.a * 4);
        std::memcpy(term.outer_gradient + number * term.b, outer_[n] + row * term.b, term.b * 4);
      }
    }
  }

  // What is needed of the queries of a tile, and room for their gradients.
  void read_queries(const Item& item, int64_t batch, int64_t first_query, int64_t rows, int64_t all_rows) {
    const int64_t width = problem_.width, rank = problem_.rank;
    if (rank) {
      copy_rows(query_, problem_.query, batch, item.head, first_query, rows, all_rows, rank, deep_rank_);
      lay_across(query_across_, problem_.query, batch, item.head, first_query, rows, all_rows, rank);
      std::memset(query_sums_, 0, all_rows * rank * 4);
    }
    copy_rows(gradient_, problem_.output_gradient, batch, item.head, first_query, rows, all_rows, width, deep_width_);
    lay_across(gradient_across_, problem_.output_gradient, batch, item.head, first_query, rows, all_rows, width);  // fills `spare_`
    for (int64_t row = 0; row < rows; ++row) {
      of_kind(problem_.forward_output, batch, item.head, first_query + row, [&](auto* from) { copy_row(made_, from, width, width); });
      expected_[row] = dot(spare_ + row * width, made_, width);
    }
    for (int64_t n = 0; n < problem_.outers; ++n) {
      std::memset(inner_[n], 0, rows * wide(problem_.outer[n].a) * 4);
      std::memset(outer_[n], 0, rows * problem_.outer[n].b * 4);
    }
  }

  // A tile of queries or gradients transposed, (columns, QUERIES), and in float32 as it is in `spare_`.
  void lay_across(Number* to, const Tensor& tensor, int64_t batch, int64_t head, int64_t first, int64_t rows,
                  int64_t all_rows, int64_t columns) {
    copy_rows(spare_, tensor, batch, head, first, rows, all_rows, columns, columns);
    float* made = sizeof(Number) == 4 ? (float*)to : across_;
    transpose_tile(made, QUERIES, spare_, columns, all_rows, columns);
    if (sizeof(Number) == 2)
      for (int64_t column = 0; column < columns; ++column)
        copy_row(to + column * QUERIES, made + column * QUERIES, all_rows, all_rows);
  }

  // Weights and gradients of a tile as the products read them, with zeros for the rows that fill it up.
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

  // One row of a tile: `weights_` becomes weights after dropout, and `logits_`, which holds g, the gradient of the logits.
  void row_of_gradients(const Item& item, int64_t batch, int64_t first_query, int64_t row, int64_t first, int64_t count,
                        int64_t size) {
    const int64_t query = first_query + row, seen = seen_of(problem_, query, first, count);
    if (problem_.outers) read_factors(problem_, space_, batch, item.head, query);
    float *weights = weights_ + row * KEYS, *gradient = logits_ + row * KEYS;
    const float* logits = logits_of(problem_, space_, weights, batch, item.head, query, first, seen, size);
    const uint64_t number = number_of_row(problem_, batch, item.head, query);
    const float normaliser = problem_.normaliser[number], expected = expected_[row];
    if (problem_.dropout > 0) {
      const RowOfDropout drawn(problem_.seed, number, problem_.dropout);
      const float scale = (float)(1.0 / (1.0 - problem_.dropout));
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
    if (!is_finite(normaliser) || !is_finite(expected))  // what is hidden has no part in a row that is NaN
      for (float* numbers : {weights, gradient}) clear_hidden(problem_, numbers, batch, item.head, query, first, seen, size);
    for (int64_t n = 0; n < problem_.outers; ++n) {
      const Outer& term = problem_.outer[n];
      factor_gradients(space_.made, gradient, space_.inner[n], space_.outer[n], term.a, first, seen,
                       inner_[n] + row * wide(term.a), outer_[n] + row * term.b);
    }
    added_gradients(problem_, gradient, item, batch, query, first, seen);
  }

  const Problem& problem_;
  const int64_t rank_, deep_rank_, deep_width_, padded_;
  Memory memory_;
  RowSpace space_;
  Number *keys_across_, *values_across_, *keys_, *query_, *query_across_, *gradient_, *gradient_across_;
  Number *weight_rows_, *gradient_rows_, *weight_pairs_, *gradient_pairs_;
  float *key_sums_, *value_sums_, *spare_, *query_sums_, *across_, *made_, *weights_, *logits_;
  float *inner_[MOST_OUTERS], *outer_[MOST_OUTERS];
  float expected_[QUERIES];
};

}  // namespace
