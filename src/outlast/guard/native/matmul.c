/* The check of one batched matrix product C = alpha A B + beta D, as it stands in memory:
 *
 *   C v = alpha A (B v) + beta D v    for signs v, per row of C
 *
 * Sums run in fp32, over at most `BLOCK` numbers one after the other, and are carried over in fp64.
 */
#include "sweep.c"

typedef struct {
  const void *data;
  int64_t columns, row_stride, column_stride;
  const float *right, *weights; /* (columns, padded); weights may be null */
  int powers;
  double *dots, *moments;       /* results (rows) */
} view;

#define STORED float
#define LANES(a) load(a)
#define NAME(x) x##_float32
#include "view.h"

#define STORED uint16_t
#define LANES(a) from_bfloat16(a)
#define NAME(x) x##_bfloat16
#include "view.h"

#ifdef __FLT16_MAX__
#define STORED _Float16
#define LANES(a) from_float16(a)
#define NAME(x) x##_float16
#include "view.h"
#endif

static void look(int64_t type, const view *v, int64_t first, int64_t last) {
#define LOOK(type)                             \
  if (v->column_stride == 1)                   \
    view_rows_##type(v, first, last);          \
  else                                         \
    view_columns_##type(v, first, last)
  if (type == FLOAT32) {
    LOOK(float32);
  } else if (type == BFLOAT16) {
    LOOK(bfloat16);
  }
#ifdef __FLT16_MAX__
  else {
    LOOK(float16);
  }
#endif
}

/* A batch of matrices; one of both inner strides is 1. Strides in elements. */
typedef struct {
  const void *data;
  int64_t batch_stride, row_stride, column_stride;
} matrices;

typedef struct {
  matrices a, b, c, d; /* (rows, terms), (terms, columns), (rows, columns) twice; d may be null */
  int64_t type, batches, rows, terms, columns, threads;
  double alpha, beta;
  const float *signs;  /* v (columns, padded) */
  uint8_t *flags;      /* result (batches, rows) */
  verdict verdict;
} product;

static view view_of(const product *p, const matrices *m, int64_t batch, int64_t columns) {
  const int64_t size = p->type == FLOAT32 ? 4 : 2;
  return (view){.data = (const char *)m->data + batch * m->batch_stride * size,
                .columns = columns, .row_stride = m->row_stride,
                .column_stride = m->column_stride};
}

/* Rows that a thread takes at a time. */
enum { PART = 256 };

int outlast_multiply(product *p) {
  const int64_t rows = p->rows, terms = p->terms, wide = padded(terms);
  const int64_t all = p->batches * rows, parts = (rows + PART - 1) / PART;
  double *scratch = malloc((size_t)(4 * all + 2 * p->batches * terms) * sizeof *scratch);
  float *encoded = calloc((size_t)(2 * p->batches * wide), sizeof *encoded);
  if (!scratch || !encoded) return free(scratch), free(encoded), 2;
  double *found = scratch, *powers = found + all, *expected = powers + all;
  double *squares = expected + all, *sums = squares + all;
#pragma omp parallel for num_threads(p->threads) schedule(static) if (p->threads > 1)
  for (int64_t n = 0; n < p->batches; n++) {
    double *dots = sums + 2 * n * terms;
    float *right = encoded + 2 * n * wide;
    view b = view_of(p, &p->b, n, p->columns);
    b.right = p->signs, b.dots = dots, b.moments = dots + terms;
    look(p->type, &b, 0, terms);
    for (int64_t t = 0; t < terms; t++)
      right[t] = (float)dots[t], right[wide + t] = (float)dots[terms + t];
  }
#pragma omp parallel for num_threads(p->threads) schedule(static) if (p->threads > 1)
  for (int64_t part = 0; part < p->batches * parts; part++) {
    const int64_t n = part / parts, first = part % parts * PART;
    const int64_t last = first + PART < rows ? first + PART : rows;
    view a = view_of(p, &p->a, n, terms), c = view_of(p, &p->c, n, p->columns);
    a.right = encoded + 2 * n * wide, a.weights = a.right + wide;
    a.dots = expected + n * rows, a.moments = squares + n * rows;
    look(p->type, &a, first, last);
    if (p->d.data) {
      view d = view_of(p, &p->d, n, p->columns);
      d.right = p->signs, d.dots = found + n * rows, d.moments = powers + n * rows;
      look(p->type, &d, first, last);
    }
    for (int64_t i = n * rows + first; i < n * rows + last; i++) {
      expected[i] *= p->alpha, squares[i] *= p->alpha * p->alpha;
      if (p->d.data)
        expected[i] += p->beta * found[i], squares[i] += p->beta * p->beta * powers[i];
    }
    c.right = p->signs, c.powers = 1, c.dots = found + n * rows, c.moments = powers + n * rows;
    look(p->type, &c, first, last);
  }
  judge(&p->verdict, all, found, expected, 0.0, powers, squares, p->flags);
  free(scratch), free(encoded);
  return 0;
}
