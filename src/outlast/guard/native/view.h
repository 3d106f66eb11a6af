/* Sums over the columns of a strided matrix, for one stored type; included once per type with
 * STORED, LANES and NAME as `rows.h`.
 *
 *   dots_i = sum_j A_ij right_j    moments_i = sum_j weights_j A_ij^2, or sum_j 4^floor(log2 |A_ij|)
 */

#define MOMENT(x, w) const lanes p = v->powers ? powers_of(x) : x; moment += v->weights ? p * p * (w) : p * p;

/* Rows [first, last) whose numbers lie one behind the other. */
static void NAME(view_rows)(const view *v, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; i++) {
    const STORED *a = (const STORED *)v->data + i * v->row_stride;
    lanes dot = {0}, moment = {0};
    double dots = 0, moments = 0;
    for (int64_t j = 0; j < v->columns; j += 16) {
      const lanes x = v->columns - j < 16 ? NAME(rest)(a + j, v->columns - j) : LANES(a + j);
      dot += x * load(v->right + j);
      MOMENT(x, load(v->weights + j))
      if (j / 16 % BLOCK == BLOCK - 1) {
        dots += total(dot), moments += total(moment);
        dot = moment = (lanes){0};
      }
    }
    v->dots[i] = dots + total(dot), v->moments[i] = moments + total(moment);
  }
}

/* Rows [first, last), 16 at a time, of columns whose numbers lie one behind the other. */
static void NAME(view_columns)(const view *v, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; i += 16) {
    const int64_t count = last - i < 16 ? last - i : 16;
    const STORED *a = (const STORED *)v->data + i;
    lanes dot = {0}, moment = {0};
    double dots[16] = {0}, moments[16] = {0};
    for (int64_t j = 0; j < v->columns; j++, a += v->column_stride) {
      const lanes x = count < 16 ? NAME(rest)(a, count) : LANES(a);
      dot += x * v->right[j];
      MOMENT(x, v->weights[j])
      if (j % BLOCK == BLOCK - 1) {
        for (int k = 0; k < 16; k++) dots[k] += dot[k], moments[k] += moment[k];
        dot = moment = (lanes){0};
      }
    }
    for (int64_t k = 0; k < count; k++)
      v->dots[i + k] = dots[k] + dot[k], v->moments[i + k] = moments[k] + moment[k];
  }
}

#undef STORED
#undef LANES
#undef NAME
#undef MOMENT
