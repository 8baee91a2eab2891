// Matrix products by PyTorch's brgemm (oneDNN), and the copies that lay out their operands.
#pragma once

#include <algorithm>

#include "arguments.h"
#include "vectors.h"

namespace {

constexpr int64_t QUERIES = 64;  // of a tile
constexpr int64_t KEYS = 512;    // of a tile, at most
constexpr int64_t AHEAD = 4;     // rows by which the prefetch of tables is ahead
constexpr int64_t STEP = 32;     // tiles have a multiple of so many keys: brgemm compiles a kernel for each shape

typedef void (*FloatProduct)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const float*, const float*,
                             float*, bool);
typedef void (*Bfloat16Product)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const Bfloat16*,
                                const Bfloat16*, float*, bool);
typedef void (*Release)(bool);
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

struct Library {
  FloatProduct float_product;
  Bfloat16Product bfloat16_product;
  Release release;
  Parallel parallel;
};

Library library;

// C (M, N) = A (M, K) · B (K, N), or added to C. B of bfloat16 has pairs of rows interleaved: (K/2, N, 2).
inline void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                     int64_t ldc, bool add) {
  library.float_product(m, n, k, lda, ldb, ldc, add, a, b, c, false);
}

inline void multiply(int64_t m, int64_t n, int64_t k, const Bfloat16* a, int64_t lda, const Bfloat16* b, int64_t ldb,
                     float* c, int64_t ldc, bool add) {
  library.bfloat16_product(m, n, k, lda, ldb, ldc, add, a, b, c, true);
}

// bfloat16 products read pairs of rows.
template <class Number>
constexpr int64_t EVEN = 4 / sizeof(Number);

inline int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

template <class Source>
inline const Source* at(const Tensor& tensor, int64_t batch, int64_t head, int64_t row) {
  return (const Source*)tensor.data + batch * tensor.batch + head * tensor.head + row * tensor.row;
}

// Calls `each(pointer)` with a row's pointer, typed by the tensor's kind.
template <class Each>
inline void of_kind(const Tensor& tensor, int64_t batch, int64_t head, int64_t row, Each each) {
  if (tensor.kind == FLOAT32)
    each(at<float>(tensor, batch, head, row));
  else
    each(at<Bfloat16>(tensor, batch, head, row));
}

// Copies a row of `count` numbers and fills it with zeros up to `size`.
template <class Source, class Target>
inline void copy_row(Target* to, const Source* from, int64_t count, int64_t size) {
  int64_t column = 0;
  for (; column + LANES <= count; column += LANES) store(to + column, load(from + column));
  for (; column < count; ++column) put(to + column, number(from[column]));
  for (; column < size; ++column) put(to + column, 0.0f);
}

template <class Number>
inline void scale_row(Number* row, float factor, int64_t count) {
  int64_t column = 0;
  for (; column + LANES <= count; column += LANES) store(row + column, load(row + column) * factor);
  for (; column < count; ++column) put(row + column, number(row[column]) * factor);
}

template <class Source>
inline float dot(const float* a, const Source* b, int64_t count) {
  Floats total{};
  int64_t column = 0;
  for (; column + LANES <= count; column += LANES) total += load(a + column) * load(b + column);
  float total_sum = sum(total);
  for (; column < count; ++column) total_sum += a[column] * number(b[column]);
  return total_sum;
}

// Rows first … first + count of a tensor, `columns` wide, as (rows, size), with zeros beyond.
template <class Target>
inline void copy_rows(Target* to, const Tensor& tensor, int64_t batch, int64_t head, int64_t first, int64_t count,
                      int64_t rows, int64_t columns, int64_t size) {
  for (int64_t row = 0; row < rows; ++row)
    if (row < count)
      of_kind(tensor, batch, head, first + row, [&](auto* from) { copy_row(to + row * size, from, columns, size); });
    else
      std::memset(to + row * size, 0, size * sizeof(Target));
}

// Transposed: (columns, ld), where `rows` ≤ ld are written.
inline void transpose_tile(float* to, int64_t ld, const float* from, int64_t from_ld, int64_t rows, int64_t columns) {
  typedef float Four __attribute__((vector_size(16)));
  typedef int32_t Places __attribute__((vector_size(16)));
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    int64_t column = 0;
    for (; column + 4 <= columns; column += 4) {
      Four a, b, c, d;
      const float* corner = from + row * from_ld + column;
      std::memcpy(&a, corner, 16);
      std::memcpy(&b, corner + from_ld, 16);
      std::memcpy(&c, corner + 2 * from_ld, 16);
      std::memcpy(&d, corner + 3 * from_ld, 16);
      const Four ab = __builtin_shuffle(a, b, Places{0, 4, 1, 5}), cd = __builtin_shuffle(c, d, Places{0, 4, 1, 5});
      const Four ef = __builtin_shuffle(a, b, Places{2, 6, 3, 7}), gh = __builtin_shuffle(c, d, Places{2, 6, 3, 7});
      const Four lines[4] = {__builtin_shuffle(ab, cd, Places{0, 1, 4, 5}), __builtin_shuffle(ab, cd, Places{2, 3, 6, 7}),
                             __builtin_shuffle(ef, gh, Places{0, 1, 4, 5}), __builtin_shuffle(ef, gh, Places{2, 3, 6, 7})};
      for (int64_t line = 0; line < 4; ++line) std::memcpy(to + (column + line) * ld + row, &lines[line], 16);
    }
    for (; column < columns; ++column)
      for (int64_t next = row; next < row + 4; ++next) to[column * ld + next] = from[next * from_ld + column];
  }
  for (; row < rows; ++row)
    for (int64_t column = 0; column < columns; ++column) to[column * ld + row] = from[row * from_ld + column];
}

// Lays out a tile of keys or values as the right operand of a product that sums over their columns: (columns, ld) with zeros for the
// keys beyond `count`. `spare` holds (ld, columns) numbers.
inline void lay_transposed(float* to, int64_t ld, const Tensor& tensor, int64_t batch, int64_t head, int64_t first,
                           int64_t count, int64_t columns, float* spare) {
  copy_rows(spare, tensor, batch, head, first, count, ld, columns, columns);
  transpose_tile(to, ld, spare, columns, ld, columns);
}

// The same for bfloat16: a pair of columns is one number of 32 bits, (columns / 2, ld, 2).
inline void lay_transposed(Bfloat16* to, int64_t ld, const Tensor& tensor, int64_t batch, int64_t head, int64_t first,
                           int64_t count, int64_t columns, float* spare) {
  const int64_t pairs = (columns + 1) / 2;
  copy_rows((Bfloat16*)spare, tensor, batch, head, first, count, ld, columns, 2 * pairs);
  transpose_tile((float*)to, ld, spare, pairs, ld, pairs);
}

// Lays out a tile of keys or values as the right operand of a product that sums over the keys: (rows, columns), rows ≥ count.
inline void lay_straight(float* to, const Tensor& tensor, int64_t batch, int64_t head, int64_t first, int64_t count,
                         int64_t rows, int64_t columns, float*) {
  copy_rows(to, tensor, batch, head, first, count, rows, columns, columns);
}

// Pairs of rows interleaved: (rows, columns) to (rows / 2, columns, 2), each line `ld` long.
inline void interleave(Bfloat16* to, const Bfloat16* from, int64_t rows, int64_t columns, int64_t ld) {
  for (int64_t row = 0; row < rows; row += 2) {
    const Bfloat16 *even = from + row * ld, *odd = even + ld;
    uint32_t* pairs = (uint32_t*)(to + row * ld);
    for (int64_t column = 0; column < columns; ++column) pairs[column] = even[column] | (uint32_t)odd[column] << 16;
  }
}

// The same for bfloat16: pairs of keys are interleaved.
inline void lay_straight(Bfloat16* to, const Tensor& tensor, int64_t batch, int64_t head, int64_t first, int64_t count,
                         int64_t rows, int64_t columns, float* spare) {
  Bfloat16* lines = (Bfloat16*)spare;
  copy_rows(lines, tensor, batch, head, first, count, rows, columns, columns);
  interleave(to, lines, rows, columns, columns);
}

}  // namespace
