/* Byte planes of 16- and 32-bit numbers, as planes.py writes them: split, coded by zstd, and back.

   Both directions give the bytes that planes.py gives. What is rare (nibbles) or malformed is left
   to it. zstd is the one of another library in the process, whose functions are handed over. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ROTATED = 1, HEAD = 6 };

/* What zstd may need beyond a plane of so many bytes. */
#define SLACK(count) ((count) / 128 + 1024)

struct zstd {
  void *(*new_compressor)(void);
  size_t (*free_compressor)(void *);
  size_t (*set)(void *, int, int);
  size_t (*compress)(void *, void *, size_t, const void *, size_t);
  void *(*new_decompressor)(void);
  size_t (*free_decompressor)(void *);
  size_t (*decompress)(void *, void *, size_t, const void *, size_t);
  unsigned (*is_error)(size_t);
};

struct coder {
  struct zstd zstd;
  void *compressor, *decompressor;
  uint8_t *room; /* four planes */
  int64_t plane_bytes;
};

void outlast_planes_free(struct coder *coder) {
  if (!coder) return;
  if (coder->compressor) coder->zstd.free_compressor(coder->compressor);
  if (coder->decompressor) coder->zstd.free_decompressor(coder->decompressor);
  free(coder->room);
  free(coder);
}

/* parameters: (count, 2), what zstd calls a parameter, and its value. NULL: no memory, or a zstd
   that does not take them. */
struct coder *outlast_planes_new(const struct zstd *zstd, const int32_t *parameters,
                                 int64_t count) {
  struct coder *coder = calloc(1, sizeof *coder);
  if (!coder) return NULL;
  coder->zstd = *zstd;
  coder->compressor = zstd->new_compressor();
  coder->decompressor = zstd->new_decompressor();
  int usable = coder->compressor && coder->decompressor;
  for (int64_t i = 0; usable && i < count; i++)
    usable = !zstd->is_error(
        zstd->set(coder->compressor, parameters[2 * i], parameters[2 * i + 1]));
  if (usable) return coder;
  outlast_planes_free(coder);
  return NULL;
}

static int make_room(struct coder *coder, int64_t plane_bytes) {
  if (plane_bytes <= coder->plane_bytes) return 1;
  uint8_t *room = realloc(coder->room, (size_t)(4 * plane_bytes));
  if (!room) return 0;
  coder->room = room;
  coder->plane_bytes = plane_bytes;
  return 1;
}

/* Writes a plane; returns its length. */
static int64_t put_plane(struct coder *coder, const uint8_t *plane, int64_t count, int coded,
                         uint8_t *out) {
  if (coded && count) {
    const size_t length = coder->zstd.compress(coder->compressor, out, (size_t)(count + SLACK(count)),
                                               plane, (size_t)count);
    if (!coder->zstd.is_error(length) && (int64_t)length < count) return (int64_t)length;
  }
  memcpy(out, plane, (size_t)count);
  return count;
}

static int64_t not_zero(const uint8_t *plane, int64_t count) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i++) found += plane[i] != 0;
  return found;
}

/* Writes both planes of one half, whose words are low + 256 high; returns their length. Where
   neither pays, the words are written as they are, and nothing for the other plane. */
static int64_t put_half(struct coder *coder, const uint8_t *low, const uint8_t *high,
                        int64_t count, unsigned coded, double zeros, uint8_t *out,
                        uint32_t lengths[2]) {
  /* Rows that were never touched are zeros in every plane. */
  const int sparse = (double)not_zero(low, count) < zeros * (double)count;
  if (!sparse && !coded) {
    for (int64_t i = 0; i < count; i++) {
      out[2 * i] = low[i];
      out[2 * i + 1] = high[i];
    }
    lengths[0] = (uint32_t)(2 * count);
    lengths[1] = 0;
    return 2 * count;
  }
  const int64_t first = put_plane(coder, low, count, sparse || (coded & 1), out);
  const int64_t second = put_plane(coder, high, count, sparse || (coded & 2), out + first);
  lengths[0] = (uint32_t)first;
  lengths[1] = (uint32_t)second;
  return first + second;
}

/* Codes a tile of `bytes` bytes; returns the code's length, 0 where memory is short.

   coded: bit i says whether plane i, from the lowest, goes through zstd. out: room for bytes + bytes / 16 + 8192. */
int64_t outlast_planes_encode(struct coder *coder, const uint8_t *raw, int64_t bytes,
                              int32_t itemsize, int32_t rotate, uint32_t coded, double zeros,
                              uint8_t *out) {
  const int64_t count = bytes / itemsize;
  if (!make_room(coder, count)) return 0;
  uint8_t *restrict planes[4];
  for (int i = 0; i < 4; i++) planes[i] = coder->room + i * coder->plane_bytes;
  if (itemsize == 4) {
    for (int64_t i = 0; i < count; i++) {
      uint32_t word;
      memcpy(&word, raw + 4 * i, 4);
      const uint16_t upper = (uint16_t)(word >> 16);
      const uint16_t turned = rotate ? (uint16_t)(upper << 1 | upper >> 15) : upper;
      planes[0][i] = (uint8_t)word;
      planes[1][i] = (uint8_t)(word >> 8);
      planes[2][i] = (uint8_t)turned;
      planes[3][i] = (uint8_t)(turned >> 8);
    }
  } else {
    for (int64_t i = 0; i < count; i++) {
      uint16_t upper;
      memcpy(&upper, raw + 2 * i, 2);
      const uint16_t turned = rotate ? (uint16_t)(upper << 1 | upper >> 15) : upper;
      planes[2][i] = (uint8_t)turned;
      planes[3][i] = (uint8_t)(turned >> 8);
    }
  }
  uint32_t lengths[4];
  uint8_t *at = out + HEAD + 4 * itemsize;
  if (itemsize == 4)
    at += put_half(coder, planes[0], planes[1], count, coded & 3, zeros, at, lengths);
  at += put_half(coder, planes[2], planes[3], count, coded >> (itemsize - 2) & 3, zeros, at,
                 lengths + itemsize - 2);
  out[0] = (uint8_t)itemsize;
  out[1] = rotate ? ROTATED : 0;
  memset(out + 2, 0, 4);
  memcpy(out + HEAD, lengths, (size_t)(4 * itemsize));
  return at - out;
}

/* Where the bytes of a plane lie: in the code, or decoded in `room`; NULL: they are malformed. */
static const uint8_t *take_plane(struct coder *coder, const uint8_t *code, uint32_t length,
                                 int64_t count, uint8_t *room) {
  if (length == count) return code;
  const size_t size =
      coder->zstd.decompress(coder->decompressor, room, (size_t)count, code, length);
  return !coder->zstd.is_error(size) && (int64_t)size == count ? room : NULL;
}

static int decode(struct coder *coder, const uint8_t *code, int64_t length, int64_t count,
                  int32_t itemsize, uint8_t *restrict out) {
  uint32_t lengths[4], exceptions;
  int64_t all = HEAD + 4 * itemsize;
  if (length < all || code[0] != itemsize || (code[1] & ~ROTATED)) return 0;
  memcpy(&exceptions, code + 2, 4);
  memcpy(lengths, code + HEAD, (size_t)(4 * itemsize));
  const uint8_t *parts[4];
  for (int i = 0; i < itemsize; i++) {
    parts[i] = code + all;
    all += lengths[i];
  }
  if (all != length || exceptions) return 0;
  const uint8_t *low[2], *high[2]; /* of the lower and the upper half */
  int words[2];
  for (int half = 0; half < itemsize / 2; half++) {
    const int i = 2 * half, slot = half + 2 - itemsize / 2;
    words[slot] = lengths[i + 1] == 0 && lengths[i] == 2 * count;
    low[slot] = parts[i];
    if (words[slot]) continue;
    low[slot] = take_plane(coder, parts[i], lengths[i], count, coder->room + i * count);
    high[slot] =
        take_plane(coder, parts[i + 1], lengths[i + 1], count, coder->room + (i + 1) * count);
    if (!low[slot] || !high[slot]) return 0;
  }
  const int turn = code[1] & ROTATED;
  /* The loops are apart so that each is vectorised. */
  if (itemsize == 2) {
    for (int64_t i = 0; i < count; i++) {
      uint16_t upper;
      if (words[1])
        memcpy(&upper, low[1] + 2 * i, 2);
      else
        upper = (uint16_t)(high[1][i] << 8 | low[1][i]);
      if (turn) upper = (uint16_t)(upper >> 1 | upper << 15);
      memcpy(out + 2 * i, &upper, 2);
    }
    return 1;
  }
#define JOIN(LOWER, UPPER)                                      \
  for (int64_t i = 0; i < count; i++) {                         \
    uint16_t lower, upper;                                      \
    LOWER;                                                      \
    UPPER;                                                      \
    if (turn) upper = (uint16_t)(upper >> 1 | upper << 15);     \
    const uint32_t word = (uint32_t)upper << 16 | lower;        \
    memcpy(out + 4 * i, &word, 4);                              \
  }
  const uint8_t *l0 = low[0], *h0 = high[0], *l1 = low[1], *h1 = high[1];
  if (words[0] && words[1])
    JOIN(memcpy(&lower, l0 + 2 * i, 2), memcpy(&upper, l1 + 2 * i, 2))
  else if (words[0])
    JOIN(memcpy(&lower, l0 + 2 * i, 2), upper = (uint16_t)(h1[i] << 8 | l1[i]))
  else if (words[1])
    JOIN(lower = (uint16_t)(h0[i] << 8 | l0[i]), memcpy(&upper, l1 + 2 * i, 2))
  else
    JOIN(lower = (uint16_t)(h0[i] << 8 | l0[i]), upper = (uint16_t)(h1[i] << 8 | l1[i]))
  return 1;
}

/* Decodes tiles of `bytes` bytes each, one after the other into `out`; returns how many, which is
   fewer than `tiles` where the next one is malformed, or none of these planes. */
int64_t outlast_planes_decode(struct coder *coder, const uint8_t *const *codes,
                              const int64_t *lengths, int64_t tiles, int64_t bytes,
                              int32_t itemsize, uint8_t *out) {
  const int64_t count = bytes / itemsize;
  if (!make_room(coder, count)) return 0;
  for (int64_t tile = 0; tile < tiles; tile++)
    if (!decode(coder, codes[tile], lengths[tile], count, itemsize, out + tile * bytes))
      return tile;
  return tiles;
}
