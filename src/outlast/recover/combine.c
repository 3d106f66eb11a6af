/* Sums of stripes over GF(2^8), each times a byte. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__SSSE3__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* What is being summed stays in the first-level cache while the sources go by. */
enum { BLOCK = 8192 };

/* out ^= in */
static void add(uint8_t *restrict out, const uint8_t *restrict in, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i++) out[i] ^= in[i];
}

/* out ^= constant * in, by the products of the constant with both halves of a byte. */
static void add_product(uint8_t *restrict out, const uint8_t *restrict in, int64_t bytes,
                        const uint8_t *low, const uint8_t *high) {
  int64_t i = 0;
#if defined(__AVX2__)
  const __m256i lows = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)low));
  const __m256i highs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)high));
  const __m256i half = _mm256_set1_epi8(15);
  for (; i + 32 <= bytes; i += 32) {
    const __m256i x = _mm256_loadu_si256((const __m256i *)(in + i));
    const __m256i a = _mm256_shuffle_epi8(lows, _mm256_and_si256(x, half));
    const __m256i b =
        _mm256_shuffle_epi8(highs, _mm256_and_si256(_mm256_srli_epi64(x, 4), half));
    const __m256i y = _mm256_loadu_si256((const __m256i *)(out + i));
    _mm256_storeu_si256((__m256i *)(out + i), _mm256_xor_si256(y, _mm256_xor_si256(a, b)));
  }
#elif defined(__SSSE3__)
  const __m128i lows = _mm_loadu_si128((const __m128i *)low);
  const __m128i highs = _mm_loadu_si128((const __m128i *)high);
  const __m128i half = _mm_set1_epi8(15);
  for (; i + 16 <= bytes; i += 16) {
    const __m128i x = _mm_loadu_si128((const __m128i *)(in + i));
    const __m128i a = _mm_shuffle_epi8(lows, _mm_and_si128(x, half));
    const __m128i b = _mm_shuffle_epi8(highs, _mm_and_si128(_mm_srli_epi64(x, 4), half));
    const __m128i y = _mm_loadu_si128((const __m128i *)(out + i));
    _mm_storeu_si128((__m128i *)(out + i), _mm_xor_si128(y, _mm_xor_si128(a, b)));
  }
#elif defined(__aarch64__)
  const uint8x16_t lows = vld1q_u8(low), highs = vld1q_u8(high);
  for (; i + 16 <= bytes; i += 16) {
    const uint8x16_t x = vld1q_u8(in + i);
    const uint8x16_t a = vqtbl1q_u8(lows, vandq_u8(x, vdupq_n_u8(15)));
    const uint8x16_t b = vqtbl1q_u8(highs, vshrq_n_u8(x, 4));
    vst1q_u8(out + i, veorq_u8(vld1q_u8(out + i), veorq_u8(a, b)));
  }
#endif
  for (; i < bytes; i++) out[i] ^= (uint8_t)(low[in[i] & 15] ^ high[in[i] >> 4]);
}

/* out = the sum of constants[k] * sources[k] over all k. A source of lengths[k] bytes counts as
   zero behind its end. products: (count, 256), those of each constant. out is no source. */
void outlast_combine(uint8_t *out, int64_t bytes, int64_t count, const uint8_t *const *sources,
                     const int64_t *lengths, const uint8_t *products) {
  for (int64_t begin = 0; begin < bytes; begin += BLOCK) {
    const int64_t size = bytes - begin < BLOCK ? bytes - begin : BLOCK;
    memset(out + begin, 0, (size_t)size);
    for (int64_t k = 0; k < count; k++) {
      const int64_t left = lengths[k] - begin < size ? lengths[k] - begin : size;
      const uint8_t *of = products + 256 * k;
      uint8_t high[16];
      if (left <= 0) continue;
      for (int i = 0; i < 16; i++) high[i] = of[16 * i];
      if (of[1] == 1) add(out + begin, sources[k] + begin, left);
      else add_product(out + begin, sources[k] + begin, left, of, high);
    }
  }
}

int64_t outlast_same(const void *a, const void *b, int64_t bytes) {
  return memcmp(a, b, (size_t)bytes) == 0;
}
