// How a problem is cut among threads: heads, rows of the batch, and parts of the queries; no thread ever waits for another.
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

  explicit Cut(const Problem& problem) {
    group = problem.together;
    groups = (problem.batch + group - 1) / group;
    tiles = (problem.queries + QUERIES - 1) / QUERIES;
    parts = problem.parts;
    items = problem.heads * groups * parts;
  }

  // Items of one head come one after the other, so that its table stays in the cache.
  Item item(const Problem& problem, int64_t number) const {
    const int64_t head = number / (groups * parts), rest = number % (groups * parts);
    const int64_t part = rest / groups, batch = rest % groups * group;
    return {head, batch, std::min(batch + group, problem.batch), part, part * tiles / parts * QUERIES,
            std::min((part + 1) * tiles / parts * QUERIES, problem.queries)};
  }
};

// Memory of one thread, handed out in lines of the cache.
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
    char* made = next_;
    next_ += round_up(numbers * 4, 64);
    if (next_ > start_ + size_) throw std::bad_alloc();
    return (float*)made;
  }

 private:
  char *start_, *next_;
  int64_t size_;
};

struct Shared {
  const Problem* problem;
  std::atomic<int64_t> next;
  std::atomic<int64_t> failed;
};

// Work on all items with as many threads as the problem says. `Worker` has `Worker(problem)` and `work(item)`.
template <class Worker>
int64_t share(const Problem& problem) {
  Shared shared{&problem, {0}, {0}};
  auto thread = [](void* given) {
    Shared& own = *(Shared*)given;
    try {
      const Problem& problem = *own.problem;
      const Cut cut(problem);
      int64_t number = own.next++;
      if (number < cut.items) {
        Worker worker(problem);
        for (; number < cut.items && !own.failed; number = own.next++) worker.work(cut.item(problem, number));
        library.release(problem.bfloat16_products);
      }
    } catch (...) {
      own.failed = 1;
    }
  };
  const int64_t threads = std::min(problem.threads, Cut(problem).items);
  if (threads <= 1)
    thread(&shared);
  else
    library.parallel(thread, &shared, (unsigned)threads, 0);
  return shared.failed;
}

}  // namespace
