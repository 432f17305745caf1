/* Frames from the host as values. Pure: no I/O, no state. */
#ifndef BARCHAN_LINK_PARSE_H
#define BARCHAN_LINK_PARSE_H
#include "bytes.h"
#include "frames.h"

struct frame {
    uint8_t type, stream;
    uint64_t id;
    struct span payload; /* what follows the fixed fields below */
    uint64_t number;     /* DATA offset, EOF total, CREDIT limit, ACK offset */
    uint32_t signal, scope;
    uint16_t oldest, newest, rows, columns;
    uint8_t kind;
};

/* Bytes that the first frame of the buffer takes once it is complete, 0 if its head is not complete yet, -1 if malformed. */
long frame_size(const uint8_t *data, size_t size);
/* Decodes one whole frame of `size` bytes; false if malformed. */
bool frame_parse(const uint8_t *data, size_t size, struct frame *out);
void frame_head(uint8_t head[FRAME_HEAD], uint32_t length, uint8_t type, uint8_t stream, uint64_t id);
#endif
