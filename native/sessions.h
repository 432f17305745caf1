/* Programs: what the child does between fork and exec, and what the guest keeps about a running one. */
#ifndef BARCHAN_SESSIONS_H
#define BARCHAN_SESSIONS_H
#include "groups.h"
#include "guest.h"
#include "identity.h"

enum spawn_step { STEP_USER = 1, STEP_CWD, STEP_EXEC, STEP_CGROUP, STEP_LIMIT, STEP_FILTER };

struct spawn_failure {
    int32_t step, error;
};

struct spawn_plan {
    const struct request *request;
    const struct account *account;
    const struct group *group; /* may be NULL */
    int in, out, err, status;  /* in: -1 leaves /dev/null */
};

/* Remembers what programs are to get back: the limit on open files that the guest was started with. */
void spawn_init(void);
/* The pid, or -1 with errno. A child that fails before exec writes a spawn_failure to `status`; end of file there means it runs. */
int spawn(struct spawn_plan *plan);
const char *spawn_step_name(int32_t step);
enum phase { RUNNING, TERMINATING, KILLING };

struct session {
    struct op *op;
    struct session *next; /* those whose first process was not reaped yet */
    struct source status;
    struct group *group;
    int pid, wait_status;
    uint32_t flags, grace_ms, pending_signal;
    uint64_t output_limit;
    enum phase phase;
    uint8_t ended_by;
    bool reaped, wide[2];
};

/* Looks whether the operation is over: its program reaped, its pipes drained, after a kill its group empty. */
void session_progress(struct op *op);
/* session_io.c */
void session_output_ready(struct source *source, uint32_t events);
void session_input_ready(struct source *source, uint32_t events);
void session_space(struct op *op);
void session_feed(struct op *op);
/* The first process ended: what it wrote is in the pipe now; what comes later is of background processes. */
void session_start_drain(struct output *out);
#endif
