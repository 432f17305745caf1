/* Counted fields in a buffer, and rings of bytes. Reading past the end sets `bad` and yields zeros; writing past the end
 * sets `full` and writes nothing. Everything on the wire is little-endian, and so is every machine this is built for. */
#ifndef BARCHAN_BYTES_H
#define BARCHAN_BYTES_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

struct span {
    const uint8_t *data;
    uint32_t size;
};

struct reader {
    const uint8_t *at, *end;
    bool bad;
};

struct writer {
    uint8_t *at, *end;
    bool full;
};

static inline struct reader reader_of(const void *data, size_t size) {
    return (struct reader){data, (const uint8_t *)data + size, false};
}

static inline size_t reader_left(const struct reader *r) {
    return (size_t)(r->end - r->at);
}

static inline const uint8_t *get_fixed(struct reader *r, size_t size) {
    if (r->bad || reader_left(r) < size) {
        r->bad = true;
        return NULL;
    }
    r->at += size;
    return r->at - size;
}

#define BARCHAN_GET(name, type)                     \
    static inline type name(struct reader *r)       \
    {                                               \
        type value = 0;                             \
        const uint8_t *p = get_fixed(r, sizeof value); \
        if (p)                                      \
            memcpy(&value, p, sizeof value);        \
        return value;                               \
    }
BARCHAN_GET(get_u8, uint8_t)
BARCHAN_GET(get_u16, uint16_t)
BARCHAN_GET(get_u32, uint32_t)
BARCHAN_GET(get_u64, uint64_t)
#undef BARCHAN_GET

static inline struct span get_bytes(struct reader *r) {
    uint32_t size = get_u32(r);
    const uint8_t *data = get_fixed(r, size);
    return (struct span){data, data ? size : 0};
}

static inline struct writer writer_of(void *data, size_t size) {
    return (struct writer){data, (uint8_t *)data + size, false};
}

static inline void put_raw(struct writer *w, const void *data, size_t size) {
    if (w->full || (size_t)(w->end - w->at) < size) {
        w->full = true;
        return;
    }
    if (size)
        memcpy(w->at, data, size);
    w->at += size;
}

#define BARCHAN_PUT(name, type)                          \
    static inline void name(struct writer *w, type value) \
    {                                                    \
        put_raw(w, &value, sizeof value);                \
    }
BARCHAN_PUT(put_u8, uint8_t)
BARCHAN_PUT(put_u16, uint16_t)
BARCHAN_PUT(put_u32, uint32_t)
BARCHAN_PUT(put_u64, uint64_t)
#undef BARCHAN_PUT

static inline void put_bytes(struct writer *w, const void *data, uint32_t size) {
    put_u32(w, size);
    put_raw(w, data, size);
}

/* The list that follows, as one malloc'ed block: a NULL-terminated vector and its strings. NULL if the list is malformed,
 * a string holds a NUL, or there is no memory. */
char **get_strings(struct reader *r, uint32_t *count);

/* A queue of bytes that grows by doubling from RING_MIN to `max` (a power of two). */
#define RING_MIN (16u << 10)

struct ring {
    uint8_t *data;
    uint32_t cap, head, used, max;
};

static inline uint32_t ring_room(const struct ring *r) {
    return r->max - r->used;
}

/* Makes room for `want` more bytes if `max` allows; false when there is no memory. */
bool ring_reserve(struct ring *r, uint32_t want);
/* One read(2) of at most `size` bytes into the room that there is; its result. */
ssize_t ring_read(struct ring *r, int fd, uint32_t size);
/* One write(2) of at most `size` bytes, which are consumed as far as they were taken; its result. */
ssize_t ring_write(struct ring *r, int fd, uint32_t size);
/* `size` used bytes from `offset` on, in at most two pieces; the number of pieces. */
int ring_used_part(const struct ring *r, uint32_t offset, uint32_t size, struct iovec piece[2]);
void ring_consume(struct ring *r, uint32_t n);
/* All of it or nothing. */
bool ring_append(struct ring *r, const void *data, uint32_t size);
/* Copies what there is, at most `size`, without consuming it. */
uint32_t ring_peek(const struct ring *r, void *into, uint32_t size);
void ring_release(struct ring *r);
#endif
