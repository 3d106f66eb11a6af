/* The three passes over rows [first, last) for one stored type; included once per type with
 *
 *   STORED    element type in memory
 *   LANES(a)  16 elements at `a` as floats
 *   NAME(x)   x with the type's suffix
 */

/* The last `count` < 16 elements, and zeros. */
static inline lanes NAME(rest)(const STORED *a, int64_t count) {
  STORED padded[16] = {0};
  memcpy(padded, a, (size_t)count * sizeof *a);
  return LANES(padded);
}

#define FOR_LANES(body)                                  \
  {                                                      \
    int64_t j = 0;                                       \
    for (; j + 32 <= n; j += 32) {                       \
      FETCH(a + j);                                                         \
      if (sizeof *a == 4) FETCH(a + j + 16); /* two cache lines */            \
      { const lanes x = LANES(a + j); body(x, j, 0) }    \
      { const lanes x = LANES(a + j + 16); body(x, j + 16, 1) } \
    }                                                    \
    for (; j < n; j += 16) {                             \
      const lanes x = n - j < 16 ? NAME(rest)(a + j, n - j) : LANES(a + j); \
      body(x, j, 0)                                      \
    }                                                    \
  }

static void NAME(output)(const sweep *s, int64_t first, int64_t last) {
  const float *right = s->right;
  const int64_t n = s->columns;
  for (int64_t i = first; i < last; i++) {
    const STORED *a = (const STORED *)s->matrix + i * s->stride;
    lanes dot[2] = {0}, power[2] = {0};
#define OUTPUT(x, j, k)                              \
  dot[k] += x * load(right + (j));                   \
  const lanes p = powers_of(x);                      \
  power[k] += p * p;
    FOR_LANES(OUTPUT)
    s->dots[i] = total(dot[0] + dot[1]);
    s->moments[i] = total(power[0] + power[1]);
  }
}

static void NAME(operand)(const sweep *s, int64_t first, int64_t last) {
  const float *right = s->right, *second = s->second;
  const int64_t n = s->columns;
  for (int64_t i = first; i < last; i++) {
    const STORED *a = (const STORED *)s->matrix + i * s->stride;
    lanes dot[2] = {0}, other[2] = {0}, square[2] = {0};
#define OPERAND(x, j, k)               \
  dot[k] += x * load(right + (j));     \
  other[k] += x * load(second + (j));  \
  square[k] += x * x;
    FOR_LANES(OPERAND)
    s->dots[i] = total(dot[0] + dot[1]);
    s->seconds[i] = total(other[0] + other[1]) + s->beta;
    s->moments[i] = total(square[0] + square[1]);
  }
}

/* `sums` and `spreads`: of this block of rows, in fp32; see `flush`. */
static void NAME(gradient)(const sweep *s, int64_t first, int64_t last, float *sums,
                           float *spreads) {
  const float *right = s->right;
  const int64_t n = s->columns;
  for (int64_t i = first; i < last; i++) {
    const STORED *a = (const STORED *)s->matrix + i * s->stride;
    const float left = (float)s->left[i], mass = s->masses ? (float)s->masses[i] : 0.0f;
    lanes dot[2] = {0}, square[2] = {0};
#define GRADIENT(x, j, k)                        \
  dot[k] += x * load(right + (j));               \
  square[k] += x * x;                            \
  store(sums + (j), load(sums + (j)) + left * x);
#define SPREADING(x, j, k) \
  GRADIENT(x, j, k)        \
  store(spreads + (j), load(spreads + (j)) + mass * (x * x));
    if (s->masses)
      FOR_LANES(SPREADING)
    else
      FOR_LANES(GRADIENT)
    s->dots[i] = total(dot[0] + dot[1]);
    s->moments[i] = total(square[0] + square[1]);
  }
}

#undef STORED
#undef LANES
#undef NAME
#undef FOR_LANES
#undef OUTPUT
#undef OPERAND
#undef GRADIENT
#undef SPREADING
