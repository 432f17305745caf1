/* The table of operations: what the host may ask again, acknowledge or forget. */
#include "guest.h"

#include <stdlib.h>

#define BUCKETS 256u

uint64_t ops_last;
uint32_t ops_count;
static struct op *buckets[BUCKETS], *all, *run_first, *run_last;
static uint64_t soonest = NEVER; /* no deadline is earlier; it may be stale after one was withdrawn */

struct op *ops_find(uint64_t id) {
    struct op *op = buckets[id % BUCKETS];
    while (op && op->id != id)
        op = op->chain;
    return op;
}

struct op *ops_first(void) {
    return all;
}

uint64_t output_end(const struct output *out) {
    return out->base + out->ring.used;
}

static bool takes_input(const struct request *request) {
    return request->kind == OP_WRITE || request->kind == OP_PUT_TREE ||
           (request->kind == OP_EXEC && request->flags & EXEC_STDIN);
}

static uint8_t output_streams(uint8_t kind) {
    if (kind == OP_EXEC || kind == OP_RUN)
        return 2;
    return kind == OP_LIST || kind == OP_READ || kind == OP_GET_TREE || kind == OP_PROCESSES;
}

static void link_in(struct op *op) {
    op->chain = buckets[op->id % BUCKETS];
    buckets[op->id % BUCKETS] = op;
    op->next = all;
    if (all)
        all->prev = op;
    all = op;
    ops_count++;
}

static void link_out(struct op *op) {
    struct op **at = &buckets[op->id % BUCKETS];
    while (*at != op)
        at = &(*at)->chain;
    *at = op->chain;
    if (op->prev)
        op->prev->next = op->next;
    else
        all = op->next;
    if (op->next)
        op->next->prev = op->prev;
    ops_count--;
}

static struct op *op_new(uint64_t id, const struct request *request) {
    struct op *op = calloc(1, sizeof *op);
    if (!op)
        return NULL;
    op->id = id;
    op->kind = request->kind;
    op->begun = monotonic_ns();
    op->deadline = NEVER;
    op->in = (struct input){.pipe.fd = -1, .op = op, .ring.max = INPUT_KEPT, .limit = INPUT_KEPT, .used = takes_input(request)};
    for (int i = 0; i < 2; i++)
        op->out[i] = (struct output){.pipe.fd = -1, .op = op, .ring.max = OUTPUT_KEPT, .used = i < output_streams(op->kind)};
    link_in(op);
    return op;
}

static void refuse(uint64_t id, uint32_t reason, const char *text) {
    uint8_t payload[64];
    struct writer w = writer_of(payload, sizeof payload);
    put_u32(&w, reason);
    put_bytes(&w, text, (uint32_t)strlen(text));
    link_control(F_REFUSED, 0, id, payload, (uint32_t)(w.at - payload));
}

/* The request is not on the stack, of which every page that was ever touched stays in memory while the sandbox waits. */
void ops_start(uint64_t id, uint8_t kind, struct span body) {
    static struct request request;
    struct op *op = NULL;
    if (id <= ops_last)
        refuse(id, REFUSE_KNOWN, "this id was started before");
    else if (ops_count >= MAX_OPS)
        refuse(id, REFUSE_BUSY, "too many operations");
    else if (!request_parse(kind, body, &request))
        refuse(id, REFUSE_BAD, "malformed request");
    else {
        op = op_new(id, &request);
        if (!op)
            refuse(id, REFUSE_BUSY, "out of memory");
        else {
            ops_last = id;
            (kind == OP_EXEC ? exec_start : kind == OP_RUN ? run_start : file_start)(op, &request);
        }
        request_release(&request);
    }
}

void op_started(struct op *op, uint32_t pid) {
    op->pid = pid;
    link_control(F_STARTED, 0, op->id, &pid, sizeof pid);
}

void op_finish(struct op *op, uint8_t outcome, int32_t code, const void *detail, uint32_t size) {
    if (op->done)
        return;
    op->done = true;
    op->deadline = NEVER;
    op->result.outcome = outcome;
    op->result.code = code;
    op->result.wall_ns = monotonic_ns() - op->begun;
    op->result.detail = size ? malloc(size) : NULL;
    if (op->result.detail) {
        memcpy(op->result.detail, detail, size);
        op->result.detail_size = size;
    }
    op->out[0].ended = op->out[1].ended = true;
    op->in.discard = true;
    ring_release(&op->in.ring);
    link_ready(op);
}

void op_fail(struct op *op, int error, const char *step) {
    op_finish(op, OUT_FAILED, error, step, (uint32_t)strlen(step));
}

void ops_forget(struct op *op) {
    if (!op->done)
        return;
    link_out(op);
    if (op->class && op->class->release)
        op->class->release(op);
    ring_release(&op->in.ring);
    for (int i = 0; i < 2; i++)
        ring_release(&op->out[i].ring);
    free(op->result.detail);
    op->result.detail = NULL;
    op->class = NULL;
    op->id = 0;
    if (!op->queued && !op->runnable)
        free_later(op);
}

/* ---- input ---- */

void ops_credit_input(struct op *op) {
    struct input *in = &op->in;
    if (!in->used)
        return;
    in->limit = in->received - in->ring.used + INPUT_KEPT;
    link_control(F_CREDIT, STREAM_IN, op->id, &in->limit, sizeof in->limit);
}

void ops_input_taken(struct op *op) {
    struct input *in = &op->in;
    if (!in->eof && in->received - in->ring.used + INPUT_KEPT - in->limit >= INPUT_KEPT / 4)
        ops_credit_input(op);
}

void ops_data(struct op *op, uint64_t offset, struct span data) {
    struct input *in = &op->in;
    uint64_t end = offset + data.size;
    if (!in->used || offset > in->received || end < offset || end > in->limit || (in->eof && end > in->received)) {
        link_hang_up();
        return;
    }
    if (end <= in->received)
        return;
    uint32_t known = (uint32_t)(in->received - offset), fresh = data.size - known;
    if (!in->discard && !ring_append(&in->ring, data.data + known, fresh)) {
        link_hang_up(); /* no memory: nothing of it counts as taken, the host sends it again */
        return;
    }
    in->received = end;
    if (op->class && op->class->input && !op->done)
        op->class->input(op);
    ops_input_taken(op);
}

void ops_eof(struct op *op) {
    if (!op->in.used || op->in.eof)
        return;
    op->in.eof = true;
    if (op->class && op->class->input && !op->done)
        op->class->input(op);
}

/* ---- output ---- */

void ops_ack(struct op *op, uint8_t stream, uint64_t offset) {
    struct output *out = &op->out[stream - STREAM_OUT];
    if (offset <= out->base)
        return;
    if (offset > output_end(out)) {
        link_hang_up();
        return;
    }
    ring_consume(&out->ring, (uint32_t)(offset - out->base));
    out->base = offset;
    if (out->sent < offset)
        out->sent = offset; /* the host has it from the connection before */
    if (op->done && !out->ring.used)
        ring_release(&out->ring);
    if (!op->done && op->class && op->class->space)
        op->class->space(op);
}

/* ---- work and deadlines ---- */

void ops_set_deadline(struct op *op, uint64_t when) {
    op->deadline = when;
    if (when < soonest)
        soonest = when;
}

void ops_wake(struct op *op) {
    if (op->runnable || op->done)
        return;
    op->runnable = true;
    op->next_run = NULL;
    if (run_last)
        run_last->next_run = op;
    else
        run_first = op;
    run_last = op;
}

static void run_slices(void) {
    struct op *op = run_first;
    run_first = run_last = NULL;
    while (op) {
        struct op *next = op->next_run;
        op->runnable = false;
        if (op->id == 0) {
            if (!op->queued)
                free_later(op);
        } else if (!op->done && op->class->step(op))
            ops_wake(op);
        op = next;
    }
}

static void run_deadlines(uint64_t now) {
    soonest = NEVER;
    for (struct op *op = all, *next; op; op = next) {
        next = op->next;
        if (op->deadline <= now) {
            op->deadline = NEVER;
            op->class->expire(op);
        }
        if (op->deadline < soonest)
            soonest = op->deadline;
    }
}

uint64_t ops_run(void) {
    run_slices();
    if (run_first)
        return 0;
    if (soonest == NEVER)
        return NEVER;
    uint64_t now = monotonic_ns();
    if (soonest <= now)
        run_deadlines(now);
    if (soonest == NEVER)
        return NEVER;
    return soonest > now ? soonest - now : 0;
}
