/* Programs that the host started: pipes, results, time-outs. A program's life:
 *
 *     spawned ── status pipe closes ──▶ started ── wait4 ──▶ reaped ── pipes drained ──▶ done
 *                                          └─ deadline, CANCEL ──▶ terminating ──▶ killing ── group empty ──┘
 */
#include "sessions.h"
#include "guest.h"
#include "oom.h"
#include "shell.h"
#include "terminal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define KILL_AGAIN_NS 3000000u
#define REAP_BATCH 256

static struct session *unreaped;

/* ---- ending ---- */

static bool alive(const struct session *s) {
    return s->group ? group_alive(s->group) : !s->reaped;
}

static void signal_pid(int pid, void *context) {
    kill(pid, *(int *)context);
}

static void signal_everyone(struct session *s, int number) {
    if (s->group)
        group_pids(s->group, signal_pid, &number);
    else if (!s->reaped)
        kill(-s->pid, number);
}

static void kill_everyone(struct op *op) {
    struct session *s = op->state;
    s->phase = KILLING;
    session_kill(s); /* open files may have run out; this is repeated until the group is empty */
    ops_set_deadline(op, monotonic_ns() + KILL_AGAIN_NS);
}

void session_kill(struct session *s) {
    if (!s->group || !group_kill(s->group))
        signal_everyone(s, SIGKILL);
}

static void session_expire(struct op *op) {
    struct session *s = op->state;
    if (s->phase == RUNNING) {
        s->ended_by = OUT_TIMED_OUT;
        s->phase = TERMINATING;
        signal_everyone(s, SIGTERM);
        if (s->grace_ms) {
            ops_set_deadline(op, monotonic_ns() + s->grace_ms * 1000000ull);
            return;
        }
    }
    kill_everyone(op);
    session_progress(op);
}

static void session_cancel(struct op *op) {
    struct session *s = op->state;
    if (s->phase == RUNNING)
        s->ended_by = OUT_CANCELLED;
    kill_everyone(op);
    session_progress(op);
}

static void session_signal(struct op *op, uint32_t number, bool everyone) {
    struct session *s = op->state;
    if (s->status.fd >= 0)
        s->pending_signal = number; /* it has no process group of its own yet */
    else if (everyone)
        signal_everyone(s, (int)number);
    else if (!s->reaped)
        kill(-s->pid, (int)number);
}

static void session_resize(struct op *op, uint16_t rows, uint16_t columns) {
    if (op->out[0].terminal && op->out[0].pipe.fd >= 0)
        terminal_resize(op->out[0].pipe.fd, rows, columns);
}

static void conclude(struct op *op) {
    struct session *s = op->state;
    int status = s->wait_status;
    int left = s->group ? group_pids(s->group, NULL, NULL) : 0;
    op->result.background = left > 0 ? (uint32_t)left : 0;
    if (s->group)
        group_give(s->group);
    s->group = NULL;
    source_close(&op->in.pipe);
    if (s->phase != RUNNING)
        op_finish(op, s->ended_by, 0, NULL, 0);
    else if (WIFSIGNALED(status))
        op_finish(op, OUT_SIGNALED, WTERMSIG(status), NULL, 0);
    else
        op_finish(op, OUT_EXITED, WEXITSTATUS(status), NULL, 0);
}

void session_progress(struct op *op) {
    struct session *s = op->state;
    if (op->done || !s->reaped || s->status.fd >= 0 || (s->phase != RUNNING && alive(s)))
        return;
    source_close(&s->slave);
    if (s->shell && !shell_over(s->shell))
        return;
    bool wait = s->flags & EXEC_KEEP_BACKGROUND && s->phase == RUNNING;
    for (int i = 0; i < 2 && !wait; i++)
        session_start_drain(&op->out[i]);
    if (!wait)
        op->deadline = NEVER;
    for (int i = 0; i < 2; i++)
        if (op->out[i].used && !op->out[i].ended)
            return;
    conclude(op);
}

static void abandon(struct op *op, int error, const char *step) {
    struct session *s = op->state;
    if (s->shell)
        shell_abandon(s->shell);
    source_close(&s->slave);
    source_close(&op->in.pipe);
    for (int i = 0; i < 2; i++)
        source_close(&op->out[i].pipe);
    if (s->group)
        group_give(s->group);
    s->group = NULL;
    op_fail(op, error, step);
}

/* ---- start ---- */

static void status_ready(struct source *source, uint32_t events) {
    struct session *s = container_of(source, struct session, status);
    struct spawn_failure failure;
    (void)events;
    ssize_t n = read(source->fd, &failure, sizeof failure);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    source_close(source);
    if (n == sizeof failure) {
        if (s->phase == RUNNING)
            abandon(s->op, failure.error, spawn_step_name(failure.step));
        return;
    }
    oom_expose(s->pid);
    op_started(s->op, (uint32_t)s->pid);
    if (s->pending_signal)
        session_signal(s->op, s->pending_signal, false);
    session_progress(s->op);
}

static void unlist(struct session *s) {
    for (struct session **at = &unreaped; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            return;
        }
}

/* The operation may end, and be forgotten, before its child was reaped: when exec failed. */
static void session_release(struct op *op) {
    struct session *s = op->state;
    unlist(s);
    if (s->shell)
        free_later(s->shell);
    free_later(s);
}

static const struct op_class session_class = {
    .input = session_feed,
    .space = session_space,
    .expire = session_expire,
    .cancel = session_cancel,
    .signal = session_signal,
    .resize = session_resize,
    .drained = session_progress,
    .release = session_release,
};

struct session *session_of(const struct op *op) {
    return op && op->class == &session_class ? op->state : NULL;
}

struct pipes {
    int in[2], out[2], err[2], status[2], commands[2], reports[2];
};

static void close_all(struct pipes *p) {
    for (int *fd = p->in; fd < p->in + sizeof *p / sizeof *fd; fd++)
        if (*fd >= 0)
            close(*fd);
}

/* Sockets: a pipe could be opened again through /proc/PID/fd, by any process of the user, to write reports or take commands. */
static bool make_shell_pipes(const struct request *request, struct pipes *p) {
    const int kind = SOCK_STREAM | SOCK_CLOEXEC;
    return !(request->flags & EXEC_SHELL) ||
           (socketpair(AF_UNIX, kind, 0, p->commands) == 0 && socketpair(AF_UNIX, kind, 0, p->reports) == 0);
}

/* Made as the user, so that opening /dev/stdout again works for the program. */
static int make_pipes(const struct request *request, const struct identity *who, struct pipes *p) {
    int error = identity_enter(who);
    if (error)
        return error;
    bool fine = pipe2(p->status, O_CLOEXEC) == 0 && pipe2(p->out, O_CLOEXEC) == 0 &&
                (request->flags & EXEC_MERGE || pipe2(p->err, O_CLOEXEC) == 0) &&
                (!(request->flags & EXEC_STDIN) || pipe2(p->in, O_CLOEXEC) == 0) && make_shell_pipes(request, p);
    error = fine ? 0 : errno;
    identity_leave();
    return error;
}

/* One file both ways, as two descriptors: each is watched for its own direction. */
static int make_terminal(const struct request *request, const struct identity *who, struct pipes *p) {
    if (pipe2(p->status, O_CLOEXEC))
        return errno;
    p->out[0] = terminal_open(who, request->rows, request->columns, &p->out[1]);
    if (p->out[0] < 0)
        return errno;
    p->in[1] = fcntl(p->out[0], F_DUPFD_CLOEXEC, 0);
    p->in[0] = fcntl(p->out[1], F_DUPFD_CLOEXEC, 0);
    return p->in[0] < 0 || p->in[1] < 0 ? errno : 0;
}

static int make_channels(const struct request *request, const struct identity *who, struct pipes *p) {
    memset(p, 0xff, sizeof *p); /* -1 throughout */
    int error = (request->flags & EXEC_TTY ? make_terminal : make_pipes)(request, who, p);
    if (error)
        close_all(p);
    return error;
}

static void adopt(struct source *source, int *fd, void (*ready)(struct source *, uint32_t), uint32_t events) {
    if (*fd < 0)
        return;
    fcntl(*fd, F_SETFL, O_NONBLOCK);
    *source = (struct source){ready, *fd, 0};
    source_watch(source, events);
    *fd = -1;
}

/* Nobody will type anything: the program reads end-of-file, as it does without a terminal. */
static void attach_terminal(struct op *op, struct session *s, struct pipes *p) {
    op->out[0].terminal = op->in.terminal = true;
    s->slave.fd = p->in[0];
    p->in[0] = -1;
    op->in.eof |= !op->in.used;
    if (op->in.eof)
        session_feed(op);
}

static void attach(struct op *op, struct session *s, struct pipes *p) {
    adopt(&s->status, &p->status[0], status_ready, EPOLLIN);
    if (s->shell) {
        shell_attach(s->shell, p->commands[1], p->reports[0], p->out[0], p->err[0]);
        p->commands[1] = p->reports[0] = p->out[0] = p->err[0] = -1;
    } else {
        adopt(&op->out[0].pipe, &p->out[0], session_output_ready, EPOLLIN);
        adopt(&op->out[1].pipe, &p->err[0], session_output_ready, EPOLLIN);
        adopt(&op->in.pipe, &p->in[1], session_input_ready, 0);
        op->out[1].ended = op->out[1].pipe.fd < 0;
    }
    if (s->flags & EXEC_TTY)
        attach_terminal(op, s, p);
    close_all(p);
}

static int run(struct op *op, struct session *s, const struct request *request, const struct account *account) {
    struct pipes p;
    int error = make_channels(request, &account->who, &p);
    if (error)
        return error;
    struct spawn_plan plan = {
        .request = request, .account = account, .group = s->group, .in = p.in[0], .out = p.out[1],
        .err = p.err[1] >= 0 ? p.err[1] : p.out[1], .status = p.status[1], .terminal = request->flags & EXEC_TTY,
        .commands = p.commands[0], .reports = p.reports[1]};
    s->pid = spawn(&plan);
    if (s->pid < 0) {
        error = errno;
        close_all(&p);
        return error;
    }
    s->next = unreaped;
    unreaped = s;
    attach(op, s, &p);
    if (request->timeout_ms)
        ops_set_deadline(op, op->begun + request->timeout_ms * 1000000ull);
    return 0;
}

static void start_as(struct op *op, struct session *s, const struct request *request, const struct account *account) {
    if (groups_available() && !(s->group = group_take(op->id))) {
        abandon(op, errno, "cgroup");
        return;
    }
    int error = run(op, s, request, account);
    if (error)
        abandon(op, error, error == EINVAL ? "user" : s->pid ? "fork" : request->flags & EXEC_TTY ? "tty" : "fork");
}

void exec_start(struct op *op, const struct request *request) {
    struct account account;
    struct session *s = calloc(1, sizeof *s);
    if (!s) {
        op_fail(op, ENOMEM, "fork");
        return;
    }
    *s = (struct session){.op = op, .status.fd = -1, .slave.fd = -1, .flags = request->flags, .grace_ms = request->grace_ms};
    op->out[0].limit = op->out[1].limit = request->output_limit;
    op->state = s;
    op->class = &session_class;
    if (request->flags & EXEC_SHELL && !(s->shell = shell_new(s))) {
        abandon(op, ENOMEM, "fork");
        return;
    }
    int error = account_find(request->user, &account);
    if (error) {
        abandon(op, error, "user");
        return;
    }
    start_as(op, s, request, &account);
    identity_release(&account.who);
}

/* ---- reaping ---- */

static void reaped(struct session *s, int status, const struct rusage *usage) {
    struct result *r = &s->op->result;
    unlist(s);
    s->reaped = true;
    s->wait_status = status;
    if (s->op->done)
        return; /* it never got as far as its program */
    r->user_us = (uint64_t)usage->ru_utime.tv_sec * 1000000u + (uint64_t)usage->ru_utime.tv_usec;
    r->system_us = (uint64_t)usage->ru_stime.tv_sec * 1000000u + (uint64_t)usage->ru_stime.tv_usec;
    r->max_rss = (uint64_t)usage->ru_maxrss * 1024u;
    if (s->status.fd >= 0)
        status_ready(&s->status, 0);
    session_progress(s->op);
}

static void check_killed(void) {
    for (struct op *op = ops_first(), *next; op; op = next) {
        next = op->next;
        if (op->kind == OP_EXEC && !op->done && ((struct session *)op->state)->phase != RUNNING)
            session_progress(op);
    }
}

bool sessions_reap(void) {
    struct rusage usage;
    int status, pid, count = 0;
    bool strangers = false;
    while (count++ < REAP_BATCH && (pid = wait4(-1, &status, WNOHANG, &usage)) > 0) {
        struct session *s = unreaped;
        while (s && s->pid != pid)
            s = s->next;
        strangers |= !s || s->op->done;
        if (s)
            reaped(s, status, &usage);
    }
    if (strangers) {
        check_killed();
        groups_sweep();
    }
    return count > REAP_BATCH;
}
