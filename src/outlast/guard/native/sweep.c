/* The sums that check a matrix product, each matrix read once.
 *
 *   output    dots_i = sum_j A_ij right_j    moments_i = sum_j 4^floor(log2 |A_ij|)
 *   operand   dots_i as above                seconds_i = beta + sum_j A_ij second_j
 *             moments_i = sum_j A_ij^2
 *   gradient  dots_i, moments_i as operand   sums_j = sum_i left_i A_ij
 *             spreads_j = sum_i masses_i A_ij^2, where masses are given
 *
 * Sums run in fp32, over at most `BLOCK` numbers one after the other or 1/16 of a row: a row has 16
 * or 32 accumulators, and column sums are carried over into fp64 after every block of rows. So they are much
 * finer than the products that they check, whose units add hundreds of terms in fp32.
 *
 * Vectors indexed by columns hold `padded` floats (zeros behind the last column).
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { BLOCK = 64 };

typedef struct {
  const void *matrix;
  int64_t type, rows, columns, stride, threads;
  const float *right, *second;   /* (padded) */
  const double *left, *masses;   /* (rows) */
  double beta;
  double *dots, *seconds, *moments, *sums, *spreads;
} sweep;

typedef float lanes __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t shorts __attribute__((vector_size(32)));

static inline int64_t padded(int64_t n) { return (n + 31) / 32 * 32; }

/* Rows come from memory that the processor by itself fetches too late. */
#define AHEAD 2048
#define FETCH(pointer) __builtin_prefetch((const char *)(pointer) + AHEAD)

static inline lanes load(const float *a) {
  lanes x;
  memcpy(&x, a, sizeof x);
  return x;
}

static inline void store(float *a, lanes x) { memcpy(a, &x, sizeof x); }

/* 2^floor(log2 |x|), and 0 for 0 and numbers too small to be normal. */
static inline lanes powers_of(lanes x) { return (lanes)((words)x & 0x7F800000u); }

static inline double total(lanes x) {
  float sum = 0;
  for (int k = 0; k < 16; k++) sum += x[k];
  return sum;
}

static inline lanes from_bfloat16(const uint16_t *a) {
  shorts x;
  memcpy(&x, a, sizeof x);
  return (lanes)(__builtin_convertvector(x, words) << 16);
}

#define STORED float
#define LANES(a) load(a)
#define NAME(x) x##_float32
#include "rows.h"

#define STORED uint16_t
#define LANES(a) from_bfloat16(a)
#define NAME(x) x##_bfloat16
#include "rows.h"

#ifdef __FLT16_MAX__
typedef _Float16 halfs __attribute__((vector_size(32)));

static inline lanes from_float16(const _Float16 *a) {
  halfs x;
  memcpy(&x, a, sizeof x);
  return __builtin_convertvector(x, lanes);
}

#define STORED _Float16
#define LANES(a) from_float16(a)
#define NAME(x) x##_float16
#include "rows.h"
#endif

#ifdef __AVX512BF16__
/* The same passes over bf16 by the processor's bf16 dot products, 32 elements at a time. A factor
 * that is not +-1 is the sum of two bf16 numbers, so that its products stay good to 2^-16. */

#define DOT _mm512_dpbf16_ps
typedef __m512bh pairs;

static inline pairs part(const uint16_t *a, int64_t left) {
  if (left >= 32) return (pairs)_mm512_loadu_si512(a);
  return (pairs)_mm512_maskz_loadu_epi16((__mmask32)((1ull << left) - 1), a);
}

/* values = high + low, both bf16; (2, padded). */
static uint16_t *split(const float *values, int64_t n) {
  uint16_t *high = malloc(2 * (size_t)n * sizeof *high), *low = high + n;
  if (!high) return NULL;
  for (int64_t j = 0; j < n; j++) {
    union { float value; uint32_t bits; } each = {values[j]};
    each.bits += 0x7FFF + (each.bits >> 16 & 1);
    high[j] = (uint16_t)(each.bits >> 16);
    each.bits &= 0xFFFF0000u;
    each.value = values[j] - each.value;
    low[j] = (uint16_t)(each.bits >> 16);
  }
  return high;
}

static void output_pairs(const sweep *s, int64_t first, int64_t last, const uint16_t *right) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  const int64_t n = s->columns;
  for (int64_t i = first; i < last; i++) {
    const uint16_t *a = (const uint16_t *)s->matrix + i * s->stride;
    __m512 dot = _mm512_setzero_ps(), power = dot;
    for (int64_t j = 0; j < n; j += 32) {
      FETCH(a + j);
      pairs x = part(a + j, n - j);
      dot = DOT(dot, x, (pairs)_mm512_loadu_si512(right + j));
      x = (pairs)_mm512_and_si512((__m512i)x, exponent);
      power = DOT(power, x, x);
    }
    s->dots[i] = _mm512_reduce_add_ps(dot);
    s->moments[i] = _mm512_reduce_add_ps(power);
  }
}

static void operand_pairs(const sweep *s, int64_t first, int64_t last, const uint16_t *right,
                          const uint16_t *second) {
  const int64_t n = s->columns;
  const uint16_t *low_part = right + padded(n);
  for (int64_t i = first; i < last; i++) {
    const uint16_t *a = (const uint16_t *)s->matrix + i * s->stride;
    __m512 high = _mm512_setzero_ps(), low = high, other = high, square = high;
    for (int64_t j = 0; j < n; j += 32) {
      FETCH(a + j);
      const pairs x = part(a + j, n - j);
      high = DOT(high, x, (pairs)_mm512_loadu_si512(right + j));
      low = DOT(low, x, (pairs)_mm512_loadu_si512(low_part + j));
      other = DOT(other, x, (pairs)_mm512_loadu_si512(second + j));
      square = DOT(square, x, x);
    }
    s->dots[i] = _mm512_reduce_add_ps(high + low);
    s->seconds[i] = _mm512_reduce_add_ps(other) + s->beta;
    s->moments[i] = _mm512_reduce_add_ps(square);
  }
}

/* `sums`: the even columns, then the odd ones. */
static void gradient_pairs(const sweep *s, int64_t first, int64_t last, const uint16_t *right,
                           float *sums) {
  const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000u);
  const int64_t n = s->columns;
  const uint16_t *low_part = right + padded(n);
  float *even = sums, *odd = sums + padded(n) / 2;
  for (int64_t i = first; i < last; i++) {
    const uint16_t *a = (const uint16_t *)s->matrix + i * s->stride;
    const __m512 left = _mm512_set1_ps((float)s->left[i]);
    __m512 high = _mm512_setzero_ps(), low = high, square = high;
    for (int64_t j = 0; j < n; j += 32) {
      FETCH(a + j);
      const pairs x = part(a + j, n - j);
      const __m512 o = (__m512)_mm512_and_si512((__m512i)x, upper);
      const __m512 e = (__m512)_mm512_slli_epi32((__m512i)x, 16);
      high = DOT(high, x, (pairs)_mm512_loadu_si512(right + j));
      low = DOT(low, x, (pairs)_mm512_loadu_si512(low_part + j));
      square = DOT(square, x, x);
      _mm512_storeu_ps(odd + j / 2, _mm512_fmadd_ps(left, o, _mm512_loadu_ps(odd + j / 2)));
      _mm512_storeu_ps(even + j / 2, _mm512_fmadd_ps(left, e, _mm512_loadu_ps(even + j / 2)));
    }
    s->dots[i] = _mm512_reduce_add_ps(high + low);
    s->moments[i] = _mm512_reduce_add_ps(square);
  }
}
#endif

/* Vectors of bf16 for the passes above; null where those do not serve. */
typedef struct {
  uint16_t *right, *second;
} halves;

static void pass(const sweep *s, int64_t first, int64_t last, halves h, float *sums,
                 float *spreads) {
#ifdef __AVX512BF16__
  if (h.right) {
    if (s->second)
      operand_pairs(s, first, last, h.right, h.second);
    else if (s->left)
      gradient_pairs(s, first, last, h.right, sums);
    else
      output_pairs(s, first, last, h.right);
    return;
  }
#endif
#define PASS(type)                                 \
  if (s->second)                                   \
    operand_##type(s, first, last);                \
  else if (s->left)                                \
    gradient_##type(s, first, last, sums, spreads); \
  else                                             \
    output_##type(s, first, last)
  if (s->type == FLOAT32) {
    PASS(float32);
  } else if (s->type == BFLOAT16) {
    PASS(bfloat16);
  }
#ifdef __FLT16_MAX__
  else {
    PASS(float16);
  }
#endif
}

/* Carry the sums of a block of rows over to fp64, and begin the next with zeros. */
static void flush(int64_t count, float *block, double *carried) {
  for (int64_t j = 0; j < count; j++) carried[j] += block[j];
  memset(block, 0, (size_t)count * sizeof *block);
}

/* 0: done; 1: a type that this build does not know; 2: no memory. */
static int run(const sweep *s) {
  const int64_t width = padded(s->columns), threads = s->threads;
  halves h = {NULL, NULL};
  double *carried = NULL;
#ifndef __FLT16_MAX__
  if (s->type == FLOAT16) return 1;
#endif
#ifdef __AVX512BF16__
  if (s->type == BFLOAT16 && !s->masses) {
    h.right = split(s->right, width);
    h.second = s->second ? split(s->second, width) : NULL;
    if (!h.right || (s->second && !h.second)) return free(h.right), free(h.second), 2;
  }
#endif
  /* For each thread 2 * width doubles of carried sums and as many floats of its block. */
  if (s->left && !(carried = calloc((size_t)(threads * 3 * width), sizeof *carried)))
    return free(h.right), free(h.second), 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t t = 0; t < threads; t++) {
    const int64_t first = s->rows * t / threads, last = s->rows * (t + 1) / threads;
    if (!s->left) {
      pass(s, first, last, h, NULL, NULL);
      continue;
    }
    double *own = carried + t * 3 * width;
    float *block = (float *)(own + 2 * width);
    for (int64_t i = first; i < last; i += BLOCK) {
      pass(s, i, i + BLOCK < last ? i + BLOCK : last, h, block, block + width);
      flush(s->masses ? 2 * width : width, block, own);
    }
  }
  if (s->left)
    for (int64_t j = 0; j < s->columns; j++) {
      const int64_t at = h.right ? j % 2 * (width / 2) + j / 2 : j;
      double sum = 0, spread = 0;
      for (int64_t t = 0; t < threads; t++)
        sum += carried[t * 3 * width + at], spread += carried[(t * 3 + 1) * width + at];
      s->sums[j] = sum;
      if (s->spreads) s->spreads[j] = spread;
    }
  free(h.right), free(h.second), free(carried);
  return 0;
}

/* Whether this build knows a type. */
int outlast_knows(int64_t type) {
#ifndef __FLT16_MAX__
  if (type == FLOAT16) return 0;
#endif
  return type >= FLOAT32 && type <= FLOAT16;
}

/* What a row may differ by, and how the rows of a check did. */
typedef struct {
  double by_power, by_square, by_value, constant, limit;
  double worst, total, widest; /* results: see `judge` */
  int64_t exceeded;
} verdict;

/* Compare what was found with what was expected, row by row.
 *
 *   variance_i = by_power powers_i + by_square squares_i + by_value found_i^2 + constant
 *   exceeded   where difference^2 / variance is not at most the limit; NaN and infinity exceed
 *
 * worst: the largest |difference| / sqrt(variance); total: the sum of its squares over the rows not
 * exceeded; widest: the largest smallest-error-surely-found as a share of sqrt(powers).
 */
static void judge(verdict *v, int64_t rows, const double *found, const double *expected,
                  double offset, const double *powers, const double *squares, uint8_t *flags) {
  double worst = 0, total = 0, widest = 0;
  int unknown = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < rows; i++) {
    const double square = squares ? squares[i] : 0.0;
    const double variance = v->by_power * powers[i] + v->by_square * square +
                            v->by_value * found[i] * found[i] + v->constant;
    const double difference = found[i] - expected[i] - offset;
    /* A row without numbers has nothing to be wrong. */
    const double ratio = variance > 0 || difference != 0 ? difference * difference / variance : 0;
    const int bad = !(ratio <= v->limit) || !isfinite(variance);
    const double width = powers[i] > 0 && !bad ? variance / powers[i] : 0.0;
    flags[i] = (uint8_t)bad;
    count += bad;
    worst = ratio > worst ? ratio : worst;
    unknown |= isnan(ratio);
    total += bad ? 0.0 : ratio;
    widest = width > widest ? width : widest;
  }
  v->exceeded = count, v->worst = unknown ? INFINITY : sqrt(worst), v->total = total;
  v->widest = sqrt(v->limit * widest);
}

/* Y = X W^T + b; X: (rows, inputs), Y: (rows, outputs). */
typedef struct {
  const void *x, *y;
  int64_t type, rows, inputs, outputs, x_stride, y_stride, threads;
  const float *encoded;      /* v W (inputs) */
  const float *input_signs;  /* u (inputs) */
  const float *output_signs; /* v (outputs) */
  double beta, offset;       /* the bias's sign in u, and b v */
  double *projections;       /* result: X u + beta (rows) */
  double *squares;           /* result: |X_i|^2 (rows) */
  uint8_t *flags;            /* result (rows) */
  verdict verdict;
} forward;

int outlast_forward(forward *f) {
  double *scratch = malloc(3 * (size_t)f->rows * sizeof *scratch);
  if (!scratch) return 2;
  double *expected = scratch, *found = scratch + f->rows, *powers = found + f->rows;
  const sweep x = {.matrix = f->x, .type = f->type, .rows = f->rows, .columns = f->inputs,
                   .stride = f->x_stride, .threads = f->threads, .right = f->encoded,
                   .second = f->input_signs, .beta = f->beta, .seconds = f->projections,
                   .dots = expected, .moments = f->squares};
  const sweep y = {.matrix = f->y, .type = f->type, .rows = f->rows, .columns = f->outputs,
                   .stride = f->y_stride, .threads = f->threads, .right = f->output_signs,
                   .dots = found, .moments = powers};
  int problem = run(&x);
  if (!problem) problem = run(&y);
  if (!problem)
    judge(&f->verdict, f->rows, found, expected, f->offset, powers, f->squares, f->flags);
  free(scratch);
  return problem;
}

/* dX = dY W, dW = dY^T X, db = dY^T 1; dY: (rows, outputs). */
typedef struct {
  const void *dy, *dx, *dw, *db; /* dx, dw and db may be null */
  int64_t type, rows, inputs, outputs, dy_stride, dx_stride, dw_stride, threads;
  const float *encoded;          /* W u (outputs) */
  const float *input_signs;      /* u (inputs) */
  const double *projections;     /* X u + beta (rows), from the forward pass */
  const double *squares;         /* |X_i|^2 (rows) */
  double beta;
  uint8_t *dx_flags, *dw_flags;  /* results: (rows), (outputs) */
  verdict dx_verdict, dw_verdict;
} backward;

/* Element j of a vector of a stored type. */
static double element(const void *vector, int64_t type, int64_t j) {
  if (type == FLOAT32) return ((const float *)vector)[j];
#ifdef __FLT16_MAX__
  if (type == FLOAT16) return ((const _Float16 *)vector)[j];
#endif
  union { uint32_t bits; float value; } each = {(uint32_t)((const uint16_t *)vector)[j] << 16};
  return each.value;
}

int outlast_backward(backward *b) {
  const int64_t rows = b->rows, outputs = b->outputs, most = rows > outputs ? rows : outputs;
  double *scratch = malloc((size_t)(3 * rows + 2 * most + 2 * outputs) * sizeof *scratch);
  if (!scratch) return 2;
  double *expected = scratch, *squares = expected + rows, *found = squares + rows;
  double *powers = found + most, *sums = powers + most, *spreads = sums + outputs;
  double *masses = NULL;
  if (b->type == FLOAT32) {
    masses = spreads + outputs;
    for (int64_t i = 0; i < rows; i++)
      masses[i] = b->squares[i] + b->projections[i] * b->projections[i];
  }
  const sweep dy = {.matrix = b->dy, .type = b->type, .rows = rows, .columns = outputs,
                    .stride = b->dy_stride, .threads = b->threads, .right = b->encoded,
                    .left = b->projections, .masses = masses, .dots = expected,
                    .moments = squares, .sums = sums, .spreads = masses ? spreads : NULL};
  int problem = run(&dy);
  if (!problem && b->dx) {
    const sweep dx = {.matrix = b->dx, .type = b->type, .rows = rows, .columns = b->inputs,
                      .stride = b->dx_stride, .threads = b->threads, .right = b->input_signs,
                      .dots = found, .moments = powers};
    problem = run(&dx);
    if (!problem)
      judge(&b->dx_verdict, rows, found, expected, 0.0, powers, squares, b->dx_flags);
  }
  if (!problem && b->dw) {
    const sweep dw = {.matrix = b->dw, .type = b->type, .rows = outputs, .columns = b->inputs,
                      .stride = b->dw_stride, .threads = b->threads, .right = b->input_signs,
                      .dots = found, .moments = powers};
    problem = run(&dw);
    if (b->db)
      for (int64_t j = 0; j < outputs; j++) {
        const double value = element(b->db, b->type, j);
        const double power = value ? exp2(floor(log2(fabs(value)))) : 0.0;
        found[j] += b->beta * value;
        powers[j] += power * power;
      }
    if (!masses) {
      /* Beside a 16-bit type's spacing this is small: all columns together bound each. */
      double all = 0;
      for (int64_t i = 0; i < rows; i++)
        all += squares[i] * (b->squares[i] + b->projections[i] * b->projections[i]);
      for (int64_t j = 0; j < outputs; j++) spreads[j] = all;
    }
    if (!problem) judge(&b->dw_verdict, outputs, found, sums, 0.0, powers, spreads, b->dw_flags);
  }
  free(scratch);
  return problem;
}

/* A weight, summed along both sides once per step. */
typedef struct {
  const void *weight, *bias; /* (outputs, inputs) and (outputs); bias may be null */
  int64_t type, outputs, inputs, stride, threads;
  const float *input_signs, *output_signs;
  float *right, *left;  /* results: W u (outputs, padded), v W (inputs, padded) */
  double rows_largest, columns_largest, offset; /* results; of squared norms; b v */
} encoding;

int outlast_encode(encoding *e) {
  const int64_t m = e->outputs, k = e->inputs;
  double *scratch = malloc((size_t)(4 * m + 2 * k) * sizeof *scratch);
  if (!scratch) return 2;
  double *signs = scratch, *ones = signs + m, *dots = ones + m, *squares = dots + m;
  double *sums = squares + m, *spreads = sums + k;
  for (int64_t i = 0; i < m; i++) signs[i] = e->output_signs[i], ones[i] = 1.0;
  /* 16-bit types need no column by itself: see `outlast_backward`. */
  const int wide = e->type == FLOAT32;
  const sweep both = {.matrix = e->weight, .type = e->type, .rows = m, .columns = k,
                      .stride = e->stride, .threads = e->threads, .right = e->input_signs,
                      .left = signs, .masses = wide ? ones : NULL, .dots = dots,
                      .moments = squares, .sums = sums, .spreads = wide ? spreads : NULL};
  const int problem = run(&both);
  double rows_largest = 0, columns_largest = 0, all = 0, offset = 0;
  for (int64_t i = 0; i < m; i++) {
    e->right[i] = (float)dots[i];
    all += squares[i];
    rows_largest = squares[i] > rows_largest ? squares[i] : rows_largest;
    if (e->bias) offset += signs[i] * element(e->bias, e->type, i);
  }
  for (int64_t j = 0; j < k; j++) {
    e->left[j] = (float)sums[j];
    if (wide && spreads[j] > columns_largest) columns_largest = spreads[j];
  }
  e->rows_largest = rows_largest, e->columns_largest = wide ? columns_largest : all;
  e->offset = offset;
  free(scratch);
  return problem;
}
