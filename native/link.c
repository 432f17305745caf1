/* The connection to the host. Frames that are not output of an operation, and the rest of a frame that the socket did not
 * take, wait in `pending`; output waits where it is and is sent when `pending` is empty. So a slow host costs
 * memory only up to PENDING_MAX, and a new connection simply starts again from the first byte kept. */
#include "guest.h"
#include "link_parse.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#define PENDING_MAX (4u << 20)
#define COPY_BELOW 8192u /* smaller frames are gathered and leave in one system call */
#define READ_AHEAD (64u << 10)
#define SEND_BUFFER (512 << 10)
#define LAZY_NS 1000000u

static void listener_ready(struct source *source, uint32_t events);
static void connection_ready(struct source *source, uint32_t events);
static struct source listener = {listener_ready, -1, 0}, connection = {connection_ready, -1, 0};

static uint8_t small_in[16 << 10];
static uint8_t *in = small_in;
static size_t in_size, in_cap = sizeof small_in;
static uint8_t *pending;
static size_t pending_at, pending_size, pending_cap;
static struct op *ready_first, *ready_last;
static bool urgent; /* something in `pending` should leave as soon as the socket takes it */
static uint64_t lazy_since;
static bool greeted, farewell, blocked; /* blocked: the socket took less than it was given */
static uint64_t boot;
static int spare = -1; /* given up for a connection when descriptors run out: the host must get through then, too */

static bool link_up(void) {
    return connection.fd >= 0;
}

static void drop_input(void) {
    if (in != small_in)
        free(in);
    in = small_in;
    in_cap = sizeof small_in;
    in_size = 0;
}

static void drop_pending(void) {
    free(pending);
    pending = NULL;
    pending_at = pending_size = pending_cap = 0;
}

static void keep_spare(void) {
    if (spare < 0)
        spare = fcntl(listener.fd, F_DUPFD_CLOEXEC, 0);
}

void link_hang_up(void) {
    if (!link_up())
        return;
    shutdown(connection.fd, SHUT_RDWR);
    source_close(&connection);
    keep_spare();
    drop_pending();
    greeted = farewell = false;
}

/* ---- sending ---- */

static bool pending_append(const void *data, size_t size) {
    if (pending_at && pending_at == pending_size)
        pending_at = pending_size = 0;
    if (pending_size + size > pending_cap) {
        size_t cap = pending_cap ? pending_cap : 4096;
        while (cap < pending_size + size)
            cap *= 2;
        uint8_t *grown = cap <= 2 * PENDING_MAX ? realloc(pending, cap) : NULL;
        if (!grown)
            return false;
        pending = grown;
        pending_cap = cap;
    }
    memcpy(pending + pending_size, data, size);
    pending_size += size;
    return pending_size - pending_at <= PENDING_MAX;
}

void link_control(uint8_t type, uint8_t stream, uint64_t id, const void *payload, uint32_t size) {
    uint8_t head[FRAME_HEAD];
    if (!link_up() || (!greeted && type != F_WELCOME))
        return;
    frame_head(head, size, type, stream, id);
    if (!pending_append(head, sizeof head) || (size && !pending_append(payload, size)))
        link_hang_up();
    urgent |= type != F_STARTED && type != F_EOF;
}

/* True when nothing waits any more. */
static bool pending_flush(void) {
    while (link_up() && pending_at < pending_size) {
        ssize_t n = send(connection.fd, pending + pending_at, pending_size - pending_at, MSG_NOSIGNAL);
        if (n >= 0)
            pending_at += (size_t)n;
        else if (errno == EAGAIN) {
            blocked = true;
            return false;
        } else if (errno != EINTR)
            link_hang_up();
    }
    if (pending_cap > (64u << 10))
        drop_pending();
    pending_at = pending_size = 0;
    return link_up();
}

static void send_pieces(struct iovec *piece, int count) {
    struct msghdr message = {.msg_iov = piece, .msg_iovlen = (size_t)count};
    ssize_t n = sendmsg(connection.fd, &message, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN && errno != EINTR) {
        link_hang_up();
        return;
    }
    size_t sent = n < 0 ? 0 : (size_t)n;
    for (int i = 0; i < count; i++) {
        size_t skip = sent < piece[i].iov_len ? sent : piece[i].iov_len;
        sent -= skip;
        blocked |= skip < piece[i].iov_len;
        urgent |= blocked;
        if (skip < piece[i].iov_len && !pending_append((uint8_t *)piece[i].iov_base + skip, piece[i].iov_len - skip)) {
            link_hang_up();
            return;
        }
    }
}

static void send_data(struct op *op, int index, uint32_t size) {
    struct output *out = &op->out[index];
    uint8_t head[FRAME_HEAD + 8];
    struct iovec piece[3] = {{head, sizeof head}};
    frame_head(head, size + 8, F_DATA, (uint8_t)(STREAM_OUT + index), op->id);
    memcpy(head + FRAME_HEAD, &out->sent, 8);
    int count = 1 + ring_used_part(&out->ring, (uint32_t)(out->sent - out->base), size, piece + 1);
    out->sent += size;
    if (size >= COPY_BELOW) {
        if (pending_flush())
            send_pieces(piece, count);
        else if (link_up())
            out->sent -= size;
        return;
    }
    for (int i = 0; i < count; i++)
        if (!pending_append(piece[i].iov_base, piece[i].iov_len)) {
            link_hang_up();
            return;
        }
    urgent = true;
}

/* Sends at most one frame of the stream; true if there may be more to send now. */
static bool emit_stream(struct op *op, int index) {
    struct output *out = &op->out[index];
    uint64_t end = output_end(out), upto = end < out->credit ? end : out->credit;
    if (out->sent < upto) {
        uint64_t left = upto - out->sent;
        send_data(op, index, left > FRAME_CHUNK ? FRAME_CHUNK : (uint32_t)left);
        return true;
    }
    if (out->used && out->ended && !out->eof_sent && out->sent == end) {
        uint64_t payload[2] = {out->produced, out->dropped};
        out->eof_sent = true;
        link_control(F_EOF, (uint8_t)(STREAM_OUT + index), op->id, payload, sizeof payload);
        return true;
    }
    return false;
}

/* The large one is not on the stack, of which every page that was ever touched stays in memory while the sandbox waits. */
static void emit_done(struct op *op) {
    static uint8_t large[16384];
    uint8_t small[256];
    const struct result *r = &op->result;
    bool fits = r->detail_size <= sizeof small / 2;
    uint8_t *payload = fits ? small : large;
    struct writer w = writer_of(payload, fits ? sizeof small : sizeof large);
    put_u32(&w, r->outcome);
    put_u32(&w, (uint32_t)r->code);
    put_u64(&w, r->wall_ns);
    put_u64(&w, r->user_us);
    put_u64(&w, r->system_us);
    put_u64(&w, r->max_rss);
    put_u32(&w, r->background);
    put_bytes(&w, r->detail, r->detail_size);
    op->done_sent = true;
    link_control(F_DONE, 0, op->id, payload, (uint32_t)(w.at - payload));
}

static bool emit(struct op *op) {
    bool more = false, ended = true;
    for (int i = 0; i < 2; i++) {
        more |= emit_stream(op, i);
        ended &= !op->out[i].used || op->out[i].eof_sent;
    }
    if (!more && ended && op->done && !op->done_sent)
        emit_done(op);
    return more;
}

void link_ready(struct op *op) {
    if (op->queued)
        return;
    op->queued = true;
    op->next_ready = NULL;
    if (ready_last)
        ready_last->next_ready = op;
    else
        ready_first = op;
    ready_last = op;
}

static struct op *take_ready(void) {
    struct op *op = ready_first;
    ready_first = op->next_ready;
    if (!ready_first)
        ready_last = NULL;
    op->queued = false;
    return op;
}

static bool may_send(void) {
    return link_up() && greeted && !blocked && pending_size - pending_at < READ_AHEAD;
}

static void emit_all(void) {
    while (ready_first && may_send()) {
        struct op *op = take_ready();
        if (op->id == 0) {
            if (!op->runnable)
                free_later(op);
        } else if (emit(op))
            link_ready(op);
        if (pending_size - pending_at >= COPY_BELOW)
            pending_flush();
    }
}

/* Whether what is pending may still wait for company. */
static bool may_wait(void) {
    if (urgent || pending_at == pending_size) {
        lazy_since = 0;
        return false;
    }
    uint64_t now = monotonic_ns();
    if (!lazy_since)
        lazy_since = now;
    return now - lazy_since < LAZY_NS;
}

bool link_flush(void) {
    bool empty;
    do {
        blocked = false;
        emit_all();
        if (may_wait())
            return true;
        lazy_since = 0;
        empty = pending_flush();
        urgent = !empty;
    } while (empty && greeted && ready_first); /* the host read just now: no event will tell of room again */
    if (empty && farewell)
        link_hang_up();
    if (link_up())
        source_watch(&connection, EPOLLIN | (empty ? 0u : EPOLLOUT));
    return false;
}

/* ---- greeting ---- */

static void resume(struct op *op) {
    for (int i = 0; i < 2; i++) {
        op->out[i].sent = op->out[i].base;
        op->out[i].credit = 0;
        op->out[i].eof_sent = false;
    }
    op->done_sent = false;
    link_ready(op);
}

static void put_known(struct writer *w, const struct op *op) {
    put_u64(w, op->id);
    put_u8(w, op->kind);
    put_u8(w, op->done);
    put_u16(w, 0);
    put_u32(w, op->pid);
    put_u64(w, op->in.received);
    put_u64(w, op->out[0].base);
    put_u64(w, op->out[1].base);
    put_u64(w, 0);
}

static void welcome(uint16_t version) {
    size_t size = 24 + (size_t)ops_count * 48;
    uint8_t *payload = malloc(size);
    if (!payload) {
        link_hang_up();
        return;
    }
    struct writer w = writer_of(payload, size);
    put_u16(&w, version);
    put_u16(&w, 0);
    put_u32(&w, ops_count);
    put_u64(&w, boot);
    put_u64(&w, ops_last);
    for (struct op *op = ops_first(); op; op = op->next)
        put_known(&w, op);
    link_control(F_WELCOME, 0, 0, payload, (uint32_t)size);
    free(payload);
}

static void hello(const struct frame *f) {
    bool common = f->oldest <= PROTOCOL_VERSION && f->newest >= PROTOCOL_OLDEST;
    welcome(common ? PROTOCOL_VERSION : 0);
    farewell = !common;
    greeted = common;
    if (!common)
        return;
    for (struct op *op = ops_first(); op; op = op->next) {
        resume(op);
        if (!op->in.eof)
            ops_credit_input(op);
    }
}

/* ---- receiving ---- */

static void on_operation(const struct frame *f, struct op *op) {
    switch (f->type) {
    case F_DATA:
        ops_data(op, f->number, f->payload);
        return;
    case F_EOF:
        if (f->number != op->in.received && op->in.used)
            link_hang_up();
        else
            ops_eof(op);
        return;
    case F_CREDIT:
        if (f->number > op->out[f->stream - STREAM_OUT].credit)
            op->out[f->stream - STREAM_OUT].credit = f->number;
        link_ready(op);
        return;
    case F_ACK:
        ops_ack(op, f->stream, f->number);
        return;
    case F_SIGNAL:
        if (!op->done && op->class && op->class->signal)
            op->class->signal(op, f->signal, f->scope == 1);
        return;
    case F_RESIZE:
        if (!op->done && op->class && op->class->resize)
            op->class->resize(op, f->rows, f->columns);
        return;
    case F_CANCEL:
        if (!op->done && op->class)
            op->class->cancel(op);
        return;
    default:
        ops_forget(op);
    }
}

static void on_frame(const struct frame *f) {
    if ((f->type == F_HELLO) == greeted) {
        link_hang_up();
        return;
    }
    struct op *op = NULL;
    switch (f->type) {
    case F_HELLO:
        hello(f);
        return;
    case F_PING:
        link_control(F_PONG, 0, f->id, f->payload.data, f->payload.size);
        return;
    case F_START:
        ops_start(f->id, f->kind, f->payload);
        return;
    default:
        op = ops_find(f->id);
        if (op)
            on_operation(f, op);
    }
}

/* Handles the whole frames that `in` holds; false when the rest needs more room than there is memory for. */
static bool consume(void) {
    size_t at = 0;
    long size = 0;
    while (link_up() && !farewell) {
        struct frame f;
        size = frame_size(in + at, in_size - at);
        if (size < 0 || (size && (size_t)size <= in_size - at && !frame_parse(in + at, (size_t)size, &f))) {
            link_hang_up();
            break;
        }
        if (!size || (size_t)size > in_size - at)
            break;
        on_frame(&f);
        at += (size_t)size;
    }
    if (!link_up() || at == in_size) {
        drop_input();
        return true;
    }
    memmove(in, in + at, in_size - at);
    in_size -= at;
    if ((size_t)size <= in_cap)
        return true;
    uint8_t *grown = malloc((size_t)size + READ_AHEAD);
    if (!grown)
        return false;
    memcpy(grown, in, in_size);
    size_t kept = in_size;
    drop_input();
    in = grown;
    in_size = kept;
    in_cap = (size_t)size + READ_AHEAD;
    return true;
}

static void connection_ready(struct source *source, uint32_t events) {
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return; /* writable: the loop flushes after each batch */
    ssize_t n = recv(source->fd, in + in_size, in_cap - in_size, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        link_hang_up();
        drop_input();
        return;
    }
    in_size += (size_t)n;
    if (!consume())
        link_hang_up();
}

static int accept_connection(int listener_fd) {
    int fd = accept4(listener_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0 || (errno != EMFILE && errno != ENFILE))
        return fd;
    link_hang_up();
    if (spare >= 0)
        close(spare);
    spare = -1;
    return accept4(listener_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

static void listener_ready(struct source *source, uint32_t events) {
    (void)events;
    int size = SEND_BUFFER, fd = accept_connection(source->fd);
    if (fd < 0)
        return;
    link_hang_up();
    drop_input();
    keep_spare();
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    connection.fd = fd;
    connection.events = 0;
    source_watch(&connection, EPOLLIN);
}

int link_listen(int fd) {
    if (getrandom(&boot, sizeof boot, 0) != sizeof boot)
        return -1;
    listener.fd = fd;
    keep_spare();
    source_watch(&listener, EPOLLIN);
    return 0;
}
