// The backward: each tile of weights is made again from the number that normalised its rows, and gives its gradients at once.
#pragma once

#include "gradients.h"
#include "items.h"

namespace {

// Products are of float32 whatever the tensors are. With w the weights, k what dropout does to them and g the gradient of
// (k · w) V: the gradient of a logit is w · (k · g − Σ k · g · w), and the sum is that of gradient times output.
class Backward {
 public:
  explicit Backward(const Problem& problem)
      : problem_(problem),
        rank_(problem.query_gradient ? problem.rank : 0),
        padded_(round_up(problem.keys, STEP)),
        memory_(numbers(problem)),
        space_(problem, memory_.take(RowSpace::numbers(problem))) {
    const int64_t width = problem.width, rank = problem.rank;
    keys_across_ = memory_.take(padded_ * rank);
    values_across_ = memory_.take(padded_ * width);
    key_sums_ = memory_.take(padded_ * rank);
    value_sums_ = memory_.take(padded_ * width);
    keys_ = memory_.take(padded_ * rank);
    spare_ = memory_.take(KEYS * std::max(rank, width));
    query_ = memory_.take(QUERIES * rank);
    query_across_ = memory_.take(QUERIES * rank);
    query_sums_ = memory_.take(QUERIES * rank);
    gradient_ = memory_.take(QUERIES * width);
    gradient_across_ = memory_.take(QUERIES * width);
    made_ = memory_.take(width);
    weights_ = memory_.take(QUERIES * KEYS);
    logits_ = memory_.take(QUERIES * KEYS);
    for (int64_t n = 0; n < problem.outers; ++n) {
      inner_[n] = memory_.take(QUERIES * wide(problem.outer[n].a));
      outer_[n] = memory_.take(QUERIES * problem.outer[n].b);
    }
  }

  static int64_t numbers(const Problem& problem) {
    const int64_t padded = round_up(problem.keys, STEP), both = problem.rank + problem.width;
    int64_t total = RowSpace::numbers(problem) + padded * (2 * both + problem.rank) + KEYS * both +
                    QUERIES * (3 * problem.rank + 2 * problem.width + 2 * KEYS) + problem.width + 32 * LANES;
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
        lay_transposed(keys_across_ + first * rank, size, problem_.key, batch, item.head, first, here, rank, spare_);
        lay_straight(keys_ + first * rank, problem_.key, batch, item.head, first, here, size, rank, spare_);
      }
      lay_transposed(values_across_ + first * width, size, problem_.value, batch, item.head, first, here, width, spare_);
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
      if (rank) multiply(all_rows, size, rank, query_, rank, keys_across_ + first * rank, ld, weights_, KEYS, false);
      multiply(all_rows, size, width, gradient_, width, values_across_ + first * width, ld, logits_, KEYS, false);
      for (int64_t row = 0; row < rows; ++row) row_of_gradients(item, batch, first_query, row, first, count, size);
      std::memset(weights_ + rows * KEYS, 0, (all_rows - rows) * KEYS * 4);
      std::memset(logits_ + rows * KEYS, 0, (all_rows - rows) * KEYS * 4);
      multiply(width, size, all_rows, gradient_across_, QUERIES, weights_, KEYS, value_sums_ + first * width, ld, true);
      if (rank_) {
        multiply(rank, size, all_rows, query_across_, QUERIES, logits_, KEYS, key_sums_ + first * rank, ld, true);
        multiply(all_rows, rank, size, logits_, KEYS, keys_ + first * rank, rank, query_sums_, rank, true);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      if (rank_) {
        const int64_t place = (batch * problem_.queries + first_query + row) * problem_.heads + item.head;
        std::memcpy(problem_.query_gradient + place * rank, query_sums_ + row * rank, rank * 4);
      }
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
    copy_rows(gradient_, problem_.gradient, batch, item.head, first_query, rows, all_rows, width, width);
    transpose_tile(gradient_across_, QUERIES, gradient_, width, all_rows, width);
    if (rank) {
      copy_rows(query_, problem_.query, batch, item.head, first_query, rows, all_rows, rank, rank);
      transpose_tile(query_across_, QUERIES, query_, rank, all_rows, rank);
      std::memset(query_sums_, 0, all_rows * rank * 4);
    }
    for (int64_t row = 0; row < rows; ++row) {
      of_kind(problem_.made, batch, item.head, first_query + row, [&](auto* from) { copy_row(made_, from, width, width); });
      expected_[row] = dot(gradient_ + row * width, made_, width);
    }
    for (int64_t n = 0; n < problem_.outers; ++n) {
      std::memset(inner_[n], 0, rows * wide(problem_.outer[n].a) * 4);
      std::memset(outer_[n], 0, rows * problem_.outer[n].b * 4);
    }
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
    for (int64_t n = 0; n < problem_.outers; ++n) {
      const Outer& term = problem_.outer[n];
      factor_gradients(space_.made, gradient, space_.inner[n], space_.outer[n], term.a, first, seen,
                       inner_[n] + row * wide(term.a), outer_[n] + row * term.b);
    }
    added_gradients(problem_, gradient, item.part, batch, item.head, query, first, seen);
  }

  const Problem& problem_;
  const int64_t rank_, padded_;
  Memory memory_;
  RowSpace space_;
  float *keys_across_, *values_across_, *key_sums_, *value_sums_, *keys_, *spare_, *query_, *query_across_, *query_sums_;
  float *gradient_, *gradient_across_, *made_, *weights_, *logits_, *inner_[MOST_OUTERS], *outer_[MOST_OUTERS];
  float expected_[QUERIES];
};

}  // namespace
