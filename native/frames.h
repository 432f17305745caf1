/* The guest protocol on the wire: docs/reference/guest-protocol.md. Keep in step with src/barchan/wire/. */
#ifndef BARCHAN_FRAMES_H
#define BARCHAN_FRAMES_H
#include <stdint.h>

#define PROTOCOL_VERSION 1u
#define PROTOCOL_OLDEST 1u
#define FRAME_HEAD 16u
#define FRAME_MAX_PAYLOAD ((2u << 20) + 64u) /* of frames to the guest; its own stay below half of that */
#define FRAME_CHUNK (256u << 10)

/* u32 length | u8 type | u8 stream | u16 zero | u64 id | payload, little-endian */
enum frame_type {
    F_HELLO = 0x01,
    F_START = 0x02,
    F_DATA = 0x03,
    F_EOF = 0x04,
    F_CREDIT = 0x05,
    F_ACK = 0x06,
    F_SIGNAL = 0x07,
    F_FORGET = 0x08,
    F_PING = 0x09,
    F_CANCEL = 0x0a,
    F_RESIZE = 0x0b,
    F_WELCOME = 0x11,
    F_STARTED = 0x12,
    F_DONE = 0x16,
    F_REFUSED = 0x17,
    F_PONG = 0x19,
};

enum stream { STREAM_IN = 0, STREAM_OUT = 1, STREAM_ERR = 2 };

enum op_kind {
    OP_EXEC = 1,
    OP_STAT = 2,
    OP_LIST = 3,
    OP_READ = 4,
    OP_WRITE = 5,
    OP_MKDIR = 6,
    OP_REMOVE = 7,
    OP_RENAME = 8,
    OP_GET_TREE = 9,
    OP_PUT_TREE = 10,
    OP_PROCESSES = 11,
    OP_RUN = 12,
};

enum exec_flag { EXEC_STDIN = 1, EXEC_MERGE = 2, EXEC_KEEP_BACKGROUND = 4, EXEC_TTY = 8, EXEC_SHELL = 16 };

enum outcome {
    OUT_EXITED = 0,
    OUT_SIGNALED = 1,
    OUT_TIMED_OUT = 2,
    OUT_CANCELLED = 3,
    OUT_FAILED = 4, /* code is an errno, detail names the step */
};

enum refusal { REFUSE_KNOWN = 1, REFUSE_BAD = 2, REFUSE_BUSY = 3 };
#endif
