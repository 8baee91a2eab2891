// The forward: a tile of logits, their exponentials and the product with the values while the tile is in the cache.
#pragma once

#include "items.h"

namespace {

// `Number` is what the products are made of. A row's largest logit so far is subtracted from it; where a later tile has a
// larger one, what was summed is scaled down. Where the weights are the same for all rows of the batch (`shared`), they are
// made once and multiplied with the values of many rows side by side; where each row of the batch has a factor for each key,
// it multiplies its values, and its sum with the weights is what they are divided by.
template <class Number>
class Forward {
 public:
  explicit Forward(const Problem& problem)
      : problem_(problem),
        rank_(round_up(problem.rank, EVEN<Number>)),
        padded_(round_up(problem.keys, STEP)),
        memory_(numbers(problem)),
        space_(problem, memory_.take(RowSpace::numbers(problem))) {
    const int64_t group = problem.together, columns = most_columns(problem);
    keys_ = (Number*)memory_.take((problem.shared ? 1 : group) * padded_ * rank_);
    values_ = (Number*)memory_.take((problem.shared ? 1 : group) * padded_ * columns);
    spare_ = memory_.take(KEYS * std::max(rank_, columns));
    query_ = (Number*)memory_.take(QUERIES * rank_);
    logits_ = memory_.take(QUERIES * KEYS);
    weights_ = sizeof(Number) == 4 ? (Number*)logits_ : (Number*)memory_.take(QUERIES * KEYS / 2);
    summed_ = memory_.take(QUERIES * columns);
    if (problem.factor.data) {
      factors_ = memory_.take(group * padded_);
      totals_ = memory_.take(group * QUERIES);
    }
  }

  static int64_t numbers(const Problem& problem) {
    const int64_t rank = round_up(problem.rank, 2), columns = most_columns(problem);
    return RowSpace::numbers(problem) +
           (problem.shared ? 1 : problem.together) * round_up(problem.keys, STEP) * (rank + columns) +
           KEYS * std::max(rank, columns) + QUERIES * (rank + 2 * KEYS + columns) +
           problem.together * (round_up(problem.keys, STEP) + QUERIES) + 16 * LANES * 8;
  }

  // Of the values of one row of the batch, or of all that share their weights.
  static int64_t most_columns(const Problem& problem) {
    return problem.width * (problem.shared ? problem.together : 1);
  }

  void work(const Item& item) {
    columns_ = problem_.width * (problem_.shared ? item.last_batch - item.first_batch : 1);
    const int64_t last_batch = problem_.shared ? item.first_batch + 1 : item.last_batch;
    for (int64_t batch = item.first_batch; batch < last_batch; ++batch) lay_out(item, batch);
    for (int64_t first = item.first_query; first < item.last_query; first += QUERIES)
      for (int64_t batch = item.first_batch; batch < last_batch; ++batch)
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
      Number* values = values_ + (place + first) * columns_;
      if (problem_.shared)
        lay_side_by_side(values, item, first, here, size);
      else
        lay_straight(values, problem_.value, batch, item.head, first, here, size, columns_, spare_);
    }
  }

  // The values of all rows of an item for some keys, times the factor of each key.
  void lay_side_by_side(Number* to, const Item& item, int64_t first, int64_t count, int64_t size) {
    Number* lines = sizeof(Number) == 4 ? to : (Number*)spare_;
    for (int64_t key = 0; key < size; ++key) {
      Number* line = lines + key * columns_;
      for (int64_t batch = item.first_batch; batch < item.last_batch; ++batch, line += problem_.width) {
        float factor = 0.0f;
        if (problem_.factor.data) {
          if (key < count) factor = at<float>(problem_.factor, batch, item.head, 0)[first + key];
          factors_[(batch - item.first_batch) * padded_ + first + key] = factor;
        }
        if (key >= count) {
          std::memset((void*)line, 0, problem_.width * sizeof(Number));
          continue;
        }
        of_kind(problem_.value, batch, item.head, first + key,
                [&](auto* from) { copy_row(line, from, problem_.width, problem_.width); });
        if (problem_.factor.data) scale_row(line, factor, problem_.width);
      }
    }
    if (sizeof(Number) == 2) interleave((Bfloat16*)to, (const Bfloat16*)lines, size, columns_, columns_);
  }

  void tile_of_queries(const Item& item, int64_t batch, int64_t first_query, int64_t rows) {
    const int64_t all_rows = round_up(rows, 8), width = columns_, all_keys = keys_of(problem_, batch);
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
    if (problem_.factor.data) std::memset(totals_, 0, problem_.together * QUERIES * 4);
    for (int64_t first = 0; first < end; first += KEYS) {
      const int64_t here = std::min(KEYS, all_keys - first), ld = round_up(here, STEP);
      const int64_t count = std::min(here, end - first), size = round_up(count, STEP);
      if (problem_.rank)
        multiply(all_rows, size, rank_, query_, rank_, keys_ + (place + first) * rank_, ld, logits_, KEYS, false);
      for (int64_t row = 0; row < rows; ++row) {
        fetch_ahead(problem_, batch, item.head, first_query, row, rows, first, end);
        weigh(item, batch, first_query, row, first, count, size);
      }
      multiply(all_rows, width, size, weights_, KEYS, values_ + (place + first) * width, width, summed_, width, true);
    }
    for (int64_t row = 0; row < rows; ++row)
      if (problem_.shared)
        for (int64_t each = item.first_batch; each < item.last_batch; ++each)
          finish(item, each, first_query + row, row, summed_ + row * columns_ + (each - item.first_batch) * problem_.width);
      else
        finish(item, batch, first_query + row, row, summed_ + row * columns_);
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
    if (now == HIDDEN) {  // nothing is seen so far, or nothing but NaN, which is larger than no number
      if (has_nan(logits, size)) spoil(row);
      std::memset((void*)weights, 0, size * sizeof(Number));
      return;
    }
    if (before != HIDDEN && before != now) {
      const float scale = exponential(all(before - now))[0];
      total_[row] *= scale;
      scale_row(summed_ + row * columns_, scale, columns_);
      if (problem_.factor.data) scale_row(totals_ + row * problem_.together, scale, problem_.together);
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
    if (problem_.factor.data)
      for (int64_t each = item.first_batch; each < item.last_batch; ++each)
        totals_[row * problem_.together + each - item.first_batch] +=
            dot(factors_ + (each - item.first_batch) * padded_ + first, weights, size);
  }

  // Makes the output of a row NaN, as the sum of weights of which one is NaN.
  void spoil(int64_t row) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    total_[row] = nan;
    if (problem_.factor.data)
      for (int64_t each = 0; each < problem_.together; ++each) totals_[row * problem_.together + each] = nan;
  }

  void finish(const Item& item, int64_t batch, int64_t query, int64_t row, float* summed) {
    const int64_t width = problem_.width, place = ((batch * problem_.queries + query) * problem_.heads + item.head) * width;
    const float total = problem_.factor.data ? totals_[row * problem_.together + batch - item.first_batch]
                                             : total_[row] * (float)(1.0 - problem_.dropout);
    const bool seen = total != 0.0f;
    scale_row(summed, seen ? 1.0f / total : 0.0f, width);
    if (problem_.value.kind == FLOAT32)
      std::memcpy((float*)problem_.output + place, summed, width * 4);
    else
      copy_row((Bfloat16*)problem_.output + place, summed, width, width);
    if (problem_.normaliser)
      problem_.normaliser[number_of_row(problem_, batch, item.head, query)] =
          seen ? largest_[row] + __builtin_logf(total_[row]) : 0.0f;
  }

  const Problem& problem_;
  const int64_t rank_, padded_;
  int64_t columns_ = 0;
  Memory memory_;
  RowSpace space_;
  Number *keys_, *values_, *query_, *weights_;
  float *spare_, *logits_, *summed_, *factors_ = nullptr, *totals_ = nullptr;
  float largest_[QUERIES], total_[QUERIES];
};

}  // namespace
