#include "link_parse.h"

void frame_head(uint8_t head[FRAME_HEAD], uint32_t length, uint8_t type, uint8_t stream, uint64_t id) {
    struct writer w = writer_of(head, FRAME_HEAD);
    put_u32(&w, length);
    put_u8(&w, type);
    put_u8(&w, stream);
    put_u16(&w, 0);
    put_u64(&w, id);
}

long frame_size(const uint8_t *data, size_t size) {
    struct reader r = reader_of(data, size);
    uint32_t length = get_u32(&r);
    get_u16(&r);
    uint16_t zero = get_u16(&r);
    get_u64(&r);
    if (r.bad)
        return 0;
    return length > FRAME_MAX_PAYLOAD || zero ? -1 : (long)(FRAME_HEAD + length);
}

static bool is_output(const struct frame *f) {
    return f->stream == STREAM_OUT || f->stream == STREAM_ERR;
}

/* Reads the fields of the frame's type; whether the stream number suits it. */
static bool fields(struct reader *r, struct frame *f) {
    switch (f->type) {
    case F_HELLO:
        f->oldest = get_u16(r);
        f->newest = get_u16(r);
        return true;
    case F_START:
        f->kind = get_u8(r);
        for (int i = 0; i < 3; i++)
            r->bad |= get_u8(r) != 0;
        return true;
    case F_EOF:
        f->number = get_u64(r);
        get_u64(r);
        return f->stream == STREAM_IN;
    case F_DATA:
        f->number = get_u64(r);
        return f->stream == STREAM_IN;
    case F_CREDIT:
    case F_ACK:
        f->number = get_u64(r);
        return is_output(f);
    case F_SIGNAL:
        f->signal = get_u32(r);
        f->scope = get_u32(r);
        return f->signal <= 64 && f->scope <= 1;
    case F_RESIZE:
        f->rows = get_u16(r);
        f->columns = get_u16(r);
        return true;
    case F_PING:
        return reader_left(r) <= 64;
    case F_CANCEL:
    case F_FORGET:
        return true;
    default:
        return false;
    }
}

bool frame_parse(const uint8_t *data, size_t size, struct frame *out) {
    if (size < FRAME_HEAD)
        return false;
    *out = (struct frame){.type = data[4], .stream = data[5]};
    memcpy(&out->id, data + 8, sizeof out->id);
    struct reader r = reader_of(data + FRAME_HEAD, size - FRAME_HEAD);
    if (!fields(&r, out) || r.bad)
        return false;
    out->payload = (struct span){r.at, (uint32_t)reader_left(&r)};
    bool open_ended = out->type == F_DATA || out->type == F_START || out->type == F_PING;
    return open_ended || out->payload.size == 0;
}
