/* Tiles of a checkpoint, many in a call: hashed, coded, copied from and to the tensors' memory.

   Both directions give the bytes that codec.py and planes.py give; what is rare or malformed is left
   to them. zstd and XXH3 are those of other libraries in the process, whose functions are handed
   over. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ROTATED = 1, HEAD = 6 };

/* What zstd may need beyond a plane of so many bytes. */
#define SLACK(count) ((count) / 128 + 1024)

struct hash {
  uint64_t low, high;
};

/* Functions of zstd and xxhash; see compiled.py. */
struct libraries {
  void *(*new_compressor)(void);
  size_t (*free_compressor)(void *);
  size_t (*set)(void *, int, int);
  size_t (*compress)(void *, void *, size_t, const void *, size_t);
  void *(*new_decompressor)(void);
  size_t (*free_decompressor)(void *);
  size_t (*decompress)(void *, void *, size_t, const void *, size_t);
  unsigned (*is_error)(size_t);
  struct hash (*hash)(const void *, size_t, uint64_t);
};

struct coder {
  struct libraries call;
  void *compressor, *decompressor;
  uint8_t *room; /* four planes, and the tile itself */
  int64_t plane_bytes;
};

void outlast_tiles_free(struct coder *coder) {
  if (!coder) return;
  if (coder->compressor) coder->call.free_compressor(coder->compressor);
  if (coder->decompressor) coder->call.free_decompressor(coder->decompressor);
  free(coder->room);
  free(coder);
}

/* parameters: (count, 2), what zstd calls a parameter, and its value. NULL: no memory, or a zstd
   that does not take them. */
struct coder *outlast_tiles_new(const struct libraries *libraries, const int32_t *parameters,
                                 int64_t count) {
  struct coder *coder = calloc(1, sizeof *coder);
  if (!coder) return NULL;
  coder->call = *libraries;
  coder->compressor = libraries->new_compressor();
  coder->decompressor = libraries->new_decompressor();
  int usable = coder->compressor && coder->decompressor;
  for (int64_t i = 0; usable && i < count; i++)
    usable = !libraries->is_error(
        libraries->set(coder->compressor, parameters[2 * i], parameters[2 * i + 1]));
  if (usable) return coder;
  outlast_tiles_free(coder);
  return NULL;
}

static int make_room(struct coder *coder, int64_t plane_bytes) {
  if (plane_bytes <= coder->plane_bytes) return 1;
  uint8_t *room = realloc(coder->room, (size_t)(8 * plane_bytes));
  if (!room) return 0;
  coder->room = room;
  coder->plane_bytes = plane_bytes;
  return 1;
}

/* Writes a plane; returns its length. */
static int64_t put_plane(struct coder *coder, const uint8_t *plane, int64_t count, int coded,
                         uint8_t *out) {
  if (coded && count) {
    const size_t length = coder->call.compress(coder->compressor, out, (size_t)(count + SLACK(count)),
                                               plane, (size_t)count);
    if (!coder->call.is_error(length) && (int64_t)length < count) return (int64_t)length;
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
int64_t outlast_tiles_encode(struct coder *coder, const uint8_t *raw, int64_t bytes,
                              int32_t itemsize, uint32_t coded, double zeros, uint8_t *out) {
  const int64_t count = bytes / itemsize;
  if (!make_room(coder, count)) return 0;
  uint8_t *restrict planes[4];
  for (int i = 0; i < 4; i++) planes[i] = coder->room + i * coder->plane_bytes;
  if (itemsize == 4) {
    for (int64_t i = 0; i < count; i++) {
      uint32_t word;
      memcpy(&word, raw + 4 * i, 4);
      const uint16_t upper = (uint16_t)(word >> 16);
      const uint16_t turned = (uint16_t)(upper << 1 | upper >> 15);
      planes[0][i] = (uint8_t)word;
      planes[1][i] = (uint8_t)(word >> 8);
      planes[2][i] = (uint8_t)turned;
      planes[3][i] = (uint8_t)(turned >> 8);
    }
  } else {
    for (int64_t i = 0; i < count; i++) {
      uint16_t upper;
      memcpy(&upper, raw + 2 * i, 2);
      const uint16_t turned = (uint16_t)(upper << 1 | upper >> 15);
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
  out[1] = ROTATED;
  memset(out + 2, 0, 4);
  memcpy(out + HEAD, lengths, (size_t)(4 * itemsize));
  return at - out;
}

/* Where the bytes of a plane lie: in the code, or decoded in `room`; NULL: they are malformed. */
static const uint8_t *take_plane(struct coder *coder, const uint8_t *code, uint32_t length,
                                 int64_t count, uint8_t *room) {
  if (length == count) return code;
  const size_t size =
      coder->call.decompress(coder->decompressor, room, (size_t)count, code, length);
  return !coder->call.is_error(size) && (int64_t)size == count ? room : NULL;
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

/* Decodes planes of `bytes` bytes each, one after the other into `out`; returns how many, which is
   fewer than `tiles` where the next one is malformed, or none of these planes. */
int64_t outlast_tiles_decode(struct coder *coder, const uint8_t *const *codes,
                             const int64_t *lengths, int64_t tiles, int64_t bytes,
                             int32_t itemsize, uint8_t *out) {
  const int64_t count = bytes / itemsize;
  if (!make_room(coder, count)) return 0;
  for (int64_t tile = 0; tile < tiles; tile++)
    if (!decode(coder, codes[tile], lengths[tile], count, itemsize, out + tile * bytes))
      return tile;
  return tiles;
}

enum { RAW, FILL, PLANES };

/* Runs of a box in memory: where the first begins, and how far apart they are, in bytes. */
struct layout {
  int64_t start, strides[3];
};

/* How a part of a tile is copied to a part of an array. */
struct copy {
  int64_t run, counts[3];
  struct layout to, from;
};

static void copy_runs(const struct copy *copy, uint8_t *target, const uint8_t *content) {
  const struct layout *to = &copy->to, *from = &copy->from;
  for (int64_t i = 0; i < copy->counts[0]; i++)
    for (int64_t j = 0; j < copy->counts[1]; j++)
      for (int64_t k = 0; k < copy->counts[2]; k++)
        memcpy(target + to->start + i * to->strides[0] + j * to->strides[1] + k * to->strides[2],
               content + from->start + i * from->strides[0] + j * from->strides[1] +
                   k * from->strides[2],
               (size_t)copy->run);
}

/* A stored tile; all 64 bits wide, so that compiled.py fills a table of them. */
struct tile {
  const uint8_t *stored;
  int64_t length, codec, itemsize, bytes;
  struct hash content_hash;
  uint8_t *target; /* NULL: it is checked alone */
  struct copy copy;
};

static int read_tile(struct coder *coder, const struct tile *tile) {
  const uint8_t *content = tile->stored;
  if (tile->codec == RAW) {
    if (tile->length != tile->bytes) return 0;
  } else {
    if (tile->itemsize < 1 || !make_room(coder, tile->bytes / 2 + 1)) return 0;
    uint8_t *decoded = coder->room + 4 * coder->plane_bytes;
    if (tile->codec == FILL) {
      if (tile->length != tile->itemsize || tile->bytes % tile->length) return 0;
      for (int64_t at = 0; at < tile->bytes; at += tile->length)
        memcpy(decoded + at, content, (size_t)tile->length);
    } else {
      if (tile->itemsize != 2 && tile->itemsize != 4) return 0;
      if (!decode(coder, content, tile->length, tile->bytes / tile->itemsize,
                  (int32_t)tile->itemsize, decoded))
        return 0;
    }
    content = decoded;
  }
  /* The hash of the stored bytes is left out: no others give this content. */
  const struct hash found = coder->call.hash(content, (size_t)tile->bytes, 0);
  if (found.low != tile->content_hash.low || found.high != tile->content_hash.high) return 0;
  if (tile->target) copy_runs(&tile->copy, tile->target, content);
  return 1;
}

/* Checks, decodes and places tiles; done: 1 for each one that was found right. */
void outlast_tiles_read(struct coder *coder, const struct tile *tiles, int64_t count,
                        uint8_t *done) {
  for (int64_t i = 0; i < count; i++) done[i] = (uint8_t)read_tile(coder, tiles + i);
}

/* A tile to store; all 64 bits wide. */
struct source {
  const uint8_t *memory;
  int64_t itemsize, bytes;
  struct copy copy; /* to a tile, row-major */
  /* Filled: */
  struct hash content_hash, stored_hash;
  int64_t codec, length;
};

/* Its bytes, row-major: where they are, or copied to `room`. */
static const uint8_t *gather(const struct source *source, uint8_t *room) {
  if (source->copy.run == source->bytes) return source->memory + source->copy.from.start;
  copy_runs(&source->copy, room, source->memory);
  return room;
}

/* Hashes the content of tiles; returns 0 where memory is short. */
int64_t outlast_tiles_hash(struct coder *coder, struct source *sources, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    struct source *source = sources + i;
    if (!make_room(coder, source->bytes / 2 + 1)) return 0;
    const uint8_t *content = gather(source, coder->room + 4 * coder->plane_bytes);
    source->content_hash = coder->call.hash(content, (size_t)source->bytes, 0);
  }
  return 1;
}

static int constant(const uint8_t *content, int64_t bytes, int64_t itemsize) {
  return bytes > itemsize && !memcmp(content, content + itemsize, (size_t)(bytes - itemsize));
}

/* Codes tiles one after the other into `out`, which has room for their bytes and as much again as
   one of them may need beside; see outlast_tiles_encode. Their content_hash must be filled. coded: the
   planes that go through zstd; -1: they are stored as they are. Returns 0 where memory is short. */
int64_t outlast_tiles_write(struct coder *coder, struct source *sources, int64_t count,
                            int64_t coded, int64_t least, double zeros, uint8_t *out) {
  for (int64_t i = 0; i < count; i++) {
    struct source *source = sources + i;
    const int64_t bytes = source->bytes, itemsize = source->itemsize;
    if (!make_room(coder, bytes / 2 + 1)) return 0;
    const int coding = coded >= 0 && bytes >= least;
    uint8_t *room = coding ? coder->room + 4 * coder->plane_bytes : out;
    const uint8_t *content = gather(source, room);
    source->codec = RAW;
    source->length = bytes;
    if (constant(content, bytes, itemsize)) {
      source->codec = FILL;
      source->length = itemsize;
      memmove(out, content, (size_t)itemsize);
    } else {
      int64_t length = bytes;
      if (coding) {
        length = outlast_tiles_encode(coder, content, bytes, (int32_t)itemsize,
                                      (uint32_t)coded, zeros, out);
        if (!length) return 0;
      }
      if (length < bytes) {
        source->codec = PLANES;
        source->length = length;
      } else if (content != out) {
        memcpy(out, content, (size_t)bytes);
      }
    }
    source->stored_hash = source->codec == RAW
                              ? source->content_hash
                              : coder->call.hash(out, (size_t)source->length, 0);
    out += source->length;
  }
  return 1;
}
