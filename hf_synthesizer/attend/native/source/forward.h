// The forward: a tile of logits, their exponentials and the product with the values while the tile is in the cache.
#pragma once

#include "items.h"

namespace {

// `Number` is what the products are made of. A row's largest logit so far is subtracted from it; where a later tile has a
// larger one, what was summed is scaled down.
template <class Number>
class Forward {
 public:
  explicit Forward(const Problem& problem)
      : problem_(problem),
        rank_(round_up(problem.rank, 2)),
        padded_(round_up(problem.keys, STEP)),
        memory_(numbers(problem)),
        space_(problem, memory_.take(RowSpace::numbers(problem))) {
    const int64_t group = Cut(problem).group;
    keys_ = (Number*)memory_.take(group * padded_ * rank_);
    values_ = (Number*)memory_.take(group * padded_ * problem.width);
    spare_ = memory_.take(KEYS * std::max(rank_, problem.width));
    query_ = (Number*)memory_.take(QUERIES * rank_);
    logits_ = memory_.take(QUERIES * KEYS);
    weights_ = sizeof(Number) == 4 ? (Number*)logits_ : (Number*)memory_.take(QUERIES * KEYS / 2);
    summed_ = memory_.take(QUERIES * problem.width);
  }

  static int64_t numbers(const Problem& problem) {
    const int64_t group = Cut(problem).group, rank = round_up(problem.rank, 2);
    return RowSpace::numbers(problem) + group * round_up(problem.keys, STEP) * (rank + problem.width) +
           KEYS * std::max(rank, problem.width) + QUERIES * (rank + 2 * KEYS + problem.width) + 16 * LANES * 8;
  }

  void work(const Item& item) {
    for (int64_t batch = item.first_batch; batch < item.last_batch; ++batch) lay_out(item, batch);
    for (int64_t first = item.first_query; first < item.last_query; first += QUERIES)
      for (int64_t batch = item.first_batch; batch < item.last_batch; ++batch)
        tile_of_queries(item, batch, first, std::min(QUERIES, item.last_query - first));
  }

 private:
  // Keys and values of a row of the batch, as the products read them.
  void lay_out(const Item& item, int64_t batch) {
    const int64_t place = (batch - item.first_batch) * padded_, count = keys_of(problem_, batch);
    for (int64_t first = 0; first < count; first += KEYS) {
      const int64_t here = std::min(KEYS, count - first), size = round_up(here, STEP);
      if (problem_.rank)
        lay_transposed(keys_ + (place + first) * rank_, size, problem_.key, batch, item.head, first, here, problem_.rank,
                       spare_);
      lay_straight(values_ + (place + first) * problem_.width, problem_.value, batch, item.head, first, here, size,
                   problem_.width, spare_);
    }
  }

  void tile_of_queries(const Item& item, int64_t batch, int64_t first_query, int64_t rows) {
    const int64_t all_rows = round_up(rows, 8), width = problem_.width, all_keys = keys_of(problem_, batch);
    const int64_t place = (batch - item.first_batch) * padded_;
    const int64_t end = std::min(all_keys, first_query + rows + problem_.causal_offset);
    if (problem_.rank)
      copy_rows(query_, problem_.query, batch, item.head, first_query, rows, all_rows, problem_.rank, rank_);
    if (all_rows > rows) std::memset((void*)(weights_ + rows * KEYS), 0, (all_rows - rows) * KEYS * sizeof(Number));
    std::memset(summed_, 0, all_rows * width * 4);
    for (int64_t row = 0; row < rows; ++row) {
      largest_[row] = HIDDEN;
      total_[row] = 0.0f;
    }
    for (int64_t first = 0; first < end; first += KEYS) {
      const int64_t here = std::min(KEYS, all_keys - first), ld = round_up(here, STEP);
      const int64_t count = std::min(here, end - first), size = round_up(count, STEP);
      if (problem_.rank)
        multiply(all_rows, size, rank_, query_, rank_, keys_ + (place + first) * rank_, ld, logits_, KEYS, false);
      for (int64_t row = 0; row < rows; ++row) weigh(item, batch, first_query, row, first, count, size);
      multiply(all_rows, width, size, weights_, KEYS, values_ + (place + first) * width, width, summed_, width, true);
    }
    for (int64_t row = 0; row < rows; ++row) finish(item, batch, first_query + row, row);
  }

  // The weights of a row of a tile, up to the factor that makes their sum 1.
  void weigh(const Item& item, int64_t batch, int64_t first_query, int64_t row, int64_t first, int64_t count, int64_t size) {
    const int64_t query = first_query + row;
    if (problem_.outers) read_factors(problem_, space_, batch, item.head, query);
    const float* logits = logits_of(problem_, space_, logits_ + row * KEYS, batch, item.head, query, first,
                                    seen_of(problem_, query, first, count), size);
    Number* weights = weights_ + row * KEYS;
    Floats most = load(logits), other = load(logits + LANES);
    for (int64_t key = 2 * LANES; key < size; key += 2 * LANES) {
      most = larger(load(logits + key), most);
      other = larger(load(logits + key + LANES), other);
    }
    const float before = largest_[row], now = std::max(before, largest(larger(most, other)));
    if (now == HIDDEN) {
      std::memset((void*)weights, 0, size * sizeof(Number));
      return;
    }
    if (before != HIDDEN && before != now) {
      const float scale = exponential(all(before - now))[0];
      total_[row] *= scale;
      float* summed = summed_ + row * problem_.width;
      for (int64_t column = 0; column < problem_.width; ++column) summed[column] *= scale;
    }
    largest_[row] = now;
    Floats total{}, rest{};
    if (problem_.dropout > 0) {
      const RowOfDropout drawn(problem_.seed, number_of_row(problem_, batch, item.head, query), problem_.dropout);
      for (int64_t key = 0; key < size; key += LANES) {
        const Floats weight = exponential(load(logits + key) - now);
        total += weight;
        store(weights + key, weight * drawn.kept(first + key));
      }
    } else {
      for (int64_t key = 0; key < size; key += 2 * LANES) {
        const Floats weight = exponential(load(logits + key) - now), next = exponential(load(logits + key + LANES) - now);
        total += weight;
        rest += next;
        store(weights + key, weight);
        store(weights + key + LANES, next);
      }
    }
    total_[row] += sum(total + rest);
  }

  void finish(const Item& item, int64_t batch, int64_t query, int64_t row) {
    const int64_t width = problem_.width, place = ((batch * problem_.queries + query) * problem_.heads + item.head) * width;
    const bool seen = largest_[row] != HIDDEN;
    const float scale = seen ? 1.0f / (total_[row] * (float)(1.0 - problem_.dropout)) : 0.0f;
    if (problem_.value.kind == FLOAT32)
      add_row((float*)problem_.output + place, summed_ + row * width, scale, width, true);
    else {
      float* summed = summed_ + row * width;
      for (int64_t column = 0; column < width; ++column) summed[column] *= scale;
      copy_row((Bfloat16*)problem_.output + place, summed, width, width);
    }
    if (problem_.normaliser)
      problem_.normaliser[number_of_row(problem_, batch, item.head, query)] =
          seen ? largest_[row] + __builtin_logf(total_[row]) : 0.0f;
  }

  const Problem& problem_;
  const int64_t rank_, padded_;
  Memory memory_;
  RowSpace space_;
  Number *keys_, *values_, *query_, *weights_;
  float *spare_, *logits_, *summed_;
  float largest_[QUERIES], total_[QUERIES];
};

}  // namespace
