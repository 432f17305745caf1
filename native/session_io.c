/* The pipes of a program: what it writes goes to the operation's rings as far as there is room, its input comes from there. */
#include "sessions.h"
#include "terminal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define READ_TARGET (256u << 10)
#define RESUME_ROOM (128u << 10)
#define PUMP_MAX (512u << 10)
#define MAX_DRAINS 4096u
#define PACE_NS 1000000u
#define PACE_FAST (64u << 10) /* in about PACE_NS */
#define NAP_NS 200000u
#define TERMINAL_DRAIN (1 << 20)

/* ---- pipes of background processes whose operation is over: read, so that they never block, and dropped ---- */

static uint32_t drains;

static void drain_ready(struct source *source, uint32_t events) {
    ssize_t n = 1;
    (void)events;
    for (int i = 0; i < 8 && n > 0; i++)
        n = read(source->fd, scratch, sizeof scratch);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        source_close(source);
        free_later(source);
        drains--;
    }
}

static void drain_for_ever(int fd) {
    struct source *source = drains < MAX_DRAINS ? malloc(sizeof *source) : NULL;
    if (!source) {
        close(fd);
        return;
    }
    drains++;
    *source = (struct source){drain_ready, fd, 0};
    source_watch(source, EPOLLIN);
}

/* ---- output ---- */

/* Whether somebody still holds the other end: background processes that live on. */
static bool still_open(const struct source *pipe) {
    struct pollfd now = {pipe->fd, POLLIN, 0};
    return poll(&now, 1, 0) == 0 || now.revents & POLLIN;
}

/* ---- rests ----
 *
 * A program that writes fast in small pieces would wake the guest for each, and each would become a frame: its pipe is
 * left alone for a while, and then read at once. */

static struct output *napping;

static void stop_nap(struct output *out) {
    if (!out->nap_until)
        return;
    struct output **at = &napping;
    while (*at != out)
        at = &(*at)->next_nap;
    *at = out->next_nap;
    out->nap_until = 0;
}

static void pace(struct output *out, uint32_t moved) {
    uint64_t now = monotonic_ns(), elapsed = now - out->pace_since;
    if (elapsed > PACE_NS) {
        out->pace_bytes = elapsed > 4 * PACE_NS ? 0 : out->pace_bytes / 2;
        out->pace_since = now;
    }
    out->pace_bytes += moved;
    if (out->pace_bytes < PACE_FAST || moved >= FRAME_CHUNK || !out->pipe.events)
        return;
    source_watch(&out->pipe, 0);
    out->nap_until = now + NAP_NS;
    out->next_nap = napping;
    napping = out;
}

static struct output *rested(uint64_t now) {
    struct output *out = napping;
    while (out && out->nap_until > now)
        out = out->next_nap;
    return out;
}

uint64_t outputs_wake(void) {
    uint64_t next = NEVER, now = napping ? monotonic_ns() : 0;
    for (struct output *out = rested(now); out; out = rested(now)) {
        stop_nap(out);
        source_watch(&out->pipe, EPOLLIN);
        session_output_ready(&out->pipe, 0);
    }
    for (const struct output *out = napping; out; out = out->next_nap)
        next = out->nap_until - now < next ? out->nap_until - now : next;
    return next;
}

void session_hand_over(struct output *from, struct output *to) {
    stop_nap(from);
    source_watch(&from->pipe, 0);
    to->pipe = (struct source){session_output_ready, from->pipe.fd, 0};
    to->wide = from->wide;
    from->pipe.fd = -1;
}

/* `closed`: nobody is left who could write. */
static void end_output(struct output *out, bool closed) {
    out->ended = true;
    stop_nap(out);
    if (out->owner && !closed) {
        session_hand_over(out, out->owner);
        source_watch(&out->owner->pipe, EPOLLIN);
    } else if (out->draining && !out->terminal && still_open(&out->pipe)) {
        source_watch(&out->pipe, 0);
        drain_for_ever(out->pipe.fd);
        out->pipe.fd = -1;
    } else {
        source_close(&out->pipe);
        if (out->owner)
            out->owner->ended = true;
    }
    link_ready(out->op);
}

/* How many bytes the next read may take; 0: there is no room now. */
static uint32_t appetite(struct output *out) {
    uint64_t most = READ_TARGET;
    uint64_t allowed = out->limit - out->produced;
    if (out->draining && out->drain < most)
        most = out->drain;
    if (allowed < most)
        most = allowed;
    uint32_t want = out->wide ? READ_TARGET : RING_MIN;
    if (!ring_reserve(&out->ring, want < most ? want : (uint32_t)most) && !out->ring.cap)
        return 0;
    uint32_t room = out->ring.cap - out->ring.used;
    return most < room ? (uint32_t)most : room;
}

static ssize_t read_and_drop(struct output *out) {
    size_t size = out->draining && out->drain < sizeof scratch ? out->drain : sizeof scratch;
    ssize_t n = read(out->pipe.fd, scratch, size);
    if (n > 0)
        out->dropped += (uint64_t)n;
    return n;
}

static void widen(struct output *out) {
    if (out->wide || out->terminal)
        return;
    out->wide = true;
    fcntl(out->pipe.fd, F_SETPIPE_SZ, READ_TARGET);
}

/* One read. False: nothing more to read now. */
static bool pump_once(struct output *out, uint32_t *moved) {
    bool dropping = out->produced >= out->limit;
    if (out->draining && !out->drain) {
        end_output(out, false);
        return false;
    }
    uint32_t size = dropping ? (uint32_t)sizeof scratch : appetite(out);
    if (!size) {
        source_watch(&out->pipe, 0);
        return false;
    }
    ssize_t n = dropping ? read_and_drop(out) : ring_read(&out->ring, out->pipe.fd, size);
    if (n < 0 && errno == EINTR)
        return true;
    if (n <= 0) {
        bool closed = n == 0 || errno != EAGAIN;
        if (closed || out->draining)
            end_output(out, closed);
        return false;
    }
    out->produced += (uint64_t)n;
    out->drain -= out->draining ? (uint64_t)n : 0;
    *moved += (uint32_t)n;
    if (!dropping)
        link_ready(out->op);
    if ((size_t)n == size && size >= RING_MIN)
        widen(out);
    return (size_t)n == size || out->draining || out->terminal;
}

void session_drop_output(struct output *out) {
    out->draining = true;
    if (!out->ended)
        end_output(out, false);
    ring_release(&out->ring);
}

static void pump(struct output *out) {
    uint32_t moved = 0;
    while (out->pipe.fd >= 0 && moved < PUMP_MAX && pump_once(out, &moved))
        ;
    if (moved && out->pipe.fd >= 0 && !out->draining)
        pace(out, moved);
}

void session_output_ready(struct source *source, uint32_t events) {
    struct output *out = container_of(source, struct output, pipe);
    (void)events;
    pump(out);
    if (out->ended)
        out->op->class->drained(out->op);
}

void session_space(struct op *op) {
    for (int i = 0; i < 2; i++) {
        struct output *out = &op->out[i];
        if (out->pipe.fd >= 0 && !out->pipe.events && !out->nap_until && ring_room(&out->ring) >= RESUME_ROOM)
            source_watch(&out->pipe, EPOLLIN);
    }
}

/* A terminal hands its bytes on in its own time, and tells no number. */
void session_start_drain(struct output *out) {
    int waiting = TERMINAL_DRAIN;
    if (out->draining || out->ended || !out->used)
        return;
    stop_nap(out);
    source_watch(&out->pipe, EPOLLIN);
    if (!out->terminal && ioctl(out->pipe.fd, FIONREAD, &waiting))
        waiting = 0;
    out->draining = true;
    out->drain = (uint64_t)waiting;
    pump(out);
}

/* ---- input ---- */

void session_feed(struct op *op) {
    struct input *in = &op->in;
    if (in->ring.used)
        in->line_open = in->ring.data[(in->ring.head + in->ring.used - 1) & (in->ring.cap - 1)] != '\n';
    while (in->pipe.fd >= 0 && in->ring.used) {
        if (ring_write(&in->ring, in->pipe.fd, in->ring.used) >= 0 || errno == EINTR)
            continue;
        if (errno == EAGAIN) {
            source_watch(&in->pipe, EPOLLOUT);
            return;
        }
        in->discard = true;
        ring_release(&in->ring);
    }
    if (in->eof && in->terminal && in->pipe.fd >= 0 && !in->discard && !terminal_end_input(in->pipe.fd, in->line_open)) {
        source_watch(&in->pipe, EPOLLOUT);
        return;
    }
    source_watch(&in->pipe, 0);
    if (in->eof || in->discard) {
        source_close(&in->pipe);
        ring_release(&in->ring);
    }
}

void session_input_ready(struct source *source, uint32_t events) {
    struct input *in = container_of(source, struct input, pipe);
    (void)events;
    session_feed(in->op);
    ops_input_taken(in->op);
}
