/* Input: u8 dice for the cuts, then what happens to a shell session. A byte below 0x80 is one that the shell writes to its
 * report descriptor, any other an event, see `happen`. The shell may say whatever it likes: a second, slow reader of its
 * reports, below, says what the guest must take from them. */
#include "../shell.h"
#include "../started.h"
#include "fuzz.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

#define RUNS_MAX 24
#define TEXT_MAX (1u << 14)
#define SHELL_PID 77

enum { COMMANDS = 10, REPORTS, OUT, ERR, CPU };

/* ---- what must come of it ---- */

static struct {
    uint32_t digits, value;
    bool ready, broken, over, reaped, hung_up;
    uint8_t why, outcome;
    int32_t code;
} model;

static struct session session;
static struct op opener, ops[RUNS_MAX], *running;
static struct group group;
static uint32_t op_count, state, left;
static uint64_t now, begun;
static bool cpu_open, given_back, killed, abandoned, attached;

static char expected[TEXT_MAX];
static size_t expected_size, heard_size, room;

static void model_over(uint8_t outcome, int32_t code) {
    if (!running || model.over)
        return;
    model.over = true;
    model.outcome = outcome;
    model.code = code;
}

/* A shell that has not even read its command cannot have run it. */
static void model_report(uint32_t code) {
    if (!model.ready)
        model.ready = true;
    else if (running && !model.over && heard_size == expected_size)
        model_over(OUT_EXITED, (int32_t)code);
    else
        model.broken = true;
}

static void model_byte(uint8_t byte) {
    if (model.broken)
        return;
    if (byte >= '0' && byte <= '9' && model.digits < 3) {
        model.value = model.value * 10 + byte - '0';
        model.digits++;
        return;
    }
    if (byte != '\n' || !model.digits || model.value > 255)
        model.broken = true;
    else
        model_report(model.value);
    model.digits = model.value = 0;
}

/* ---- the pipes ---- */

static struct source *sources[CPU];
static uint8_t coming[256];
static size_t coming_size;

void source_watch(struct source *source, uint32_t events) {
    HOLDS(source->fd >= COMMANDS && source->fd < CPU);
    source->events = events;
    sources[source->fd] = source;
}

void source_close(struct source *source) {
    if (source->fd < 0)
        return;
    HOLDS(sources[source->fd] == source);
    sources[source->fd] = NULL;
    source->fd = -1;
}

ssize_t fake_read(int fd, void *into, size_t most) {
    HOLDS(fd == REPORTS && most > 0 && !model.hung_up);
    size_t n = 1 + dice(&state, 6);
    n = n < most ? n : most;
    n = n < coming_size ? n : coming_size;
    memcpy(into, coming, n);
    for (size_t i = 0; i < n; i++)
        model_byte(coming[i]);
    memmove(coming, coming + n, coming_size -= n);
    model.hung_up = !n;
    return (ssize_t)n;
}

ssize_t fake_write(int fd, const void *data, size_t size) {
    HOLDS(fd == COMMANDS && size > 0);
    size_t n = size < room ? size : room;
    HOLDS(heard_size + size <= expected_size && !memcmp(expected + heard_size, data, size));
    heard_size += n;
    room -= n;
    errno = EAGAIN;
    return n ? (ssize_t)n : -1;
}

ssize_t fake_pread(int fd, void *into, size_t most) {
    HOLDS(fd == CPU && cpu_open);
    return snprintf(into, most, "usage_usec 1\nuser_usec %llu\nsystem_usec 9\n", (unsigned long long)now / 1000);
}

int fake_openat(int dir) {
    HOLDS(dir == group.dir && !cpu_open);
    cpu_open = true;
    return CPU;
}

int fake_close(int fd) {
    HOLDS(fd == CPU && cpu_open);
    cpu_open = false;
    return 0;
}

/* Before the traps are set the signal would end the shell; after the command it is of no use. */
int fake_kill(int pid, int number) {
    HOLDS(pid == SHELL_PID && number == SHELL_SIGNAL && model.ready && running && !model.over && !model.reaped);
    return 0;
}

/* ---- what the shell needs of the guest ---- */

static struct output *holder(int fd) {
    return sources[fd] ? container_of(sources[fd], struct output, pipe) : NULL;
}

void session_output_ready(struct source *source, uint32_t events) {
    (void)source, (void)events;
}

void session_space(struct op *op) {
    (void)op;
}

void session_hand_over(struct output *from, struct output *to) {
    HOLDS(from->pipe.fd >= 0 && to->pipe.fd < 0);
    to->pipe = (struct source){session_output_ready, from->pipe.fd, 0};
    sources[to->pipe.fd] = &to->pipe;
    from->pipe.fd = -1;
}

static void end_output(struct output *out, bool closed) {
    out->ended = true;
    if (out->owner && !closed) {
        session_hand_over(out, out->owner);
        return;
    }
    source_close(&out->pipe);
    if (out->owner)
        out->owner->ended = true;
}

void session_drop_output(struct output *out) {
    if (!out->ended)
        end_output(out, false);
    ring_release(&out->ring);
}

void session_start_drain(struct output *out) {
    if (out->draining || out->ended)
        return;
    out->draining = true;
    if (dice(&state, 2))
        end_output(out, false);
}

void session_progress(struct op *op) {
    HOLDS(op == &opener);
    if (session.reaped && shell_over(session.shell))
        given_back = true;
}

void session_kill(struct session *s) {
    HOLDS(s == &session);
    killed = true;
}

struct session *session_of(const struct op *op) {
    return op == &opener ? &session : NULL;
}

struct op *ops_find(uint64_t id) {
    return id == 1 ? &opener : NULL;
}

void started_begin(struct started *started, struct session *s) {
    *started = (struct started){.session = s};
}

uint32_t started_signal(struct started *started, int number) {
    HOLDS(started->session == &session);
    return number == SIGKILL && left ? left-- : left;
}

void started_release(struct started *started) {
    HOLDS(started->session == &session);
}

int group_pids(const struct group *g, void (*each)(int pid, void *context), void *context) {
    HOLDS(g == &group && !each && !context);
    return (int)left + !session.reaped;
}

void ops_set_deadline(struct op *op, uint64_t when) {
    op->deadline = when;
}

uint64_t monotonic_ns(void) {
    return now;
}

void link_ready(struct op *op) {
    HOLDS(op == running);
}

void op_started(struct op *op, uint32_t pid) {
    HOLDS(op == running && pid == SHELL_PID);
}

static void check_output(const struct output *out) {
    HOLDS(out->ended && out->pipe.fd < 0 && out->ring.used <= out->limit);
    HOLDS(out->produced == out->ring.used + out->dropped);
}

void op_finish(struct op *op, uint8_t outcome, int32_t code, const void *detail, uint32_t size) {
    HOLDS(op == running && !op->done && model.over && !detail && !size);
    HOLDS(outcome == (model.why ? model.why : model.outcome));
    HOLDS(code == (model.why ? 0 : model.code) && code >= 0 && code <= 255);
    HOLDS(op->result.user_us == (session.group ? now / 1000 - begun / 1000 : 0));
    HOLDS(op->result.background == (session.group ? left : 0));
    check_output(&op->out[0]);
    check_output(&op->out[1]);
    op->done = true;
    running = NULL;
}

void op_fail(struct op *op, int error, const char *step) {
    bool gone = model.broken || model.hung_up || model.reaped || abandoned;
    HOLDS(!op->done && error == (gone ? ESRCH : EBUSY) && !strcmp(step, "shell"));
    HOLDS(abandoned ? op == running : op == &ops[op_count - 1] && !op->class);
    HOLDS(gone || (running && running != op));
    op->done = true;
}

static void *garbage[RUNS_MAX];
static size_t garbage_count;

void free_later(void *block) {
    HOLDS(garbage_count < RUNS_MAX);
    garbage[garbage_count++] = block;
}

/* ---- what happens ---- */

static void deliver(void) {
    size_t steps = 0;
    while (coming_size && sources[REPORTS]) {
        HOLDS(steps++ <= sizeof coming);
        sources[REPORTS]->ready(sources[REPORTS], EPOLLIN);
    }
    coming_size = 0;
    HOLDS(given_back || !attached || (sources[REPORTS] == NULL) == (model.broken || model.hung_up));
    HOLDS(!model.broken || killed);
}

static void come(uint8_t byte) {
    if (coming_size == sizeof coming)
        deliver();
    coming[coming_size++] = byte;
}

static void expect(const char *command, size_t lines) {
    size_t size = strlen(command);
    HOLDS(expected_size + size + 32 < TEXT_MAX);
    expected_size += (size_t)sprintf(expected + expected_size, "%zu %zu\n%s\n", size + 1, lines + 1, command);
}

static void run_command(uint32_t n) {
    static const char *const commands[] = {"", "true", "cd /\npwd", "\n\n"};
    static const uint32_t lines[] = {0, 0, 1, 2};
    if (op_count == RUNS_MAX)
        return;
    struct request request = {.kind = OP_RUN, .shell = 1, .timeout_ms = n & 4 ? 50 : 0, .grace_ms = n * 10,
                              .output_limit = n & 1 ? 3 : UINT64_MAX, .command = (char *)(uintptr_t)commands[n & 3]};
    struct op *op = &ops[op_count++];
    *op = (struct op){.id = 1 + op_count, .kind = OP_RUN, .deadline = NEVER, .begun = now};
    for (int i = 0; i < 2; i++)
        op->out[i] = (struct output){.pipe.fd = -1, .op = op, .ring.max = OUTPUT_KEPT, .used = true};
    bool begins = !running && !model.broken && !model.hung_up && !model.reaped;
    if (begins) {
        running = op;
        begun = now;
        model.over = false;
        model.why = 0;
        expect(commands[n & 3], lines[n & 3]);
    }
    run_start(op, &request);
    HOLDS(op->done == !begins);
}

static void give_up(uint8_t why) {
    if (!model.over && !model.why)
        model.why = why;
}

static void cancel(void) {
    if (!running)
        return;
    give_up(OUT_CANCELLED);
    running->class->cancel(running);
}

static void pass_time(uint32_t n) {
    struct op *op = running;
    if (!op || op->deadline == NEVER) {
        now += n * 1000000u;
        return;
    }
    now = now > op->deadline ? now : op->deadline;
    op->deadline = NEVER;
    give_up(OUT_TIMED_OUT);
    op->class->expire(op);
}

static void make_room(size_t n) {
    room = n;
    if (sources[COMMANDS] && sources[COMMANDS]->events)
        sources[COMMANDS]->ready(sources[COMMANDS], EPOLLOUT);
    HOLDS(!sources[COMMANDS] || room == 0 || heard_size == expected_size);
}

static void drain(void) {
    struct op *op = running;
    for (int i = 0; op && i < 2; i++)
        if (op->out[i].draining && !op->out[i].ended)
            end_output(&op->out[i], false);
    if (op)
        op->class->drained(op);
}

static void write_output(int fd, uint32_t n) {
    struct output *out = holder(fd);
    if (!out || !ring_append(&out->ring, "1234567", n))
        return;
    out->produced += n;
    uint64_t over = out->ring.used > out->limit ? out->ring.used - out->limit : 0;
    out->ring.used -= (uint32_t)over;
    out->dropped += over;
}

static void close_output(int fd) {
    struct output *out = holder(fd);
    if (!out)
        return;
    end_output(out, true);
    if (running && out->op == running)
        running->class->drained(running);
}

static void hang_up(void) {
    if (sources[REPORTS])
        sources[REPORTS]->ready(sources[REPORTS], EPOLLIN);
}

static void exits(int status) {
    if (model.reaped)
        return;
    model.reaped = session.reaped = true;
    session.wait_status = status;
    if (session.phase != RUNNING)
        model_over(session.ended_by, 0);
    else
        model_over(status & 0x7f ? OUT_SIGNALED : OUT_EXITED, status & 0x7f ? status & 0x7f : status >> 8);
    session_progress(&opener);
}

static void end_session(uint8_t why) {
    if (session.phase != RUNNING)
        return;
    session.phase = KILLING;
    session.ended_by = why;
}

static void happen(uint8_t event) {
    uint32_t n = event >> 4 & 7;
    deliver();
    switch (event & 15) {
    case 0:
        run_command(n);
        return;
    case 1:
        cancel();
        return;
    case 2:
        pass_time(n);
        return;
    case 3:
        if (running)
            running->class->signal(running, SIGINT, false);
        return;
    case 4:
        make_room(n < 7 ? n : TEXT_MAX);
        return;
    case 5:
        drain();
        return;
    case 6:
        write_output(n & 1 ? OUT : ERR, n);
        return;
    case 7:
        close_output(n & 1 ? OUT : ERR);
        return;
    case 8:
        hang_up();
        return;
    case 9:
        exits((int)n << 8);
        return;
    case 10:
        exits(SIGKILL);
        return;
    case 11:
        left = n;
        return;
    case 12:
        end_session(OUT_CANCELLED);
        return;
    default:
        come(event); /* no digit either */
    }
}

/* ---- one input ---- */

static void open_session(uint32_t n) {
    memset(&model, 0, sizeof model);
    group.dir = 5;
    session = (struct session){.op = &opener, .pid = SHELL_PID, .group = n & 1 ? &group : NULL};
    opener = (struct op){.id = 1, .kind = OP_EXEC};
    op_count = 0;
    now = left = 0;
    given_back = killed = abandoned = false;
    expected_size = heard_size = coming_size = 0;
    room = TEXT_MAX;
    HOLDS((session.shell = shell_new(&session)));
    if ((attached = n & 2))
        shell_attach(session.shell, COMMANDS, REPORTS, OUT, n & 4 ? -1 : ERR);
}

/* The session's program could not be started: commands may have been sent ahead. */
static void abandon(void) {
    abandoned = true;
    shell_abandon(session.shell);
    running = NULL;
}

static void close_session(bool began) {
    began ? exits(0) : abandon();
    for (int steps = 0; running; steps++) {
        HOLDS(steps < 8);
        left = 0;
        drain();
        if (running)
            pass_time(1);
    }
    HOLDS(!began || given_back);
    for (int fd = COMMANDS; fd < CPU; fd++)
        HOLDS(!sources[fd]);
    HOLDS(!cpu_open);
}

static void forget_all(void) {
    for (uint32_t i = 0; i < op_count; i++) {
        HOLDS(ops[i].done);
        ring_release(&ops[i].out[0].ring);
        ring_release(&ops[i].out[1].ring);
        if (ops[i].class)
            ops[i].class->release(&ops[i]);
    }
    while (garbage_count)
        free(garbage[--garbage_count]);
    free(session.shell);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size)
        return 0;
    state = data[0];
    open_session(data[0]);
    for (size_t i = 1; data[0] & 2 && i < size; i++)
        data[i] < 0x80 ? come(data[i]) : happen(data[i]);
    deliver();
    close_session(model.reaped || (data[0] & 10) == 2);
    forget_all();
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    uint32_t dices = seed;
    return dice(&dices, 2) ? LLVMFuzzerMutate(data, size, most) : mutate_fields(data, size, most, &dices);
}
