/* Programs: what the child does between fork and exec, and what the guest keeps about a running one. */
#ifndef BARCHAN_SESSIONS_H
#define BARCHAN_SESSIONS_H
#include "groups.h"
#include "guest.h"
#include "identity.h"

enum spawn_step { STEP_USER = 1, STEP_CWD, STEP_EXEC, STEP_CGROUP, STEP_LIMIT, STEP_FILTER, STEP_TERMINAL };

struct spawn_failure {
    int32_t step, error;
};

struct spawn_plan {
    const struct request *request;
    const struct account *account;
    const struct group *group; /* may be NULL */
    int in, out, err, status;  /* in: -1 leaves /dev/null */
    bool terminal;             /* `in` becomes the controlling terminal */
    int commands, reports;     /* of a shell session, which appends its driver to the arguments; or -1 */
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
    enum phase phase;
    uint8_t ended_by;
    bool reaped;
    struct source slave; /* held while the program runs: it may close its own and open /dev/tty again */
    struct shell *shell; /* of a shell session, or NULL */
};

/* The session of an operation that runs a program; NULL for others. */
struct session *session_of(const struct op *op);
/* SIGKILL for all of it; it ends as one that was killed. */
void session_kill(struct session *session);

/* Looks whether the operation is over: its program reaped, its pipes drained, after a kill its group empty. */
void session_progress(struct op *op);
/* session_io.c */
/* What comes now is read and thrown away, as long as somebody writes. */
void session_drop_output(struct output *out);
/* The pipe goes from one output to another, which does not watch it yet. */
void session_hand_over(struct output *from, struct output *to);
void session_output_ready(struct source *source, uint32_t events);
void session_input_ready(struct source *source, uint32_t events);
void session_space(struct op *op);
void session_feed(struct op *op);
/* The first process ended: what it wrote is in the pipe now; what comes later is of background processes. */
void session_start_drain(struct output *out);
#endif
