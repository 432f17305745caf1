/* The first process of a sandbox: docs/reference/guest-protocol.md. Descriptor 3 is the listening socket, 4 (optional) the
 * sandbox's own cgroup v2 directory, owned by this process with its cgroup.procs. */
#include "groups.h"
#include "guest.h"
#include "identity.h"
#include "oom.h"
#include "sessions.h"
#include "terminal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LISTEN_FD 3
#define CGROUP_FD 4
#define BATCH 64
#define LAZY_NS 1000000u

uint8_t scratch[SCRATCH];
static int epoll_fd;
static void **graves;
static size_t buried, grave_cap;

uint64_t monotonic_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void source_watch(struct source *source, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = source};
    if (source->events == events || source->fd < 0)
        return;
    int how = !events ? EPOLL_CTL_DEL : source->events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    if (epoll_ctl(epoll_fd, how, source->fd, &event) == 0 || !events)
        source->events = events;
}

void source_close(struct source *source) {
    if (source->fd < 0)
        return;
    source_watch(source, 0);
    close(source->fd);
    source->fd = -1;
}

void free_later(void *block) {
    if (buried == grave_cap) {
        void **grown = realloc(graves, (grave_cap + 64) * sizeof *graves);
        if (!grown)
            return; /* lost rather than freed too early */
        graves = grown;
        grave_cap += 64;
    }
    graves[buried++] = block;
}

static void free_now(void) {
    while (buried)
        free(graves[--buried]);
}

static bool children_waiting;

static void children_ready(struct source *source, uint32_t events) {
    struct signalfd_siginfo info[8];
    (void)events;
    while (read(source->fd, info, sizeof info) > 0)
        ;
    children_waiting = true;
}

static struct source children = {children_ready, -1, 0};

static int set_signals(void) {
    sigset_t set;
    const uint64_t standard[4] = {0}; /* the kernel's own struct: libc keeps some signals to itself */
    for (int i = 1; i <= 64; i++)
        syscall(SYS_rt_sigaction, i, standard, NULL, 8);
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_SETMASK, &set, NULL);
    children.fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    source_watch(&children, EPOLLIN);
    return children.fd;
}

static int set_up(void) {
    prctl(PR_SET_NAME, "init", 0, 0, 0); /* the binary's file name tells its digest */
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (getpid() != 1)
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    umask(0); /* modes are given exactly; programs get 022 */
    syscall(SYS_close_range, CGROUP_FD + 1, ~0u, 0);
    fcntl(LISTEN_FD, F_SETFD, FD_CLOEXEC);
    fcntl(CGROUP_FD, F_SETFD, FD_CLOEXEC);
    if (fcntl(LISTEN_FD, F_SETFL, O_NONBLOCK))
        return -1;
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0 || set_signals() < 0)
        return -1;
    if (!groups_init(CGROUP_FD)) {
        close(CGROUP_FD);
        fputs("guest: descriptor 4 is no cgroup v2 directory: a program's descendants are ended by process group only\n", stderr);
    }
    identity_init();
    spawn_init();
    oom_init();
    terminal_init();
    return link_listen(LISTEN_FD);
}

/* Without epoll_pwait2 (Linux 5.11) in whole milliseconds. */
static int wait_events(struct epoll_event event[BATCH], uint64_t ns) {
    static bool coarse;
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    if (!coarse && ns != NEVER && ns) {
        int n = (int)syscall(SYS_epoll_pwait2, epoll_fd, event, BATCH, &t, NULL, 8);
        coarse = n < 0 && errno != EINTR;
        if (!coarse)
            return n;
    }
    uint64_t ms = ns / 1000000u + (ns % 1000000u != 0);
    return epoll_wait(epoll_fd, event, BATCH, ns == NEVER ? -1 : ms > 3600000 ? 3600000 : (int)ms);
}

static uint64_t sooner(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static _Noreturn void serve(void) {
    struct epoll_event event[BATCH];
    for (;;) {
        uint64_t timeout = sooner(ops_run(), outputs_wake());
        if (link_flush())
            timeout = sooner(timeout, LAZY_NS);
        int n = wait_events(event, children_waiting ? 0 : timeout);
        for (int i = 0; i < n; i++) {
            struct source *source = event[i].data.ptr;
            if (source->fd >= 0)
                source->ready(source, event[i].events);
        }
        if (children_waiting)
            children_waiting = sessions_reap();
        free_now();
    }
}

int main(void) {
    if (set_up()) {
        fprintf(stderr, "guest: cannot start: %s\n", strerror(errno));
        return 1;
    }
    serve();
}
