#include "bytes.h"

#include <stdlib.h>

static bool strings_fit(struct reader r, uint32_t count, size_t *total) {
    *total = 0;
    if (count > reader_left(&r) / 4)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        struct span s = get_bytes(&r);
        if (r.bad || (s.size && memchr(s.data, 0, s.size)))
            return false;
        *total += s.size + 1u;
    }
    return true;
}

char **get_strings(struct reader *r, uint32_t *count) {
    size_t total;
    *count = get_u32(r);
    if (r->bad || !strings_fit(*r, *count, &total)) {
        r->bad = true;
        return NULL;
    }
    size_t vector = ((size_t)*count + 1) * sizeof(char *);
    char **items = malloc(vector + total);
    if (!items)
        return NULL;
    char *at = (char *)items + vector;
    for (uint32_t i = 0; i < *count; i++) {
        struct span s = get_bytes(r);
        items[i] = at;
        if (s.size)
            memcpy(at, s.data, s.size);
        at[s.size] = 0;
        at += s.size + 1;
    }
    items[*count] = NULL;
    return items;
}

static bool ring_resize(struct ring *r, uint32_t cap) {
    uint8_t *data = malloc(cap);
    if (!data)
        return false;
    ring_peek(r, data, r->used);
    free(r->data);
    r->data = data;
    r->cap = cap;
    r->head = 0;
    return true;
}

bool ring_reserve(struct ring *r, uint32_t want) {
    uint32_t need = want > ring_room(r) ? r->max : r->used + want;
    uint32_t cap = r->cap ? r->cap : RING_MIN;
    while (cap < need)
        cap *= 2;
    if (cap > r->max)
        cap = r->max;
    return cap == r->cap || ring_resize(r, cap);
}

static int pieces(const struct ring *r, uint32_t from, uint32_t size, struct iovec piece[2]) {
    if (!size)
        return 0;
    uint32_t start = from & (r->cap - 1), first = r->cap - start;
    if (first > size)
        first = size;
    piece[0] = (struct iovec){r->data + start, first};
    if (first == size)
        return 1;
    piece[1] = (struct iovec){r->data, size - first};
    return 2;
}

ssize_t ring_read(struct ring *r, int fd, uint32_t size) {
    struct iovec piece[2];
    uint32_t room = r->cap - r->used;
    ssize_t n = readv(fd, piece, pieces(r, r->head + r->used, size < room ? size : room, piece));
    if (n > 0)
        r->used += (uint32_t)n;
    return n;
}

ssize_t ring_write(struct ring *r, int fd, uint32_t size) {
    struct iovec piece[2];
    ssize_t n = writev(fd, piece, pieces(r, r->head, size < r->used ? size : r->used, piece));
    if (n > 0)
        ring_consume(r, (uint32_t)n);
    return n;
}

int ring_used_part(const struct ring *r, uint32_t offset, uint32_t size, struct iovec piece[2]) {
    return pieces(r, r->head + offset, size, piece);
}

void ring_consume(struct ring *r, uint32_t n) {
    r->used -= n;
    r->head = r->used ? (r->head + n) & (r->cap - 1) : 0;
}

bool ring_append(struct ring *r, const void *data, uint32_t size) {
    struct iovec piece[2] = {0};
    if (size > ring_room(r) || !ring_reserve(r, size))
        return false;
    pieces(r, r->head + r->used, size, piece);
    if (size)
        memcpy(piece[0].iov_base, data, piece[0].iov_len);
    if (piece[1].iov_len)
        memcpy(piece[1].iov_base, (const uint8_t *)data + piece[0].iov_len, piece[1].iov_len);
    r->used += size;
    return true;
}

uint32_t ring_peek(const struct ring *r, void *into, uint32_t size) {
    struct iovec piece[2] = {0};
    if (size > r->used)
        size = r->used;
    int n = ring_used_part(r, 0, size, piece);
    for (int i = 0; i < n; i++) {
        memcpy(into, piece[i].iov_base, piece[i].iov_len);
        into = (uint8_t *)into + piece[i].iov_len;
    }
    return size;
}

void ring_release(struct ring *r) {
    free(r->data);
    *r = (struct ring){.max = r->max};
}
