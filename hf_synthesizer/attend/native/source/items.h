// How work is divided among threads: by heads, rows of the batch and parts of the queries. No thread waits for another.
#pragma once

#include <atomic>
#include <cstdlib>
#include <new>

#include "rows.h"

namespace {

struct Item {
  int64_t head, first_batch, last_batch, part, first_query, last_query;
};

struct Cut {
  int64_t group, groups, items, tiles, parts;

  explicit Cut(const KernelArguments& arguments) {
    group = arguments.together;
    groups = (arguments.batch + group - 1) / group;
    tiles = (arguments.queries + QUERIES - 1) / QUERIES;
    parts = arguments.parts;
    items = arguments.heads * groups * parts;
  }

  // Items of one head are consecutive, so that the head's table stays in the cache.
  Item item(const KernelArguments& arguments, int64_t number) const {
    const int64_t head = number / (groups * parts), rest = number % (groups * parts);
    const int64_t part = rest / groups, batch = rest % groups * group;
    return {head, batch, std::min(batch + group, arguments.batch), part, part * tiles / parts * QUERIES,
            std::min((part + 1) * tiles / parts * QUERIES, arguments.queries)};
  }
};

// One thread's memory. Each piece starts at a new cache line.
class Memory {
 public:
  explicit Memory(int64_t numbers) {
    size_ = round_up(numbers * 4, 4096) + 4096;
    start_ = (char*)std::aligned_alloc(4096, size_);
    if (!start_) throw std::bad_alloc();
    next_ = start_;
  }
  ~Memory() { std::free(start_); }
  Memory(const Memory&) = delete;

  float* take(int64_t numbers) {
    char* piece = next_;
    next_ += round_up(numbers * 4, 64);
    if (next_ > start_ + size_) throw std::bad_alloc();
    return (float*)piece;
  }

 private:
  char *start_, *next_;
  int64_t size_;
};

struct Shared {
  const KernelArguments* arguments;
  std::atomic<int64_t> next;
  std::atomic<int64_t> failed;
};

// Runs all items on `arguments.threads` threads. A `Worker` has `Worker(arguments)` and `work(item)`.
template <class Worker>
int64_t share(const KernelArguments& arguments) {
  Shared shared{&arguments, {0}, {0}};
  auto thread = [](void* data) {
    Shared& progress = *(Shared*)data;
    try {
      const KernelArguments& arguments = *progress.arguments;
      const Cut cut(arguments);
      int64_t number = progress.next++;
      if (number < cut.items) {
        Worker worker(arguments);
        for (; number < cut.items && !progress.failed; number = progress.next++) worker.work(cut.item(arguments, number));
        library.release(arguments.bfloat16_products);
      }
    } catch (...) {
      progress.failed = 1;
    }
  };
  const int64_t threads = std::min(arguments.threads, Cut(arguments).items);
  if (threads <= 1)
    thread(&shared);
  else
    library.parallel(thread, &shared, (unsigned)threads, 0);
  return shared.failed;
}

}  // namespace
