/* The pipes of a program: what it writes goes to the operation's rings as far as there is room, its input comes from there. */
#include "sessions.h"

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

static void end_output(struct output *out) {
    out->ended = true;
    if (out->draining && still_open(&out->pipe)) {
        source_watch(&out->pipe, 0);
        drain_for_ever(out->pipe.fd);
        out->pipe.fd = -1;
    } else
        source_close(&out->pipe);
    link_ready(out->op);
}

/* How many bytes the next read may take; 0: there is no room now. */
static uint32_t appetite(struct output *out, bool wide) {
    uint64_t most = READ_TARGET;
    uint64_t allowed = ((struct session *)out->op->state)->output_limit - out->produced;
    if (out->draining && out->drain < most)
        most = out->drain;
    if (allowed < most)
        most = allowed;
    uint32_t want = wide ? READ_TARGET : RING_MIN;
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

static void widen(struct session *s, struct output *out) {
    int index = out == &out->op->out[1];
    if (s->wide[index])
        return;
    s->wide[index] = true;
    fcntl(out->pipe.fd, F_SETPIPE_SZ, READ_TARGET);
}

/* One read. False: nothing more to read now. */
static bool pump_once(struct session *s, struct output *out, uint32_t *moved) {
    bool dropping = out->produced >= s->output_limit;
    if (out->draining && !out->drain) {
        end_output(out);
        return false;
    }
    uint32_t size = dropping ? (uint32_t)sizeof scratch : appetite(out, s->wide[out == &out->op->out[1]]);
    if (!size) {
        source_watch(&out->pipe, 0);
        return false;
    }
    ssize_t n = dropping ? read_and_drop(out) : ring_read(&out->ring, out->pipe.fd, size);
    if (n < 0 && errno == EINTR)
        return true;
    if (n <= 0) {
        if (n == 0 || errno != EAGAIN || out->draining)
            end_output(out);
        return false;
    }
    out->produced += (uint64_t)n;
    out->drain -= out->draining ? (uint64_t)n : 0;
    *moved += (uint32_t)n;
    if (!dropping)
        link_ready(out->op);
    if ((size_t)n == size && size >= RING_MIN)
        widen(s, out);
    return (size_t)n == size || out->draining;
}

static void pump(struct output *out) {
    struct session *s = out->op->state;
    uint32_t moved = 0;
    while (out->pipe.fd >= 0 && moved < PUMP_MAX && pump_once(s, out, &moved))
        ;
}

void session_output_ready(struct source *source, uint32_t events) {
    struct output *out = container_of(source, struct output, pipe);
    (void)events;
    pump(out);
    if (out->ended)
        session_progress(out->op);
}

void session_space(struct op *op) {
    for (int i = 0; i < 2; i++) {
        struct output *out = &op->out[i];
        if (out->pipe.fd >= 0 && !out->pipe.events && ring_room(&out->ring) >= RESUME_ROOM)
            source_watch(&out->pipe, EPOLLIN);
    }
}

/* The first process ended: what it wrote is in the pipe now; what comes later is of background processes. */
void session_start_drain(struct output *out) {
    int waiting = 0;
    if (out->draining || out->ended || !out->used)
        return;
    ioctl(out->pipe.fd, FIONREAD, &waiting);
    out->draining = true;
    out->drain = (uint64_t)waiting;
    pump(out);
}

/* ---- input ---- */

void session_feed(struct op *op) {
    struct input *in = &op->in;
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
