// The forward: a tile of logits, their exponentials and the product with the values while the tile is in the cache.
#pragma once

#include "items.h"

namespace {

// `Number` is the type of the products' operands. Each row subtracts its largest logit so far. If a later tile has a larger one,
// the sums so far are scaled down. If all rows of the batch share their weights (`shared`), the weights are computed once and
// multiplied with the values of many rows side by side. With a `factor` for each key, the values are multiplied by the factor, and
// the output is divided by Σ weight · factor.
template <class Number>
class Forward {
 public:
  explicit Forward(const KernelArguments& arguments)
      : arguments_(arguments),
        rank_(round_up(arguments.rank, EVEN<Number>)),
        padded_(round_up(arguments.keys, STEP)),
        memory_(numbers(arguments)),
        space_(arguments, memory_.take(RowSpace::numbers(arguments))) {
    const int64_t group = arguments.together, columns = most_columns(arguments);
    keys_ = (Number*)memory_.take((arguments.shared ? 1 : group) * padded_ * rank_);
    values_ = (Number*)memory_.take((arguments.shared ? 1 : group) * padded_ * columns);
    spare_ = memory_.take(KEYS * std::max(rank_, columns));
    query_ = (Number*)memory_.take(QUERIES * rank_);
    logits_ = memory_.take(QUERIES * KEYS);
    weights_ = sizeof(Number) == 4 ? (Number*)logits_ : (Number*)memory_.take(QUERIES * KEYS / 2);
    summed_ = memory_.take(QUERIES * columns);
    if (arguments.factor.data) {
      factors_ = memory_.take(group * padded_);
      totals_ = memory_.take(group * QUERIES);
    }
  }

  static int64_t numbers(const KernelArguments& arguments) {
    const int64_t rank = round_up(arguments.rank, 2), columns = most_columns(arguments);
    return RowSpace::numbers(arguments) +
           (arguments.shared ? 1 : arguments.together) * round_up(arguments.keys, STEP) * (rank + columns) +
           KEYS * std::max(rank, columns) + QUERIES * (rank + 2 * KEYS + columns) +
           arguments.together * (round_up(arguments.keys, STEP) + QUERIES) + 16 * LANES * 8;
  }

  // Columns of the values: of one row of the batch, or of all rows that share their weights.
  static int64_t most_columns(const KernelArguments& arguments) {
    return arguments.width * (arguments.shared ? arguments.together : 1);
  }

  void work(const Item& item) {
    columns_ = arguments_.width * (arguments_.shared ? item.last_batch - item.first_batch : 1);
    const int64_t last_batch = arguments_.shared ? item.first_batch + 1 : item.last_batch;
    for (int64_t batch = item.first_batch; batch < last_batch; ++batch) lay_out(item, batch);
    for (int64_t first = item.first_query; first < item.last_query; first += QUERIES)
      for (int64_t batch = item.first_batch; batch < last_batch; ++batch)
        tile_of_queries(item, batch, first, std::min(QUERIES, item.last_query - first));
  }

 private:
  // Copies keys and values of a row of the batch into the layout of the products.
  void lay_out(const Item& item, int64_t batch) {
    const int64_t place = (batch - item.first_batch) * padded_, count = keys_of(arguments_, batch);
    for (int64_t first = 0; first < count; first += KEYS) {
      const int64_t here = std::min(KEYS, count - first), size = round_up(here, STEP);
      if (arguments_.rank)
        lay_transposed(keys_ + (place + first) * rank_, size, arguments_.key, batch, item.head, first, here, arguments_.rank,
                       spare_);
      Number* values = values_ + (place + first) * columns_;
      if (arguments_.shared)
        lay_side_by_side(values, item, first, here, size);
      else
        lay_straight(values, arguments_.value, batch, item.head, first, here, size, columns_, spare_);
    }
  }

  // Values of all rows of an item for some keys, times each key's factor.
  void lay_side_by_side(Number* to, const Item& item, int64_t first, int64_t count, int64_t size) {
    Number* lines = sizeof(Number) == 4 ? to : (Number*)spare_;
    for (int64_t key = 0; key < size; ++key) {
      Number* line = lines + key * columns_;
      for (int64_t batch = item.first_batch; batch < item.last_batch; ++batch, line += arguments_.width) {
        float factor = 0.0f;
        if (arguments_.factor.data) {
          if (key < count) factor = at<float>(arguments_.factor, batch, item.head, 0)[first + key];
          factors_[(batch - item.first_batch) * padded_ + first + key] = factor;
        }
        if (key >= count) {
          std::memset((void*)line, 0, arguments_.width * sizeof(Number));
          continue;
        }
        of_kind(arguments_.value, batch, item.head, first + key,
                [&](auto* from) { copy_row(line, from, arguments_.width, arguments_.width); });
        if (arguments_.factor.data) scale_row(line, factor, arguments_.width);
      }
    }
    if (sizeof(Number) == 2) interleave((Bfloat16*)to, (const Bfloat16*)lines, size, columns_, columns_);
  }

  void tile_of_queries(const Item& item, int64_t batch, int64_t first_query, int64_t rows) {
    const int64_t all_rows = round_up(rows, 8), width = columns_, all_keys = keys_of(arguments_, batch);
    const int64_t place = (batch - item.first_batch) * padded_;
    const int64_t end = std::min(all_keys, first_query + rows + arguments_.causal_offset);
    if (arguments_.rank)
      copy_rows(query_, arguments_.query, batch, item.head, first_query, rows, all_rows, arguments_.rank, rank_);
    if (all_rows > rows) std::memset((void*)(weights_ + rows * KEYS), 0, (all_rows - rows) * KEYS * sizeof(Number));
    std::memset(summed_, 0, all_rows * width * 4);
    for (int64_t row = 0; row < rows; ++row) {
      largest_[row] = HIDDEN;
      total_[row] = 0.0f;
    }
    if (arguments_.factor.data) std::memset(totals_, 0, arguments_.together * QUERIES * 4);
    for (const Span& span : Spans(arguments_, batch, first_query, rows, end))
      for (int64_t first = span.first, count; first < span.last; first += count) {
        const int64_t tile = first / KEYS * KEYS, ld = round_up(std::min(KEYS, all_keys - tile), STEP);
        count = std::min(tile + KEYS, span.last) - first;
        const int64_t size = round_up(count, STEP);
        const Number* keys = keys_ + (place + tile) * rank_ + (first - tile) * EVEN<Number>;
        if (arguments_.rank) multiply(all_rows, size, rank_, query_, rank_, keys, ld, logits_, KEYS, false);
        for (int64_t row = 0; row < rows; ++row) {
          fetch_ahead(arguments_, batch, item.head, first_query, row, rows, first, span.last);
          weigh(item, batch, first_query, row, first, count, size);
        }
        multiply(all_rows, width, size, weights_, KEYS, values_ + (place + first) * width, width, summed_, width, true);
      }
    for (int64_t row = 0; row < rows; ++row)
      if (arguments_.shared)
        for (int64_t each = item.first_batch; each < item.last_batch; ++each)
          finish(item, each, first_query + row, row, summed_ + row * columns_ + (each - item.first_batch) * arguments_.width);
      else
        finish(item, batch, first_query + row, row, summed_ + row * columns_);
  }

  // The weights of one row of a tile, before they are normalised.
  void weigh(const Item& item, int64_t batch, int64_t first_query, int64_t row, int64_t first, int64_t count, int64_t size) {
    const int64_t query = first_query + row;
    if (arguments_.outers) read_factors(arguments_, space_, batch, item.head, query);
    const float* logits = logits_of(arguments_, space_, logits_ + row * KEYS, batch, item.head, query, first,
                                    seen_of(arguments_, query, first, count), size);
    Number* weights = weights_ + row * KEYS;
    Floats most = load(logits), other = load(logits + LANES);
    for (int64_t key = 2 * LANES; key < size; key += 2 * LANES) {
      most = larger(load(logits + key), most);
      other = larger(load(logits + key + LANES), other);
    }
    const float before = largest_[row], now = std::max(before, largest(larger(most, other)));
    if (now == HIDDEN) {  // no visible key so far, or only NaN, which is larger than no number
      if (has_nan(logits, size)) spoil(row);
      std::memset((void*)weights, 0, size * sizeof(Number));
      return;
    }
    if (before != HIDDEN && before != now) {
      const float scale = exponential(all(before - now))[0];
      total_[row] *= scale;
      scale_row(summed_ + row * columns_, scale, columns_);
      if (arguments_.factor.data) scale_row(totals_ + row * arguments_.together, scale, arguments_.together);
    }
    largest_[row] = now;
    Floats total{}, rest{};
    if (arguments_.dropout > 0) {
      const RowOfDropout drawn(arguments_.seed, number_of_row(arguments_, batch, item.head, query), arguments_.dropout);
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
    if (arguments_.factor.data)
      for (int64_t each = item.first_batch; each < item.last_batch; ++each)
        totals_[row * arguments_.together + each - item.first_batch] +=
            dot(factors_ + (each - item.first_batch) * padded_ + first, weights, size);
  }

  // Sets a row's output to NaN: one of its weights is NaN.
  void spoil(int64_t row) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    total_[row] = nan;
    if (arguments_.factor.data)
      for (int64_t each = 0; each < arguments_.together; ++each) totals_[row * arguments_.together + each] = nan;
  }

  void finish(const Item& item, int64_t batch, int64_t query, int64_t row, float* summed) {
    const int64_t width = arguments_.width, place = ((batch * arguments_.queries + query) * arguments_.heads + item.head) * width;
    const float total = arguments_.factor.data ? totals_[row * arguments_.together + batch - item.first_batch]
                                             : total_[row] * (float)(1.0 - arguments_.dropout);
    const bool seen = total != 0.0f;
    scale_row(summed, seen ? 1.0f / total : 0.0f, width);
    if (arguments_.value.kind == FLOAT32)
      std::memcpy((float*)arguments_.output + place, summed, width * 4);
    else
      copy_row((Bfloat16*)arguments_.output + place, summed, width, width);
    if (arguments_.normaliser)
      arguments_.normaliser[number_of_row(arguments_, batch, item.head, query)] =
          seen ? largest_[row] + __builtin_logf(total_[row]) : 0.0f;
  }

  const KernelArguments& arguments_;
  const int64_t rank_, padded_;
  int64_t columns_ = 0;
  Memory memory_;
  RowSpace space_;
  Number *keys_, *values_, *query_, *weights_;
  float *spare_, *logits_, *summed_, *factors_ = nullptr, *totals_ = nullptr;
  float largest_[QUERIES], total_[QUERIES];
};

}  // namespace
