/* The checks of scaled dot-product attention with
 *
 *   S = scale Q K^T + mask    P = exp(S - L)    O = P V
 *   D_i = sum_d dO_id O_id    dS = P * (dO V^T - D)
 *   dV = P^T dO               dQ = scale dS K    dK = scale dS^T Q
 *
 * by signs v over the channels: P and dS are computed again, a panel of queries by a few keys at a
 * time, and never stored; each is multiplied by vectors only:
 *
 *   O v = P (V v)    dQ v = scale dS (K v)    dV v = P^T (dO v)    dK v = scale dS^T (Q v)
 *
 * With each sum goes the sum of its terms' variances, where a term of P has the variance
 * (rounding + e_i) P_ij^2 and one of dS the variance (rounding + e_i) dS_ij^2 + c_i P_ij^2: e_i is
 * that of the scores and of L, c_i that of dO V^T and D. Sums over keys run in fp32 over at most 64
 * numbers, sums over queries over a panel, and are carried over in fp64.
 */
#include "matmul.c"

typedef int32_t whole __attribute__((vector_size(64)));

enum { PANEL = 12, STEP = 2, KEYS = 16 * STEP, CHUNK = 64 * 16 };

/* (batches, heads, rows, channels); channels lie one behind the other. Strides in elements. */
typedef struct {
  const void *data;
  int64_t batch_stride, head_stride, row_stride;
} heads;

/* What the rows of a check may differ by, beside what is counted per row. */
typedef struct {
  double stored;   /* by powers of what was stored */
  double terms;    /* rounding of the terms and of their sums, by the terms' squares */
  double summed;   /* the sums' part of it, which does not cancel with the signs */
  double values;   /* by the square of the sum over signs: terms alike are rounded alike */
  double constant; /* of a row */
} rounding;

typedef struct {
  heads q, k, v, o, dy, dq, dk, dv; /* dy is null in a forward pass; gradients may be null */
  const float *logsum;              /* L, its strides behind */
  int64_t logsum_batch, logsum_head, logsum_row;
  const float *mask;                /* added to S, or null */
  int64_t mask_batch, mask_head, mask_row;
  /* `heads` of Q, O and dO; as many of these share one of the `key_heads`. */
  int64_t type, batches, heads, key_heads, queries, keys, channels, causal, threads;
  double scale;
  const float *signs;               /* v (channels, padded) */
  rounding by_key, by_query;        /* of O and dQ, sums over keys; of dV and dK, over queries */
  double unit, spacing;             /* of fp32 sums; of P and dS below the normal numbers */
  double partial;                   /* variance of storing sums of `block` queries, by squares */
  int64_t block;
  uint8_t *o_flags, *dq_flags, *dk_flags, *dv_flags; /* results (batches, heads, rows) */
  verdict o_verdict, dq_verdict, dk_verdict, dv_verdict;
} attention;

/* Keys with room for whole steps, and no power of two, whose multiples share a place in caches. */
static inline int64_t room_for(int64_t keys) { return (keys + KEYS - 1) / KEYS * KEYS + 16; }

/* One head, in fp32, with room for whole panels and steps behind. */
typedef struct {
  float *q, *dy;              /* (queries, channels) */
  float *kt, *vt;             /* (channels, wide) */
  float *v_signs, *k_signs;   /* V v and K v (wide) */
  float *v_size, *k_size;     /* (V_j v)^2 + summed |V_j|^2, and of K (wide) */
  float *q_signs, *dy_signs, *q_size, *dy_size; /* the same per query */
  float *q_norms, *dy_norms, *norms; /* squares of norms; the last of K, then of V */
  float *logsum, *dots, *error, *spread; /* L, D, e_i and c_i per query */
  double *columns; /* dV, its variance, dK, its variance, P^T (Q v); before this head: (10, wide) */
  double *rows;    /* O, its variance, dQ, its variance, sums of P: (5, queries) */
} head;

static inline lanes all(float x) { return x - (lanes){0}; }

/* 2^t for t up to about 1; 0 below the normal numbers. */
static inline lanes power_of_two(lanes t) {
  const whole normal = ~(t < -126.0f);
  const lanes inside = (lanes)((whole)t & normal);
  const whole n = __builtin_convertvector(inside - 0.5f, whole);
  const lanes f = inside - __builtin_convertvector(n, lanes);
  lanes p = all(1.52527338e-5f);
  p = p * f + 1.54035304e-4f, p = p * f + 1.33335581e-3f, p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f, p = p * f + 2.40226507e-1f, p = p * f + 6.93147181e-1f;
  p = p * f + 1.0f;
  return (lanes)(((whole)p + (n << 23)) & normal);
}

/* out = rows (PANEL, channels) times columns (channels, wide), of KEYS columns. */
static inline __attribute__((always_inline)) void tile(const float *restrict rows,
                                                       const float *restrict columns,
                                                       int64_t channels, int64_t wide,
                                                       lanes out[PANEL][STEP]) {
  lanes sums[PANEL][STEP];
#pragma GCC unroll 16
  for (int i = 0; i < PANEL; i++)
#pragma GCC unroll 4
    for (int k = 0; k < STEP; k++) sums[i][k] = (lanes){0};
  for (int64_t c = 0; c < channels; c++) {
    lanes right[STEP];
#pragma GCC unroll 4
    for (int k = 0; k < STEP; k++) right[k] = load(columns + c * wide + 16 * k);
#pragma GCC unroll 16
    for (int i = 0; i < PANEL; i++)
#pragma GCC unroll 4
      for (int k = 0; k < STEP; k++) sums[i][k] += rows[i * channels + c] * right[k];
  }
#pragma GCC unroll 16
  for (int i = 0; i < PANEL; i++)
#pragma GCC unroll 4
    for (int k = 0; k < STEP; k++) out[i][k] = sums[i][k];
}

/* One row of a head in fp32: `channels` numbers, and zeros up to 16. */
static inline void row_of(int64_t type, const heads *h, int64_t at, int64_t channels, float *out) {
  for (int64_t c = 0; c < channels; c += 16) {
    const int64_t left = channels - c;
    lanes x = {0};
    if (type == FLOAT32) {
      const float *a = (const float *)h->data + at + c;
      x = left < 16 ? rest_float32(a, left) : load(a);
    } else if (type == BFLOAT16) {
      const uint16_t *a = (const uint16_t *)h->data + at + c;
      x = left < 16 ? rest_bfloat16(a, left) : from_bfloat16(a);
    }
#ifdef __FLT16_MAX__
    else {
      const _Float16 *a = (const _Float16 *)h->data + at + c;
      x = left < 16 ? rest_float16(a, left) : from_float16(a);
    }
#endif
    store(out + c, x);
  }
}

/* Ask for row i: rows lie too far apart for the processor to guess. */
static inline void fetch(const attention *a, const heads *h, int64_t at, int64_t i,
                         int64_t rows) {
  const int64_t size = a->type == FLOAT32 ? 4 : 2;
  for (int64_t c = 0; i < rows && c < a->channels * size; c += 64)
    __builtin_prefetch((const char *)h->data + (at + i * h->row_stride) * size + c);
}

/* Swap what of two rows of squares of `size` does not lie on the diagonal. */
#define SWAP(size, first, second)                                        \
  for (int i = 0; i < 16; i++)                                           \
    if (!(i & size)) {                                                   \
      const lanes upper = x[i], lower = x[i + size];                     \
      x[i] = __builtin_shufflevector(upper, lower, UNPACK first);        \
      x[i + size] = __builtin_shufflevector(upper, lower, UNPACK second); \
    }
#define UNPACK(...) __VA_ARGS__

/* Turn a square of 16 x 16 numbers. */
static inline void turn(lanes x[16]) {
#if __has_builtin(__builtin_shufflevector)
  SWAP(8, (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
       (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  SWAP(4, (0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
       (4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  SWAP(2, (0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
       (2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  SWAP(1, (0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
       (1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#else
  float square[16][16];
  memcpy(square, x, sizeof square);
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++) x[i][k] = square[k][i];
#endif
}

/* Sums over signs and sizes of rows in fp32; returns the largest square of a row's norm. `into`:
 * the rows themselves (rows, channels), or turned (channels, wide), or null. */
static double widen(const attention *a, const heads *h, int64_t at, int64_t rows, float *into,
                    int64_t wide, float *dots, float *sizes, float *norms,
                    double summed) {
  const int64_t d = a->channels, room = (d + 15) / 16 * 16;
  float block[16 * room];
  double largest = 0;
  for (int64_t first = 0; first < rows; first += 16) {
    const int64_t count = rows - first < 16 ? rows - first : 16;
    if (count < 16) memset(block, 0, sizeof block);
    for (int64_t i = 0; i < count; i++) {
      fetch(a, h, at, first + i + 16, rows);
      float *row = block + i * room;
      row_of(a->type, h, at + (first + i) * h->row_stride, d, row);
      lanes dot = {0}, square = {0};
      for (int64_t c = 0; c < d; c += 16) {
        const lanes x = load(row + c);
        dot += x * load(a->signs + c), square += x * x;
      }
      const double sum = total(dot), norm = total(square);
      dots[first + i] = (float)sum, norms[first + i] = (float)norm;
      sizes[first + i] = (float)(sum * sum + summed * norm);
      largest = norm > largest || isnan(norm) ? norm : largest;
      if (into && !wide) memcpy(into + (first + i) * d, row, (size_t)d * sizeof *row);
    }
    for (int64_t c = 0; into && wide && c < d; c += 16) {
      lanes square[16];
      for (int i = 0; i < 16; i++) square[i] = load(block + i * room + c);
      turn(square);
      for (int i = 0; i < 16 && c + i < d; i++) store(into + (c + i) * wide + first, square[i]);
    }
  }
  return largest;
}

/* The sums of the panel of queries that begins with i. */
static void panel(const attention *a, const head *h, int64_t b, int64_t n, int64_t i) {
  const int64_t d = a->channels, wide = room_for(a->keys);
  const int64_t rows = a->queries - i < PANEL ? a->queries - i : PANEL;
  const int64_t last = a->causal && i + rows < a->keys ? i + rows : a->keys;
  const float scale = (float)a->scale;
  const whole places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  double *const found = h->rows + i;
  for (int64_t chunk = 0; chunk < last; chunk += CHUNK) {
    lanes o[PANEL] = {0}, o_size[PANEL] = {0}, dq[PANEL] = {0}, dq_size[PANEL] = {0};
    lanes shared[PANEL] = {0}, sums_of_p[PANEL] = {0};
    for (int64_t j = chunk; j < last && j < chunk + CHUNK; j += KEYS) {
      lanes p[PANEL][STEP], dp[PANEL][STEP];
      tile(h->q + i * d, h->kt + j, d, wide, p);
      for (int r = 0; r < PANEL; r++) {
        const float *added = NULL;
        if (a->mask && r < rows)
          added = a->mask + b * a->mask_batch + n * a->mask_head + (i + r) * a->mask_row;
        for (int k = 0; k < STEP; k++) {
          /* In the kernel's order: a large negative mask swallows what is added to it. */
          lanes s = p[r][k] * scale;
          const int64_t at = j + 16 * k, left = a->keys - at;
          if (added && left > 0)
            s += left < 16 ? rest_float32(added + at, left) : load(added + at);
          p[r][k] = power_of_two((s - h->logsum[i + r]) * 1.44269504f);
          const int64_t open = a->causal && i + r + 1 < a->keys ? i + r + 1 : a->keys;
          if (at + 16 > open) p[r][k] = (lanes)((whole)p[r][k] & (places < (int32_t)(open - at)));
        }
      }
      if (a->dy.data) tile(h->dy + i * d, h->vt + j, d, wide, dp);
      for (int k = 0; k < STEP; k++) {
        const int64_t at = j + 16 * k;
        const lanes v = load(h->v_signs + at), v_size = load(h->v_size + at);
        if (!a->dy.data) {
          for (int r = 0; r < PANEL; r++) {
            o[r] += p[r][k] * v, o_size[r] += p[r][k] * p[r][k] * v_size;
            sums_of_p[r] += p[r][k];
          }
          continue;
        }
        const lanes w = load(h->k_signs + at), w_size = load(h->k_size + at);
        lanes dv = {0}, dv_size = {0}, dk = {0}, dk_size = {0}, common = {0};
        for (int r = 0; r < PANEL; r++) {
          const lanes x = p[r][k], square = x * x, ds = x * (dp[r][k] - h->dots[i + r]);
          const float own = (float)a->by_key.terms + h->error[i + r];
          const float crosswise = (float)a->by_query.terms + h->error[i + r];
          const lanes varied = square * h->spread[i + r], squared = ds * ds;
          o[r] += x * v, o_size[r] += square * v_size, sums_of_p[r] += x;
          dq[r] += ds * w, dq_size[r] += (squared * own + varied) * w_size, shared[r] += x * w;
          dv += x * h->dy_signs[i + r], dv_size += square * (crosswise * h->dy_size[i + r]);
          dk += ds * h->q_signs[i + r], common += x * h->q_signs[i + r];
          dk_size += (squared * crosswise + varied) * h->q_size[i + r];
        }
        double *sums = h->columns + at;
        for (int m = 0; m < 16; m++) sums[m] += dv[m], sums[wide + m] += dv_size[m];
        sums += 2 * wide;
        for (int m = 0; m < 16; m++) sums[m] += dk[m], sums[wide + m] += dk_size[m];
        sums += 2 * wide;
        for (int m = 0; m < 16; m++) sums[m] += common[m];
      }
    }
    for (int64_t r = 0; r < rows; r++) {
      found[r] += total(o[r]);
      found[a->queries + r] += total(o_size[r]) * (a->by_key.terms + h->error[i + r]);
      found[4 * a->queries + r] += total(sums_of_p[r]);
      if (!a->dy.data) continue;
      const double common = total(shared[r]);
      found[2 * a->queries + r] += total(dq[r]);
      found[3 * a->queries + r] += total(dq_size[r]) + common * common * h->spread[i + r];
    }
  }
}

/* Sums over signs and powers of one head of a stored tensor. */
static void stored(const attention *a, const heads *h, int64_t b, int64_t n, int64_t rows,
                   double *dots, double *powers) {
  const int64_t size = a->type == FLOAT32 ? 4 : 2;
  const int64_t at = b * h->batch_stride + n * h->head_stride;
  const view v = {.data = (const char *)h->data + at * size,
                  .columns = a->channels, .row_stride = h->row_stride, .column_stride = 1,
                  .right = a->signs, .powers = 1, .dots = dots, .moments = powers};
  for (int64_t i = 0; i < rows; i++) {
    fetch(a, h, at, i + 16, rows);
    look(a->type, &v, i, i + 1);
  }
}

/* Sums over signs of rows that are multiplied by P or dS, as bounds need them. */
typedef struct {
  double squares, sum;        /* of sizes; of sums over signs */
  double seen, whole, hidden; /* squares of these and of norms; their ratio, 1 or more */
} operand;

static operand operand_of(const float *dots, const float *sizes, const float *norms,
                          int64_t count) {
  operand own = {0};
  for (int64_t i = 0; i < count; i++) {
    own.squares += sizes[i], own.sum += dots[i];
    own.seen += (double)dots[i] * dots[i], own.whole += norms[i];
  }
  /* Where all rows lean to one side, all of their sums may be small by chance. */
  own.hidden = own.whole > own.seen ? fmin(own.whole / own.seen, 1e6) : 1.0;
  return own;
}

static void add(operand *to, operand more) {
  to->squares += more.squares, to->sum += more.sum;
}

/* Found, powers, expected and squares of all rows of O, dQ, dK or dV; null where not asked for. */
typedef struct {
  double *o, *dq, *dk, *dv;
} results;

/* Keep the rows of one head, the `number`-th of `count`; `error` below 0: nothing is expected. */
static void keep(const attention *a, const heads *h, int64_t b, int64_t n, int64_t rows,
                 int64_t number, int64_t count, double *into, const double *expected,
                 const double *squares, double times, operand other, const float *error) {
  if (!into) return;
  /* Below the normal numbers errors are of one size, independent or alike. */
  const double floor = a->spacing * a->spacing / 3.0 * (other.squares + other.sum * other.sum);
  double *found = into + number * rows;
  const int64_t next = count * rows;
  stored(a, h, b, n, rows, found, found + next);
  for (int64_t i = 0; i < rows; i++) {
    found[2 * next + i] = times * expected[i];
    found[3 * next + i] = times * times * (squares[i] + floor);
    if (error && error[i] < 0) {
      found[2 * next + i] = found[i];
      found[next + i] = found[3 * next + i] = 0;
    }
  }
}

#define PLACE(t, n) (b * a->t.batch_stride + (n) * a->t.head_stride)

/* Deviation of a score from which on nothing is known of its P: scores of some 1e6. */
#define LOST 0.1

/* Errors of P and of dO V^T - D by query, -1 where P is not known; the largest of each. Returns how
 * many are not. */
static int64_t errors(const attention *a, head *h, int64_t b, int64_t n, double key, double value,
                   double *error, double *spread) {
  const int64_t d = a->channels;
  const double drift = 1.0 + (double)d / 9.0, variance = a->unit * a->unit;
  float row[d + 16];
  int64_t lost = 0;
  for (int64_t i = 0; i < a->queries; i++) {
    const double l = a->logsum[b * a->logsum_batch + n * a->logsum_head + i * a->logsum_row];
    const double score = a->scale * a->scale * h->q_norms[i] * key;
    /* 20 units in the last place from the kernel's exp, evenly distributed. */
    const double deviation = a->unit * sqrt(400.0 / 3.0 + drift * score);
    /* Of exp: what the variance of a large exponent makes of P. */
    const double off = deviation < 0.01 ? deviation : expm1(6.0 * fmin(deviation, LOST)) / 6.0;
    const int is_lost = !(deviation < LOST);
    h->error[i] = is_lost ? -1.0f : (float)(off * off);
    lost += is_lost;
    *error = fmax(*error, h->error[i]);
    h->logsum[i] = l == -INFINITY || is_lost ? INFINITY : (float)l;
    if (!a->dy.data) continue;
    row_of(a->type, &a->o, PLACE(o, n) + i * a->o.row_stride, d, row);
    lanes dot = {0};
    for (int64_t c = 0; c < d; c += 16) {
      const float *own = h->dy + i * d + c;
      dot += load(row + c) * (d - c < 16 ? rest_float32(own, d - c) : load(own));
    }
    h->dots[i] = (float)total(dot);
    h->spread[i] = (float)(variance * drift * h->dy_norms[i] * value);
    *spread = fmax(*spread, h->spread[i]);
  }
  return lost;
}

/* O is normalised by its own sum of P, and L is the logarithm of that: their ratio is 1. Where L is
 * so large that its rounding is more than a sum, as where a row sees keys of a mask of -1e9 alone,
 * the ratio says nothing. */
static void normalise(const attention *a, head *h, int64_t b, int64_t n, int64_t i) {
  double *row = h->rows + i;
  const int64_t next = a->queries;
  const double l = a->logsum[b * a->logsum_batch + n * a->logsum_head + i * a->logsum_row];
  const double sum = row[4 * next], rounded = a->unit * fabs(l);
  const double variance = h->error[i] + rounded * rounded + 2.0 * a->by_key.values;
  /* A row that may see nothing has no P, and the kernel's O and L are 0. */
  if (sum == 0 || h->error[i] < 0) return;
  if (rounded < 0.01 && h->error[i] < 0.01 &&
      !((sum - 1.0) * (sum - 1.0) <= a->o_verdict.limit * variance))
    row[0] = INFINITY;
  else
    row[0] /= sum, row[next] /= sum * sum;
}

/* All that shares one head of keys and values. */
static void one_head(const attention *a, head *h, int64_t b, int64_t n, const results *found) {
  const int64_t queries = a->queries, keys = a->keys, wide = room_for(keys);
  const int64_t group = a->heads / a->key_heads, count = a->batches * a->heads;
  const int backward = a->dy.data != NULL;
  const double by_key = a->by_key.summed / a->by_key.terms;
  const double by_query = a->by_query.summed / a->by_query.terms;
  const double key = widen(a, &a->k, PLACE(k, n), keys, h->kt, wide, h->k_signs, h->k_size,
                           h->norms, by_key);
  const operand of_keys = operand_of(h->k_signs, h->k_size, h->norms, keys);
  const double value = widen(a, &a->v, PLACE(v, n), keys, backward ? h->vt : NULL, wide,
                             h->v_signs, h->v_size, h->norms, by_key);
  const operand of_values = operand_of(h->v_signs, h->v_size, h->norms, keys);
  operand all_queries = {0}, all_dy = {0};
  int64_t lost = 0;
  double *r = h->rows, *c = h->columns, *before = c + 5 * wide, error = 0, spread = 0;
  memset(c, 0, (size_t)(5 * wide) * sizeof *c);
  for (int64_t m = n * group; m < (n + 1) * group; m++) {
    widen(a, &a->q, PLACE(q, m), queries, h->q, 0, h->q_signs, h->q_size, h->q_norms, by_query);
    const operand of_queries = operand_of(h->q_signs, h->q_size, h->q_norms, queries);
    operand of_dy = {0};
    if (backward) {
      widen(a, &a->dy, PLACE(dy, m), queries, h->dy, 0, h->dy_signs, h->dy_size, h->dy_norms,
            by_query);
      of_dy = operand_of(h->dy_signs, h->dy_size, h->dy_norms, queries);
    }
    add(&all_queries, of_queries), add(&all_dy, of_dy);
    lost += errors(a, h, b, m, key, value, &error, &spread);
    memset(r, 0, (size_t)(5 * queries) * sizeof *r);
    memcpy(before, c, (size_t)(5 * wide) * sizeof *c);
    for (int64_t i = 0, block = a->block; i < queries; i += PANEL) {
      panel(a, h, b, m, i);
      /* Sums that were stored on the way may be larger than the last. */
      for (; backward && i + PANEL >= block; block += a->block) {
        if (block >= queries && m + 1 == (n + 1) * group) break;
        for (int64_t j = 0; j < keys; j++) {
          c[wide + j] += a->partial * of_dy.hidden * c[j] * c[j];
          c[3 * wide + j] += a->partial * of_queries.hidden * c[2 * wide + j] * c[2 * wide + j];
        }
      }
    }
    /* Keys alike have errors alike, and so have queries. */
    const double of_rows = error + a->by_key.values, of_columns = error + a->by_query.values;
    for (int64_t i = 0; i < queries; i++) {
      normalise(a, h, b, m, i);
      r[queries + i] += of_rows * r[i] * r[i];
      r[3 * queries + i] += of_rows * r[2 * queries + i] * r[2 * queries + i];
    }
    for (int64_t j = 0; backward && j < keys; j++) {
      const double dv = c[j] - before[j], dk = c[2 * wide + j] - before[2 * wide + j];
      const double common = c[4 * wide + j] - before[4 * wide + j];
      c[wide + j] += of_columns * of_dy.hidden * dv * dv;
      c[3 * wide + j] += of_queries.hidden * (of_columns * dk * dk + spread * common * common);
    }
    const int64_t number = b * a->heads + m;
    keep(a, &a->o, b, m, queries, number, count, found->o, r, r + queries, 1.0, of_values,
         h->error);
    keep(a, &a->dq, b, m, queries, number, count, found->dq, r + 2 * queries, r + 3 * queries,
         a->scale, of_keys, h->error);
  }
  const int64_t number = b * a->key_heads + n, all_heads = a->batches * a->key_heads;
  /* What is not known of a query is not of any key. */
  for (int64_t j = 0; j < keys; j++) h->norms[j] = lost ? -1.0f : 0.0f;
  keep(a, &a->dk, b, n, keys, number, all_heads, found->dk, c + 2 * wide, c + 3 * wide, a->scale,
       all_queries, h->norms);
  keep(a, &a->dv, b, n, keys, number, all_heads, found->dv, c, c + wide, 1.0, all_dy, h->norms);
}

/* widest: as of `judge`, but as a share of the rows' mean norm. The first query sees one key, and
 * the gradient of its score is 0 but for roundings. */
static void judged(verdict *v, uint8_t *flags, const double *found, int64_t rows,
                   const rounding *by) {
  if (!found) return;
  const double *powers = found + rows, *squares = found + 3 * rows;
  double all_powers = 0, widest = 0;
  v->by_power = by->stored, v->by_square = 1.0, v->by_value = 0.0, v->constant = by->constant;
  judge(v, rows, found, found + 2 * rows, 0.0, powers, squares, flags);
  for (int64_t i = 0; i < rows; i++) {
    const double own = v->by_power * powers[i] + squares[i];
    all_powers += powers[i];
    if (!flags[i] && own > widest) widest = own;
  }
  v->widest = all_powers > 0 ? sqrt(v->limit * widest * (double)rows / all_powers) : 0.0;
}

/* Channels: at most a few thousand, for rows lie on the stack. 0: done; 2: no memory. */
int outlast_attention(attention *a) {
  const int64_t count = a->batches * a->key_heads, d = a->channels;
  const int64_t tall = (a->queries + PANEL - 1) / PANEL * PANEL, wide = room_for(a->keys);
  const int64_t queries = a->batches * a->heads * a->queries, keys = count * a->keys;
  const int64_t floats = (2 * d * (tall + wide) + 5 * wide + 10 * tall + 16 * 20 + 15) / 16 * 16;
  const int64_t doubles = 10 * wide + 5 * a->queries, room = doubles * 8 + (floats + 16) * 4;
  double *sums = malloc((size_t)(8 * (queries + keys)) * sizeof *sums);
  char *own = malloc((size_t)(a->threads * room));
  if (!sums || !own) return free(sums), free(own), 2;
  const int backward = a->dy.data != NULL;
  const results found = {a->o.data ? sums : NULL,
                         backward && a->dq.data ? sums + 4 * queries : NULL,
                         backward && a->dk.data ? sums + 8 * queries : NULL,
                         backward && a->dv.data ? sums + 8 * queries + 4 * keys : NULL};
#pragma omp parallel for num_threads(a->threads) schedule(static) if (a->threads > 1)
  for (int64_t t = 0; t < a->threads; t++) {
    head h;
    h.columns = (double *)(own + t * room);
    h.rows = h.columns + 10 * wide;
    float *next = (float *)(h.rows + 5 * a->queries);
    memset(next, 0, (size_t)floats * sizeof *next);
#define TAKE(name, length) h.name = next, next += (length) + 16
    TAKE(q, d * tall), TAKE(dy, d * tall), TAKE(kt, d * wide), TAKE(vt, d * wide);
    TAKE(v_signs, wide), TAKE(k_signs, wide), TAKE(v_size, wide), TAKE(k_size, wide);
    TAKE(q_signs, tall), TAKE(dy_signs, tall), TAKE(q_size, tall), TAKE(dy_size, tall);
    TAKE(q_norms, tall), TAKE(dy_norms, tall), TAKE(norms, wide);
    TAKE(logsum, tall), TAKE(dots, tall), TAKE(error, tall), TAKE(spread, tall);
    for (int64_t m = count * t / a->threads; m < count * (t + 1) / a->threads; m++)
      one_head(a, &h, m / a->key_heads, m % a->key_heads, &found);
  }
  judged(&a->o_verdict, a->o_flags, found.o, queries, &a->by_key);
  judged(&a->dq_verdict, a->dq_flags, found.dq, queries, &a->by_key);
  judged(&a->dk_verdict, a->dk_flags, found.dk, keys, &a->by_query);
  judged(&a->dv_verdict, a->dv_flags, found.dv, keys, &a->by_query);
  return free(sums), free(own), 0;
}

/* Numbers [c, c + 16) of a row, and zeros behind the last of d. */
static inline __attribute__((always_inline)) lanes part_of(int64_t type, const void *row,
                                                           int64_t c, int64_t d) {
  if (type == FLOAT32) {
    const float *a = (const float *)row + c;
    return d - c < 16 ? rest_float32(a, d - c) : load(a);
  }
#ifdef __FLT16_MAX__
  if (type == FLOAT16) {
    const _Float16 *a = (const _Float16 *)row + c;
    return d - c < 16 ? rest_float16(a, d - c) : from_float16(a);
  }
#endif
  const uint16_t *a = (const uint16_t *)row + c;
  return d - c < 16 ? rest_bfloat16(a, d - c) : from_bfloat16(a);
}

/* Sums over rows of x and y, per channel of each head: (heads, SUMS, channels). */
enum { SUM, SQUARES, PRODUCT, PRODUCTS, OTHERS, SUMS, ROWS = 16, WIDE = 4 };

/* Add up rows [first, last) of `count` times 16 channels of a head, from c on. */
static inline __attribute__((always_inline)) void pair_lanes(int64_t type, int count,
                                                             const heads *x, const heads *y,
                                                             int64_t x_at, int64_t y_at,
                                                             int64_t first, int64_t last,
                                                             int64_t c, int64_t d,
                                                             const float *seen, double *sums) {
  const int64_t size = type == FLOAT32 ? 4 : 2;
  lanes found[SUMS][WIDE] = {0};
  for (int64_t i = first; i < last; i++) {
    const char *one_row = (const char *)x->data + (x_at + i * x->row_stride) * size;
    const char *other_row = (const char *)y->data + (y_at + i * y->row_stride) * size;
#pragma GCC unroll 4
    for (int k = 0; k < count; k++) {
      __builtin_prefetch(one_row + (ROWS / 2 * x->row_stride + c + 16 * k) * size);
      __builtin_prefetch(other_row + (ROWS / 2 * y->row_stride + c + 16 * k) * size);
      const lanes one = part_of(type, one_row, c + 16 * k, d);
      const lanes other = part_of(type, other_row, c + 16 * k, d), both = one * other;
      found[SUM][k] += seen ? one * seen[i] : one, found[SQUARES][k] += one * one;
      found[PRODUCT][k] += both, found[PRODUCTS][k] += both * both;
      found[OTHERS][k] += other * other;
    }
  }
  for (int n = 0; n < SUMS; n++)
    for (int k = 0; k < count; k++)
      for (int64_t m = 0, at = c + 16 * k; m < 16 && at + m < d; m++)
        sums[n * d + at + m] += found[n][k][m];
}

/* All heads of some rows before the next: they lie side by side as a rule. */
static inline __attribute__((always_inline)) void pair_of(int64_t type, const attention *a,
                                                          int64_t b, const heads *x,
                                                          const heads *y, int64_t count,
                                                          int64_t rows, const float *seen,
                                                          double *sums) {
  const int64_t d = a->channels, group = count / a->key_heads;
  for (int64_t first = 0; first < rows; first += ROWS) {
    const int64_t last = first + ROWS < rows ? first + ROWS : rows;
    for (int64_t n = 0; n < count; n++) {
      const int64_t x_at = b * x->batch_stride + n * x->head_stride;
      const int64_t y_at = b * y->batch_stride + n * y->head_stride;
      const float *own = seen ? seen + n * rows : NULL;
      double *into = sums + n / group * SUMS * d;
      int64_t c = 0;
      for (; c + 16 * WIDE <= d; c += 16 * WIDE)
        pair_lanes(type, WIDE, x, y, x_at, y_at, first, last, c, d, own, into);
      for (; c < d; c += 16)
        pair_lanes(type, 1, x, y, x_at, y_at, first, last, c, d, own, into);
    }
  }
}

static void pair(const attention *a, int64_t b, const heads *x, const heads *y, int64_t count,
                 int64_t rows, const float *seen, double *sums) {
  if (a->type == FLOAT32)
    pair_of(FLOAT32, a, b, x, y, count, rows, seen, sums);
  else if (a->type == BFLOAT16)
    pair_of(BFLOAT16, a, b, x, y, count, rows, seen, sums);
  else
    pair_of(FLOAT16, a, b, x, y, count, rows, seen, sums);
}

static double sum_of(const double *values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += values[i];
  return sum;
}

/* Found, powers, expected and squares of one head's four identities, (4, channels), each `next` on,
 * from its sums of dV with V, dK with K, dO with O and Q with dQ. */
static void identities(const attention *a, const double *v, const double *k, const double *o,
                       const double *q, double *found, int64_t next) {
  const int64_t d = a->channels, group = a->heads / a->key_heads;
  const double queries = (double)(group * a->queries), keys = (double)a->keys;
  const double of_q = sum_of(q + SQUARES * d, d), of_dy = sum_of(o + SQUARES * d, d);
  const double of_dv = sum_of(v + SQUARES * d, d), of_dk = sum_of(k + SQUARES * d, d);
  /* Of the largest rows, guessed from the mean. */
  const double largest = 4.0 / (queries * keys), scale = a->scale * a->scale;
  const double drift = 1.0 + (double)d / 9.0, unit = a->unit * a->unit;
  const double score = scale * largest * of_q * sum_of(k + OTHERS * d, d);
  const double spread = unit * drift * largest * of_dy * sum_of(v + OTHERS * d, d);
  const double error = unit * (400.0 / 3.0 + drift * score);
  const double terms = a->by_query.terms + a->by_key.terms + error;
  const double alike = a->by_query.values + error;
  const double share_v = of_dy > 0 ? fmin(of_dv / of_dy, 1.0) : 0.0;
  const double share_k = of_q > 0 ? of_dk / of_q : 0.0;
  /* D is the rounded O's: what rows of dS sum to, and with Q columns of dK. */
  const double dots = 2.0 * a->by_key.stored * sum_of(o + PRODUCTS * d, d) / queries + spread;
  for (int64_t c = 0; c < d; c++, found++) {
#define IDENTITY(m, left, right, power, square)                  \
  found[m * d] = left, found[m * d + next] = power;               \
  found[m * d + 2 * next] = right, found[m * d + 3 * next] = square
    const double *dv = v + c, *dy = o + c, *dk = k + c, *dq = q + c;
    const double sum = dy[SUM * d], product = dy[PRODUCT * d], other = dk[PRODUCT * d];
    IDENTITY(0, dv[SUM * d], sum, dv[SQUARES * d],
             terms * fmax(dv[SQUARES * d], share_v * dy[SQUARES * d]) + alike * sum * sum);
    IDENTITY(1, dv[PRODUCT * d], product, dv[PRODUCTS * d],
             a->by_key.stored * dy[PRODUCTS * d] + alike * product * product +
                 terms * fmax(dv[PRODUCTS * d], dy[PRODUCTS * d]));
    IDENTITY(2, dk[SUM * d], 0.0, dk[SQUARES * d],
             terms * fmax(dk[SQUARES * d], share_k * dq[SQUARES * d]) +
                 scale * dots * dq[SQUARES * d]);
    IDENTITY(3, dq[PRODUCT * d], other, dk[PRODUCTS * d],
             a->by_key.stored * dq[PRODUCTS * d] + alike * other * other +
                 terms * fmax(dk[PRODUCTS * d], dq[PRODUCTS * d]));
  }
}

/* The sums that hold without P, per channel of each head of keys:
 *
 *   sum_j dV = sum_i dO    sum_j V dV = sum_i dO O    sum_j dK = 0    sum_i Q dQ = sum_j K dK
 *
 * Results: `o_flags` (batches, key heads, 4, channels) and `o_verdict`. 0: done; 2: no memory. */
int outlast_attention_sums(attention *a) {
  const int64_t heads = a->key_heads, all = a->batches * heads * 4 * a->channels;
  const int64_t size = heads * SUMS * a->channels, room = (4 * size + a->heads * a->queries) * 8;
  double *found = malloc((size_t)(4 * all) * sizeof *found);
  char *own = malloc((size_t)(a->threads * room));
  if (!found || !own) return free(found), free(own), 2;
#pragma omp parallel for num_threads(a->threads) schedule(static) if (a->threads > 1)
  for (int64_t t = 0; t < a->threads; t++) {
    double *v = (double *)(own + t * room), *k = v + size, *o = k + size, *q = o + size;
    float *seen = (float *)(q + size);
    for (int64_t b = a->batches * t / a->threads; b < a->batches * (t + 1) / a->threads; b++) {
      memset(v, 0, (size_t)(4 * size) * sizeof *v);
      for (int64_t m = 0; m < a->heads; m++)
        for (int64_t i = 0; i < a->queries; i++) {
          /* A row that may see nothing has the sum 0. */
          const int64_t at = b * a->logsum_batch + m * a->logsum_head + i * a->logsum_row;
          seen[m * a->queries + i] = !a->mask || (a->logsum[at] != 0 && isfinite(a->logsum[at]));
        }
      pair(a, b, &a->dv, &a->v, heads, a->keys, NULL, v);
      pair(a, b, &a->dk, &a->k, heads, a->keys, NULL, k);
      pair(a, b, &a->dy, &a->o, a->heads, a->queries, seen, o);
      pair(a, b, &a->q, &a->dq, a->heads, a->queries, NULL, q);
      for (int64_t n = 0; n < heads; n++) {
        const int64_t at = n * SUMS * a->channels;
        identities(a, v + at, k + at, o + at, q + at,
                   found + (b * heads + n) * 4 * a->channels, all);
      }
    }
  }
  judged(&a->o_verdict, a->o_flags, found, all, &a->by_query);
  return free(found), free(own), 0;
}
