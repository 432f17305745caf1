/* The parts of the guest and what they know of each other: guest.c (loop) calls link.c (connection), which calls ops.c
 * (table of operations), which calls sessions.c (programs) and files.c, tree.c (file operations). One thread. */
#ifndef BARCHAN_GUEST_H
#define BARCHAN_GUEST_H
#include "bytes.h"
#include "frames.h"
#include "requests.h"

#define OUTPUT_KEPT (1u << 20)
#define INPUT_KEPT (256u << 10)
#define MAX_OPS 1024u
#define NEVER UINT64_MAX

#define container_of(pointer, type, member) ((type *)(void *)((char *)(pointer)-offsetof(type, member)))

/* A descriptor in the loop. `events` is what epoll watches now; 0: not registered. */
struct source {
    void (*ready)(struct source *source, uint32_t events);
    int fd;
    uint32_t events;
};

void source_watch(struct source *source, uint32_t events);
/* Takes it out of epoll before closing: a child between fork and exec keeps the file open, and epoll would report it. */
void source_close(struct source *source);
uint64_t monotonic_ns(void);
/* For bytes on their way, never across a return to the loop. Untouched, and so without memory, until first used. */
#define SCRATCH (64u << 10)
extern uint8_t scratch[SCRATCH];
/* Frees after the current batch of events, which may still point into the block. */
void free_later(void *block);

/* Bytes [base, base + ring.used) are kept; `produced` counts also what the output limit dropped. */
struct output {
    struct source pipe;
    struct op *op;
    struct ring ring;
    uint64_t limit; /* of `produced` bytes as many are kept */
    uint64_t base, produced, dropped;
    uint64_t sent, credit; /* of this connection */
    uint64_t drain;        /* bytes that were in the pipe when the program ended */
    struct output *owner;  /* of a borrowed pipe, which goes back there; or NULL */
    uint64_t pace_since, pace_bytes, nap_until;
    struct output *next_nap;
    bool used, draining, ended, eof_sent, terminal, wide;
};

struct input {
    struct source pipe;
    struct op *op;
    struct ring ring;
    uint64_t received, limit;
    bool used, eof, discard, terminal, line_open;
};

struct result {
    uint8_t outcome;
    int32_t code;
    uint64_t wall_ns, user_us, system_us, max_rss;
    uint32_t background, detail_size;
    uint8_t *detail; /* malloc'ed */
};

struct op;

struct op_class {
    void (*input)(struct op *op);  /* bytes or the end of the input came */
    void (*space)(struct op *op);  /* the host acknowledged output */
    void (*expire)(struct op *op); /* the deadline passed */
    void (*cancel)(struct op *op);
    void (*signal)(struct op *op, uint32_t number, bool everyone);
    void (*resize)(struct op *op, uint16_t rows, uint16_t columns);
    void (*drained)(struct op *op); /* an output of a program ended */
    bool (*step)(struct op *op);   /* a slice of work; false: wait for input, space or nothing more */
    void (*release)(struct op *op);
};

struct op {
    uint64_t id;
    uint8_t kind;
    bool done, done_sent, queued, runnable;
    uint32_t pid;
    struct input in;
    struct output out[2];
    const struct op_class *class;
    void *state;
    uint64_t begun, deadline;
    struct result result;
    struct op *chain, *next, *prev; /* hash chain, list of all */
    struct op *next_ready, *next_run;
};

/* ops.c */
extern uint64_t ops_last;
extern uint32_t ops_count;
struct op *ops_find(uint64_t id);
struct op *ops_first(void);
void ops_start(uint64_t id, uint8_t kind, struct span body);
void ops_data(struct op *op, uint64_t offset, struct span data);
void ops_eof(struct op *op);
void ops_ack(struct op *op, uint8_t stream, uint64_t offset);
void ops_forget(struct op *op);
void ops_credit_input(struct op *op);
/* Credit for what was taken from the input, once it is worth a frame. */
void ops_input_taken(struct op *op);
void ops_set_deadline(struct op *op, uint64_t when);
void ops_wake(struct op *op);
/* Runs file operations for a slice each and deadlines that passed; how long the loop may sleep in ns, or NEVER. */
uint64_t ops_run(void);
uint64_t output_end(const struct output *out);
void op_started(struct op *op, uint32_t pid);
/* The first result counts; later calls do nothing. */
void op_finish(struct op *op, uint8_t outcome, int32_t code, const void *detail, uint32_t size);
void op_fail(struct op *op, int error, const char *step);

/* link.c */
int link_listen(int fd);
/* A violation of the protocol by the host: the connection ends, operations go on. */
void link_hang_up(void);
void link_control(uint8_t type, uint8_t stream, uint64_t id, const void *payload, uint32_t size);
/* The operation has something to send. */
void link_ready(struct op *op);
/* Sends what there is. STARTED and EOF alone wait up to 1 ms for company, so that a short program's whole story leaves at
 * once; true: such frames wait. */
bool link_flush(void);

/* sessions.c */
void exec_start(struct op *op, const struct request *request);
/* Reaps a bounded number of children; true if more may wait. */
bool sessions_reap(void);

/* session_io.c: reads outputs that rested; how long until the next one in ns, or NEVER. */
uint64_t outputs_wake(void);

/* shell.c */
void run_start(struct op *op, const struct request *request);

/* files.c */
void file_start(struct op *op, const struct request *request);
#endif
