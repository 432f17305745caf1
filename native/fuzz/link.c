/* Input: u8 seed (top bit: hang up halfway), u8 manners of the connection, then what the host sends. The guest's connection and
 * its table of operations are the product's; operations themselves are scripted here: they write as many bytes as the
 * request's timeout_ms or the input says, each byte a function of its place. Everything that the guest sends is checked. */
#include "../guest.h"
#include "../link_parse.h"
#include "fuzz.h"

#include <errno.h>
#include <sys/epoll.h>

#define LISTENER 10
#define CONNECTION 20
#define TURNS_MAX 400

/* ---- what the guest says ---- */

static uint8_t heard[FRAME_HEAD + FRAME_MAX_PAYLOAD];
static size_t heard_size;
static bool welcomed;

static uint8_t byte_at(uint64_t id, uint64_t offset) {
    return (uint8_t)(id * 7 + offset * 31 + (offset >> 8));
}

static void check_data(const struct op *op, uint64_t id, uint8_t stream, const uint8_t *payload, uint32_t size) {
    uint64_t offset;
    HOLDS(size >= 8 && (stream == STREAM_OUT || stream == STREAM_ERR));
    memcpy(&offset, payload, sizeof offset);
    for (uint32_t i = 8; i < size; i++)
        HOLDS(payload[i] == byte_at(id, offset + i - 8));
    if (op)
        HOLDS(offset + size - 8 <= op->out[stream - STREAM_OUT].credit);
}

static void check_frame(const uint8_t *frame, uint32_t size) {
    uint64_t id;
    memcpy(&id, frame + 8, sizeof id);
    HOLDS(welcomed == (frame[4] != F_WELCOME));
    welcomed = true;
    switch (frame[4]) {
    case F_WELCOME:
        HOLDS(size >= 24 && (size - 24) % 48 == 0);
        return;
    case F_DATA:
        check_data(ops_find(id), id, frame[5], frame + FRAME_HEAD, size);
        return;
    case F_EOF:
        HOLDS(size == 16);
        return;
    case F_CREDIT:
        HOLDS(size == 8 && frame[5] == STREAM_IN);
        return;
    case F_DONE:
        HOLDS(size >= 48);
        return;
    default:
        HOLDS(frame[4] == F_STARTED || frame[4] == F_REFUSED || frame[4] == F_PONG);
    }
}

static void hear(const uint8_t *data, size_t size) {
    while (size) {
        HOLDS(heard_size < sizeof heard);
        size_t n = sizeof heard - heard_size < size ? sizeof heard - heard_size : size;
        memcpy(heard + heard_size, data, n);
        heard_size += n;
        data += n;
        size -= n;
        size_t at = 0;
        for (long whole; (whole = frame_size(heard + at, heard_size - at)) != 0 && (size_t)whole <= heard_size - at; at += (size_t)whole) {
            HOLDS(whole > 0);
            check_frame(heard + at, (uint32_t)whole - FRAME_HEAD);
        }
        memmove(heard, heard + at, heard_size -= at);
    }
}

/* ---- the connection ---- */

enum manners { CUT_READS = 1, SHORT_WRITES = 2, NO_READER = 4 };

static const uint8_t *coming;
static size_t coming_size;
static uint32_t state;
static uint8_t manners;

int fake_accept(void) {
    heard_size = 0;
    welcomed = false;
    return CONNECTION;
}

ssize_t fake_recv(void *into, size_t room) {
    size_t n = manners & CUT_READS ? 1 + dice(&state, 60) : room;
    n = n < coming_size ? n : coming_size;
    n = n < room ? n : room;
    if (!n) {
        errno = EAGAIN;
        return -1;
    }
    memcpy(into, coming, n);
    coming += n;
    coming_size -= n;
    return (ssize_t)n;
}

static size_t taken(size_t size) {
    if (manners & NO_READER || (manners & SHORT_WRITES && dice(&state, 3) == 0))
        return 0;
    size_t n = manners & SHORT_WRITES ? 1 + dice(&state, 6000) : size;
    return n < size ? n : size;
}

ssize_t fake_send(const void *data, size_t size) {
    size_t n = taken(size);
    hear(data, n);
    errno = EAGAIN;
    return n || !size ? (ssize_t)n : -1;
}

ssize_t fake_sendmsg(const struct msghdr *message) {
    ssize_t total = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        ssize_t n = fake_send(message->msg_iov[i].iov_base, message->msg_iov[i].iov_len);
        if (n > 0)
            total += n;
        if (n < (ssize_t)message->msg_iov[i].iov_len)
            break;
    }
    errno = EAGAIN;
    return total ? total : -1;
}

/* ---- the loop ---- */

uint8_t scratch[SCRATCH];
static struct source *listener, *connection;
static void *garbage[4096];
static size_t garbage_count;
static uint64_t now;

void source_watch(struct source *source, uint32_t events) {
    HOLDS(source->fd >= 0);
    source->events = events;
    if (source->fd == LISTENER)
        listener = source;
    else
        connection = source;
}

void source_close(struct source *source) {
    source->fd = -1;
    source->events = 0;
}

uint64_t monotonic_ns(void) {
    return now;
}

void free_later(void *block) {
    HOLDS(garbage_count < sizeof garbage / sizeof *garbage);
    garbage[garbage_count++] = block;
}

static void turn(uint64_t passed) {
    now += passed;
    if (connection && connection->fd >= 0)
        connection->ready(connection, EPOLLIN | EPOLLOUT);
    ops_run();
    link_flush();
    while (garbage_count)
        free(garbage[--garbage_count]);
}

/* ---- scripted operations ---- */

struct script {
    uint32_t left;
};

static int scripts;

static void emit_some(struct op *op, struct script *s, int index) {
    struct output *out = &op->out[index];
    uint32_t room = ring_room(&out->ring), n = s->left < room ? s->left : room;
    if (n > SCRATCH)
        n = SCRATCH;
    for (uint32_t i = 0; i < n; i++)
        scratch[i] = byte_at(op->id, out->produced + i);
    HOLDS(ring_append(&out->ring, scratch, n));
    out->produced += n;
    s->left -= n;
    link_ready(op);
}

static bool script_step(struct op *op) {
    struct script *s = op->state;
    struct ring *in = &op->in.ring;
    if (op->in.used) {
        uint32_t n = in->used < 3000 ? in->used : 3000;
        HOLDS(ring_peek(in, scratch, n) == n);
        ring_consume(in, n);
        s->left += n;
        ops_input_taken(op);
    }
    uint32_t before = s->left;
    if (!op->out[0].used)
        s->left = 0;
    else if (s->left)
        emit_some(op, s, op->out[1].used ? (int)(op->out[0].produced & 1) : 0);
    if (!s->left && !in->used && (!op->in.used || op->in.eof))
        op_finish(op, OUT_EXITED, 7, "script", 6);
    return !op->done && (in->used || (s->left && s->left < before));
}

static void script_cancel(struct op *op) {
    op_finish(op, OUT_CANCELLED, 0, NULL, 0);
}

static void script_expire(struct op *op) {
    op_finish(op, OUT_TIMED_OUT, 0, NULL, 0);
}

static void script_signal(struct op *op, uint32_t number, bool everyone) {
    HOLDS(number <= 64);
    if (everyone)
        op_finish(op, OUT_SIGNALED, (int32_t)number, NULL, 0);
}

static void script_resize(struct op *op, uint16_t rows, uint16_t columns) {
    ((struct script *)op->state)->left += (rows + columns) & 0xff;
    ops_wake(op);
}

static void script_release(struct op *op) {
    free(op->state);
    op->state = NULL;
    scripts--;
}

static const struct op_class script_class = {
    .input = ops_wake,
    .space = ops_wake,
    .expire = script_expire,
    .cancel = script_cancel,
    .signal = script_signal,
    .resize = script_resize,
    .step = script_step,
    .release = script_release,
};

static void script_start(struct op *op, const struct request *request) {
    struct script *s = malloc(sizeof *s);
    HOLDS(s);
    s->left = request->timeout_ms & 0x3ffff;
    op->state = s;
    op->class = &script_class;
    scripts++;
    op_started(op, 1);
    if (request->grace_ms)
        ops_set_deadline(op, now + request->grace_ms * (uint64_t)1000000);
    ops_wake(op);
}

void exec_start(struct op *op, const struct request *request) {
    script_start(op, request);
}

void run_start(struct op *op, const struct request *request) {
    script_start(op, request);
}

void file_start(struct op *op, const struct request *request) {
    script_start(op, request);
}

/* ---- one input ---- */

static void say(const uint8_t *data, size_t size) {
    coming = data;
    coming_size = size;
    int turns = 0;
    while (coming_size && connection->fd >= 0 && turns++ < TURNS_MAX)
        turn(300000);
    for (turns = 0; turns < 6; turns++)
        turn(1000000);
    coming_size = 0;
}

static void dial(void) {
    listener->ready(listener, EPOLLIN);
}

/* Ends every operation and lets the guest forget it, as a host that comes back does. */
static void clean_up(void) {
    static const uint8_t hello[] = {4, 0, 0, 0, F_HELLO, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0};
    manners = 0;
    dial();
    say(hello, sizeof hello);
    for (struct op *op = ops_first(), *next; op; op = next) {
        next = op->next;
        op_finish(op, OUT_CANCELLED, 0, NULL, 0);
        ops_forget(op);
    }
    turn(1);
    turn(1);
    link_hang_up();
    ops_last = 0;
    HOLDS(ops_count == 0 && scripts == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2)
        return 0;
    if (!listener)
        HOLDS(link_listen(LISTENER) == 0);
    state = data[0];
    manners = data[1] & 7;
    size_t first = data[0] & 0x80 ? (size - 2) * (data[1] >> 3) / 32 : size - 2;
    dial();
    say(data + 2, first);
    if (first < size - 2) {
        dial();
        say(data + 2 + first, size - 2 - first);
    }
    clean_up();
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    uint32_t dices = seed;
    if (size < 2 || dice(&dices, 4) == 0)
        return LLVMFuzzerMutate(data, size, most);
    return mutate_frames(data, size, most, 2, &dices);
}
