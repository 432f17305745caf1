#include "fuzz.h"

#include <stdbool.h>
#include <string.h>

#define HEAD 16u
#define PARTS_MAX 256u

uint32_t dice(uint32_t *state, uint32_t sides) {
    *state = *state * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)*state * sides >> 32); /* the low bits repeat soon */
}

static uint32_t read_u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

struct part {
    size_t at, size;
};

/* Puts `fresh` in the place of the part; the input's new size, or its old one if there is no room. */
static size_t replace(uint8_t *data, size_t size, size_t most, struct part part, const uint8_t *fresh, size_t fresh_size) {
    if (size - part.size + fresh_size > most)
        return size;
    size_t after = part.at + part.size;
    memmove(data + part.at + fresh_size, data + after, size - after);
    memcpy(data + part.at, fresh, fresh_size);
    return size - part.size + fresh_size;
}

/* A length next to those that buffers have. */
static size_t edge_length(uint32_t *state, size_t most) {
    size_t length = ((size_t)1 << (3 + dice(state, 10))) - 1 + dice(state, 3);
    return length < most ? length : most;
}

/* New content for a part, in memory of its own that the caller frees. */
static uint8_t *vary(const uint8_t *part, size_t size, size_t most, uint32_t *state, size_t *fresh_size) {
    uint8_t *fresh = malloc(most ? most : 1);
    if (!fresh)
        abort();
    *fresh_size = size < most ? size : most;
    memcpy(fresh, part, *fresh_size);
    if (dice(state, 3)) {
        if (most)
            *fresh_size = LLVMFuzzerMutate(fresh, *fresh_size, most);
        return fresh;
    }
    size_t length = edge_length(state, most);
    for (size_t i = *fresh_size; i < length; i++)
        fresh[i] = *fresh_size ? fresh[i % *fresh_size] : 'a';
    *fresh_size = length;
    return fresh;
}

/* ---- counted strings ---- */

/* Every place where a length that fits could be; most are none, which does no harm. */
static size_t find_counted(const uint8_t *data, size_t size, struct part *parts) {
    size_t count = 0;
    for (size_t at = 0; at + 4 <= size && count < PARTS_MAX; at++) {
        uint32_t length = read_u32(data + at);
        if (length <= size - at - 4 && (length || at + 4 == size || count % 4 == 0))
            parts[count++] = (struct part){at + 4, length};
    }
    return count;
}

size_t mutate_counted(uint8_t *data, size_t size, size_t most, uint32_t *state) {
    struct part parts[PARTS_MAX];
    size_t count = find_counted(data, size, parts), fresh_size;
    if (!count)
        return LLVMFuzzerMutate(data, size, most);
    struct part part = parts[dice(state, (uint32_t)count)];
    uint8_t *fresh = vary(data + part.at, part.size, most - (size - part.size), state, &fresh_size);
    size = replace(data, size, most, part, fresh, fresh_size);
    uint32_t length = (uint32_t)fresh_size;
    memcpy(data + part.at - 4, &length, sizeof length);
    free(fresh);
    return size;
}

/* ---- frames ---- */

static size_t find_frames(const uint8_t *data, size_t size, size_t from, struct part *parts) {
    size_t count = 0;
    while (count < PARTS_MAX && from + HEAD <= size) {
        uint32_t length = read_u32(data + from);
        if (length > size - from - HEAD)
            break;
        parts[count++] = (struct part){from, HEAD + length};
        from += HEAD + length;
    }
    return count;
}

static size_t vary_payload(uint8_t *data, size_t size, size_t most, struct part frame, uint32_t *state) {
    struct part payload = {frame.at + HEAD, frame.size - HEAD};
    size_t room = most - (size - payload.size), fresh_size = payload.size;
    uint8_t *fresh = malloc(room ? room : 1);
    if (!fresh)
        abort();
    memcpy(fresh, data + payload.at, payload.size);
    if (payload.size > 8 && dice(state, 2))
        fresh_size = mutate_counted(fresh, payload.size, room, state);
    else if (room)
        fresh_size = LLVMFuzzerMutate(fresh, payload.size, dice(state, 2) && payload.size ? payload.size : room);
    size = replace(data, size, most, payload, fresh, fresh_size);
    uint32_t length = (uint32_t)fresh_size;
    memcpy(data + frame.at, &length, sizeof length);
    free(fresh);
    return size;
}

/* One of the payload's numbers becomes a neighbour of itself: offsets matter by one. */
static void nudge(uint8_t *data, struct part frame, uint32_t *state) {
    if (frame.size < HEAD + 8)
        return;
    uint8_t *at = data + frame.at + HEAD + (frame.size >= HEAD + 16 && dice(state, 2) ? 8 : 0);
    uint64_t value;
    memcpy(&value, at, sizeof value);
    value += dice(state, 2) ? 1 : UINT64_MAX;
    memcpy(at, &value, sizeof value);
}

static size_t insert(uint8_t *data, size_t size, size_t most, size_t at, struct part frame) {
    uint8_t *copy = malloc(frame.size);
    if (!copy)
        abort();
    memcpy(copy, data + frame.at, frame.size);
    size = replace(data, size, most, (struct part){at, 0}, copy, frame.size);
    free(copy);
    return size;
}

size_t mutate_frames(uint8_t *data, size_t size, size_t most, size_t from, uint32_t *state) {
    struct part parts[PARTS_MAX];
    size_t count = find_frames(data, size, from, parts);
    if (!count)
        return LLVMFuzzerMutate(data, size, most);
    struct part frame = parts[dice(state, (uint32_t)count)], other = parts[dice(state, (uint32_t)count)];
    switch (dice(state, 7)) {
    case 0:
        return insert(data, size, most, other.at, frame);
    case 1:
        return replace(data, size, most, frame, data, 0);
    case 2:
        memcpy(data + frame.at + 4, data + other.at + 4, 2); /* type and stream of another */
        return size;
    case 3:
        memcpy(data + frame.at + 8, data + other.at + 8, 8); /* id of another */
        return size;
    case 4:
        nudge(data, frame, state);
        return size;
    case 5:
        LLVMFuzzerMutate(data + frame.at + 4, HEAD - 4, HEAD - 4);
        return size;
    default:
        return vary_payload(data, size, most, frame, state);
    }
}

/* ---- fields of text ---- */

static bool is_separator(uint8_t byte) {
    return byte == ':' || byte == ',' || byte == '\n' || byte == '\t' || byte == 0;
}

size_t mutate_fields(uint8_t *data, size_t size, size_t most, uint32_t *state) {
    struct part parts[PARTS_MAX];
    size_t count = 0, begin = 0, fresh_size;
    for (size_t at = 0; at <= size && count < PARTS_MAX; at++)
        if (at == size || is_separator(data[at])) {
            parts[count++] = (struct part){begin, at - begin};
            begin = at + 1;
        }
    struct part part = parts[dice(state, (uint32_t)count)], other = parts[dice(state, (uint32_t)count)];
    if (dice(state, 4) == 0) {
        uint8_t *copy = malloc(other.size + 1);
        if (!copy)
            abort();
        memcpy(copy, data + other.at, other.size);
        size = replace(data, size, most, part, copy, other.size);
        free(copy);
        return size;
    }
    uint8_t *fresh = vary(data + part.at, part.size, most - (size - part.size), state, &fresh_size);
    size = replace(data, size, most, part, fresh, fresh_size);
    free(fresh);
    return size;
}
