/* The guest's side of a shell session. Between two commands the shell's output is kept in `idle`; a command borrows the
 * pipes from there. */
#include "shell.h"
#include "started.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

#define NUDGE_NS 10000000u
#define KILL_AGAIN_NS 3000000u
#define COME_BACK_NS 200000000u
#define REPORT_MAX 4u /* three digits and a newline */

struct shell {
    struct session *session;
    struct op *run; /* the command that is going on, or NULL */
    struct source commands, reports;
    struct output idle[2];
    char *text; /* what the pipe did not take yet of a command */
    size_t text_at, text_size;
    char report[REPORT_MAX];
    uint32_t report_size;
    bool ready; /* the first report: its traps are set, and SHELL_SIGNAL does not kill it */
    int cpu;
};

struct run {
    struct shell *shell;
    uint32_t grace_ms;
    enum phase phase;
    uint8_t ended_by, outcome;
    int32_t code;
    bool reported; /* the command is over: the shell said so, or ended itself */
    uint64_t kill_at;
    uint64_t user_us, system_us; /* of the session before it began */
    struct started started;
};

static void read_cpu(const struct shell *shell, uint64_t *user_us, uint64_t *system_us) {
    char text[512];
    ssize_t n = shell->cpu < 0 ? -1 : pread(shell->cpu, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = 0;
    const char *user = strstr(text, "user_usec "), *system = strstr(text, "system_usec ");
    *user_us = user ? strtoull(user + 10, NULL, 10) : 0;
    *system_us = system ? strtoull(system + 12, NULL, 10) : 0;
}

/* ---- the end of a command ---- */

static void run_conclude(struct op *op) {
    struct run *run = op->state;
    struct shell *shell = run->shell;
    struct session *s = shell->session;
    uint64_t user, system;
    read_cpu(shell, &user, &system);
    op->result.user_us = user - run->user_us;
    op->result.system_us = system - run->system_us;
    int left = s->group ? group_pids(s->group, NULL, NULL) - !s->reaped : 0;
    op->result.background = left > 0 ? (uint32_t)left : 0;
    shell->run = NULL;
    if (run->phase != RUNNING)
        op_finish(op, run->ended_by, 0, NULL, 0);
    else
        op_finish(op, run->outcome, run->code, NULL, 0);
    session_progress(s->op);
}

static void run_progress(struct op *op) {
    struct run *run = op->state;
    if (op->done || !run->reported)
        return;
    if (run->phase != RUNNING && started_signal(&run->started, run->shell->session->group ? SIGKILL : 0)) {
        ops_set_deadline(op, monotonic_ns() + KILL_AGAIN_NS);
        return;
    }
    op->deadline = NEVER;
    for (int i = 0; i < 2; i++)
        session_start_drain(&op->out[i]);
    if (op->out[0].ended && op->out[1].ended)
        run_conclude(op);
}

static void run_over(struct op *op, uint8_t outcome, int32_t code) {
    struct run *run = op->state;
    if (!run->reported) {
        run->reported = true;
        run->outcome = outcome;
        run->code = code;
    }
    run_progress(op);
}

/* ---- interrupting ---- */

static void set_next_press(struct op *op, uint64_t now) {
    const struct run *run = op->state;
    bool kills_first = run->phase == TERMINATING && run->kill_at < now + NUDGE_NS;
    ops_set_deadline(op, kills_first ? run->kill_at : now + NUDGE_NS);
}

static void signal_shell(const struct shell *shell) {
    if (shell->ready && !shell->session->reaped)
        kill(shell->session->pid, SHELL_SIGNAL);
}

/* First the shell, so that it knows when what it waits for ends. */
static void interrupt(struct op *op, uint8_t why) {
    struct run *run = op->state;
    uint64_t now = monotonic_ns();
    run->phase = TERMINATING;
    run->ended_by = why;
    run->kill_at = now + run->grace_ms * 1000000ull;
    signal_shell(run->shell);
    started_signal(&run->started, SIGINT);
    set_next_press(op, now);
}

/* The shell may have been too early in the command to heed the first signal, and the command may start more meanwhile. */
static void press(struct op *op) {
    struct run *run = op->state;
    struct session *s = run->shell->session;
    uint64_t now = monotonic_ns();
    if (now >= run->kill_at + COME_BACK_NS)
        session_kill(s);
    else
        signal_shell(run->shell);
    run->phase = now >= run->kill_at ? KILLING : TERMINATING;
    if (s->group || run->phase == KILLING)
        started_signal(&run->started, run->phase == KILLING ? SIGKILL : SIGINT);
    set_next_press(op, now);
}

static void run_expire(struct op *op) {
    struct run *run = op->state;
    if (run->reported)
        run_progress(op);
    else if (run->phase == RUNNING)
        interrupt(op, OUT_TIMED_OUT);
    else
        press(op);
}

static void run_cancel(struct op *op) {
    struct run *run = op->state;
    if (run->phase == RUNNING && !run->reported)
        interrupt(op, OUT_CANCELLED);
}

static void run_signal(struct op *op, uint32_t number, bool everyone) {
    (void)everyone;
    struct run *run = op->state;
    if (number == SIGINT)
        run->started.told.count = 0; /* who asks twice means it */
    started_signal(&run->started, (int)number);
}

static void run_release(struct op *op) {
    struct run *run = op->state;
    started_release(&run->started);
    free_later(run);
}

static const struct op_class run_class = {
    .space = session_space,
    .expire = run_expire,
    .cancel = run_cancel,
    .signal = run_signal,
    .drained = run_progress,
    .release = run_release,
};

/* ---- the shell ---- */

/* Writes what there is to say; what the shell does not take now waits. */
static void commands_ready(struct source *source, uint32_t events) {
    struct shell *shell = container_of(source, struct shell, commands);
    (void)events;
    while (shell->text_at < shell->text_size) {
        ssize_t n = write(source->fd, shell->text + shell->text_at, shell->text_size - shell->text_at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN) {
            source_watch(source, EPOLLOUT);
            return;
        }
        if (n < 0)
            break; /* its end comes by another way */
        shell->text_at += (size_t)n;
    }
    source_watch(source, 0);
    free(shell->text);
    shell->text = NULL;
    shell->text_at = shell->text_size = 0;
}

static bool say(struct shell *shell, const char *command) {
    size_t size = strlen(command), lines = 1;
    for (const char *at = command; (at = strchr(at, '\n')); at++)
        lines++;
    shell->text = malloc(size + 64);
    if (!shell->text)
        return false;
    int head = sprintf(shell->text, "%zu %zu\n", size + 1, lines);
    memcpy(shell->text + head, command, size);
    shell->text[(size_t)head + size] = '\n';
    shell->text_size = (size_t)head + size + 1;
    commands_ready(&shell->commands, 0);
    return true;
}

/* The bytes of the first line, and its number, or -1 if it is none; 0: it is not whole yet. */
static uint32_t report_parse(const char report[REPORT_MAX], uint32_t size, int32_t *code) {
    uint32_t digits = 0;
    *code = 0;
    while (digits < size && isdigit((unsigned char)report[digits]))
        *code = *code * 10 + (report[digits++] - '0');
    if (digits == size && digits < REPORT_MAX)
        return 0;
    if (!digits || digits == size || report[digits] != '\n' || *code > 255)
        *code = -1;
    return *code < 0 ? size : digits + 1;
}

/* A report says that the shell is ready, or how a command ended that it had read; anything else ends the session: the shell
 * could not be followed any more. */
static void reported(struct shell *shell, int32_t code) {
    if (code >= 0 && !shell->ready)
        shell->ready = true;
    else if (code >= 0 && shell->run && !shell->text && !((struct run *)shell->run->state)->reported)
        run_over(shell->run, OUT_EXITED, code);
    else {
        source_close(&shell->reports);
        session_kill(shell->session);
    }
}

static void reports_ready(struct source *source, uint32_t events) {
    struct shell *shell = container_of(source, struct shell, reports);
    (void)events;
    ssize_t n = read(source->fd, shell->report + shell->report_size, REPORT_MAX - shell->report_size);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        source_close(source); /* `exec program` took the shell's place, perhaps: its end is the session's */
        return;
    }
    shell->report_size += (uint32_t)n;
    int32_t code;
    uint32_t size;
    while (shell->reports.fd >= 0 && (size = report_parse(shell->report, shell->report_size, &code))) {
        shell->report_size -= size;
        memmove(shell->report, shell->report + size, shell->report_size);
        reported(shell, code);
    }
}

struct shell *shell_new(struct session *session) {
    struct shell *shell = calloc(1, sizeof *shell);
    if (!shell)
        return NULL;
    shell->session = session;
    shell->cpu = -1;
    shell->commands.fd = shell->reports.fd = -1;
    for (int i = 0; i < 2; i++)
        shell->idle[i] = (struct output){
            .pipe.fd = -1, .op = session->op, .ring.max = OUTPUT_KEPT, .limit = UINT64_MAX, .used = true, .ended = true};
    return shell;
}

static void watch(struct source *source, int fd, void (*ready)(struct source *, uint32_t), uint32_t events) {
    fcntl(fd, F_SETFL, O_NONBLOCK);
    *source = (struct source){ready, fd, 0};
    source_watch(source, events);
}

void shell_attach(struct shell *shell, int commands, int reports, int out, int err) {
    const struct group *group = shell->session->group;
    shell->cpu = group ? openat(group->dir, "cpu.stat", O_RDONLY | O_CLOEXEC) : -1;
    watch(&shell->commands, commands, commands_ready, 0);
    watch(&shell->reports, reports, reports_ready, EPOLLIN);
    const int pipes[2] = {out, err};
    for (int i = 0; i < 2; i++)
        if (pipes[i] >= 0) {
            shell->idle[i].ended = false;
            watch(&shell->idle[i].pipe, pipes[i], session_output_ready, EPOLLIN);
        }
}

static void give_back(struct shell *shell) {
    source_close(&shell->commands);
    source_close(&shell->reports);
    if (shell->cpu >= 0)
        close(shell->cpu);
    shell->cpu = -1;
    free(shell->text);
    shell->text = NULL;
    for (int i = 0; i < 2; i++) {
        session_drop_output(&shell->idle[i]);
        shell->session->op->out[i].ended = true;
    }
}

bool shell_over(struct shell *shell) {
    const struct session *s = shell->session;
    const int status = s->wait_status;
    if (shell->run && s->phase != RUNNING)
        run_over(shell->run, s->ended_by, 0);
    else if (shell->run && WIFSIGNALED(status))
        run_over(shell->run, OUT_SIGNALED, WTERMSIG(status));
    else if (shell->run)
        run_over(shell->run, OUT_EXITED, WEXITSTATUS(status));
    if (shell->run)
        return false;
    give_back(shell);
    return true;
}

void shell_abandon(struct shell *shell) {
    struct op *op = shell->run;
    shell->run = NULL;
    for (int i = 0; op && i < 2; i++)
        if (op->out[i].pipe.fd >= 0)
            session_hand_over(&op->out[i], &shell->idle[i]);
    if (op)
        op_fail(op, ESRCH, "shell");
    give_back(shell);
}

/* ---- the start of a command ---- */

static void borrow(struct output *out, struct output *idle) {
    uint32_t kept = idle->ring.used < out->limit ? idle->ring.used : (uint32_t)out->limit;
    out->produced = idle->ring.used;
    out->dropped = idle->ring.used - kept;
    out->ring = idle->ring;
    out->ring.used = kept;
    idle->ring = (struct ring){.max = OUTPUT_KEPT};
    idle->produced = 0;
    out->ended = idle->ended;
    out->owner = idle;
    if (idle->ended)
        return;
    session_hand_over(idle, out);
    source_watch(&out->pipe, EPOLLIN);
}

/* Before the shell knows of the command: what it starts must not be taken for what was there. */
static struct run *run_new(struct shell *shell, const struct request *request) {
    struct run *run = malloc(sizeof *run);
    if (!run)
        return NULL;
    *run = (struct run){.shell = shell, .grace_ms = request->grace_ms};
    started_begin(&run->started, shell->session);
    read_cpu(shell, &run->user_us, &run->system_us);
    return run;
}

static void begin(struct op *op, struct run *run, struct shell *shell, const struct request *request) {
    op->state = run;
    op->class = &run_class;
    shell->run = op;
    for (int i = 0; i < 2; i++) {
        op->out[i].limit = request->output_limit;
        borrow(&op->out[i], &shell->idle[i]);
    }
    op_started(op, (uint32_t)shell->session->pid);
    link_ready(op);
    if (request->timeout_ms)
        ops_set_deadline(op, op->begun + request->timeout_ms * 1000000ull);
    if (!say(shell, request->command))
        session_kill(shell->session); /* no memory: nothing else of it would work either */
}

void run_start(struct op *op, const struct request *request) {
    struct op *opener = ops_find(request->shell);
    struct session *s = session_of(opener);
    struct shell *shell = s && !opener->done && !s->reaped ? s->shell : NULL;
    struct run *run = NULL;
    if (!shell || shell->reports.fd < 0)
        op_fail(op, ESRCH, "shell");
    else if (shell->run)
        op_fail(op, EBUSY, "shell");
    else if (!(run = run_new(shell, request)))
        op_fail(op, ENOMEM, "shell");
    else
        begin(op, run, shell, request);
}
