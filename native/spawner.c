/* spawner --socket FD --guest FD --guest-uid N
 *
 * Makes containers for the node agent: spawn.h is the protocol. Runs as N with all capabilities, so that the owner of
 * every sandbox's user namespace, and the first process in it, is an id that no sandbox maps. Ends when the socket
 * closes; what it made lives on. One thread: a request's own part is about a millisecond, the rest runs in the child. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/sched.h>
#include <linux/securebits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "mounts.h"
#include "sandbox_child.h"

#define FDS_FIXED 3 /* listener, writable tree, cgroup */
#define FDS_MAX (FDS_FIXED + 1 + SPAWN_MAX_GROUPS + SPAWN_MAX_LAYERS)
#define DEADLINE_US 30000000u
#define KILL_WAIT_MS 1000
#define RESERVED_FDS 10 /* nothing that arrives may land on the guest's descriptors */

enum { TIME_CLONE, TIME_MAPS, TIME_OVERLAY, TIME_GO, TIME_CHILD, TIME_EXEC = TIME_CHILD + 3 };

struct flight {
    int used, ready; /* ready: the child reported that only the exec is left */
    int link, pidfd, pid;
    uint64_t started_us;
    struct spawn_reply reply;
};

static struct {
    int control, guest, epoll, own_net;
    uint32_t guest_uid, current_uid;
    unsigned in_flight;
    struct flight flights[SPAWN_IN_FLIGHT];
} spawner;

static void close_fd(int fd) {
    if (fd >= 0)
        close(fd);
}

static uint32_t since(uint64_t start) { return (uint32_t)(monotonic_us() - start); }

/* ---- requests ---- */

struct request {
    struct spawn_request head;
    int fds[FDS_MAX];
    int count;
    const int *groups, *layers;
    int listener, writable, cgroup, netns;
};

static int valid(const struct spawn_request *head, int fds) {
    uint32_t want = FDS_FIXED + (head->flags & SPAWN_NETNS ? 1 : 0) + head->groups + head->layers;
    return head->magic == SPAWN_MAGIC && head->layers >= 1 && head->layers <= SPAWN_MAX_LAYERS &&
           head->groups <= SPAWN_MAX_GROUPS && (uint32_t)fds == want && head->uid_base != 0 && head->uid_count != 0 &&
           head->shm_bytes != 0 &&
           head->uid_count <= UINT32_MAX - head->uid_base && head->oom_score_adj >= 0 && head->oom_score_adj <= 1000 &&
           memchr(head->hostname, 0, sizeof head->hostname) != NULL;
}

/* An id within the map would put the first process within reach of the sandbox. */
static int guest_outside_map(const struct spawn_request *head) {
    uint32_t id = head->guest_uid ? head->guest_uid : spawner.guest_uid;
    return id < head->uid_base || id >= head->uid_base + head->uid_count;
}

static void name_descriptors(struct request *request) {
    const int *next = request->fds + FDS_FIXED;
    request->listener = request->fds[0];
    request->writable = request->fds[1];
    request->cgroup = request->fds[2];
    request->netns = request->head.flags & SPAWN_NETNS ? *next++ : -1;
    request->groups = next;
    request->layers = next + request->head.groups;
}

/* 1: a datagram was read, 0: nothing there, -1: the node agent is gone. */
static int receive(struct request *request) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int) * 253)];
    } control;
    struct iovec piece = {&request->head, sizeof request->head};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
    memset(request, 0, sizeof *request);
    ssize_t got = recvmsg(spawner.control, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
        int count = (int)((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        const int *fds = (const int *)(const void *)CMSG_DATA(head);
        for (int i = 0; i < count; i++)
            if (request->count < FDS_MAX)
                request->fds[request->count++] = fds[i];
            else
                close(fds[i]);
    }
    if (got == 0)
        return -1;
    if ((size_t)got != sizeof request->head)
        request->head.magic = 0;
    return 1;
}

static void answer(struct spawn_reply *reply, int pidfd) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec piece = {reply, sizeof *reply};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (pidfd >= 0) {
        message.msg_control = control.space;
        message.msg_controllen = sizeof control.space;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &pidfd, sizeof(int));
    }
    reply->magic = SPAWN_MAGIC;
    while (sendmsg(spawner.control, &message, MSG_NOSIGNAL) < 0 && errno == EINTR) {
    }
}

/* ---- flights: containers between clone and exec ---- */

static void watch_requests(int on) {
    struct epoll_event event = {.events = on ? EPOLLIN : 0, .data.ptr = NULL};
    epoll_ctl(spawner.epoll, EPOLL_CTL_MOD, spawner.control, &event);
}

static struct flight *take_flight(void) {
    for (size_t i = 0; i < SPAWN_IN_FLIGHT; i++)
        if (!spawner.flights[i].used) {
            spawner.flights[i] = (struct flight){.used = 1, .link = -1, .pidfd = -1, .started_us = monotonic_us()};
            if (++spawner.in_flight == SPAWN_IN_FLIGHT)
                watch_requests(0);
            return &spawner.flights[i];
        }
    return NULL;
}

static void end_flight(struct flight *flight) {
    /* Children that were cloned meanwhile hold copies of the link, so closing it does not take it out of the set. */
    if (flight->link >= 0)
        epoll_ctl(spawner.epoll, EPOLL_CTL_DEL, flight->link, NULL);
    close_fd(flight->link);
    close_fd(flight->pidfd);
    flight->used = 0;
    if (spawner.in_flight-- == SPAWN_IN_FLIGHT)
        watch_requests(1);
}

/* Waits for the end, which is near: whoever hears of the failure finds no process left. */
static void kill_flight(const struct flight *flight) {
    struct pollfd gone = {.fd = flight->pidfd, .events = POLLIN};
    if (flight->pidfd < 0)
        return;
    syscall(SYS_pidfd_send_signal, flight->pidfd, SIGKILL, NULL, 0);
    poll(&gone, 1, KILL_WAIT_MS);
}

static void fail_flight(struct flight *flight, const struct fault *fault) {
    struct spawn_reply *reply = &flight->reply;
    kill_flight(flight);
    reply->error = fault->error ? fault->error : EIO;
    memcpy(reply->step, fault->step, sizeof reply->step);
    memcpy(reply->log, fault->log, sizeof reply->log);
    answer(reply, -1);
    end_flight(flight);
}

static void fail_flight_at(struct flight *flight, int error, const char *step) {
    struct fault fault = {0};
    errno = error;
    fault_at(&fault, step);
    fail_flight(flight, &fault);
}

static void land(struct flight *flight) {
    struct pollfd alive = {.fd = flight->pidfd, .events = POLLIN};
    if (!flight->ready || poll(&alive, 1, 0) > 0) {
        fail_flight_at(flight, ECHILD, flight->ready ? "guest-died" : "child-died");
        return;
    }
    flight->reply.us[TIME_EXEC] = since(flight->started_us);
    answer(&flight->reply, flight->pidfd);
    end_flight(flight);
}

static void hear_child(struct flight *flight) {
    struct child_report report;
    ssize_t got = recv(flight->link, &report, sizeof report, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got != sizeof report) {
        land(flight);
    } else if (report.error) {
        report.step[SPAWN_STEP - 1] = 0;
        fail_flight_at(flight, report.error, report.step);
    } else {
        flight->ready = 1;
        memcpy(flight->reply.us + TIME_CHILD, report.us, sizeof report.us);
    }
}

/* ---- making one ---- */

/* The owner of the new user namespace, and the child's id in it, is whoever calls clone. */
static int become(uint32_t id) {
    if (id == spawner.current_uid)
        return 0;
    if (syscall(SYS_setresgid, id, id, id) || syscall(SYS_setresuid, id, id, id))
        return -1;
    spawner.current_uid = id;
    return 0;
}

static int clone_into(const struct request *request, struct flight *flight) {
    struct clone_args arguments = {
        .flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWUSER | CLONE_PIDFD | CLONE_INTO_CGROUP,
        .pidfd = (uint64_t)(uintptr_t)&flight->pidfd,
        .exit_signal = SIGCHLD,
        .cgroup = (uint64_t)request->cgroup,
    };
    return (int)syscall(SYS_clone3, &arguments, sizeof arguments);
}

static int launch(const struct request *request, struct flight *flight, struct fault *fault) {
    int pair[2];
    if (become(request->head.guest_uid ? request->head.guest_uid : spawner.guest_uid))
        return fault_at(fault, "guest-uid");
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
        return fault_at(fault, "socketpair");
    flight->pid = clone_into(request, flight);
    if (flight->pid == 0) {
        struct child_plan plan = {.request = &request->head,
                                  .started_us = flight->started_us,
                                  .link = pair[1],
                                  .listener = request->listener,
                                  .cgroup = request->cgroup,
                                  .guest = spawner.guest,
                                  .groups = request->groups};
        close(pair[0]);
        sandbox_child(&plan);
    }
    if (flight->pid < 0)
        fault_at(fault, "clone");
    close(pair[1]);
    flight->link = pair[0];
    flight->reply.pid = flight->pid;
    return flight->pid < 0 ? -1 : 0;
}

static int write_proc(int pid, const char *name, const char *text) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t size = (ssize_t)strlen(text), done = write(fd, text, (size_t)size);
    int saved = errno;
    close(fd);
    errno = saved;
    return done == size ? 0 : -1;
}

static int may_set_minimum(void) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {0};
    return syscall(SYS_capget, &head, data) == 0 && data[0].effective & (1u << CAP_SYS_RESOURCE);
}

static int inherited_score(void) {
    char text[16] = "";
    int fd = open("/proc/self/oom_score_adj", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
        text[0] = 0;
    close_fd(fd);
    return atoi(text);
}

/* With SYS_RESOURCE a score becomes the minimum of all that descends from the child. Without it anything inside may go back
 * to what the spawner was given, mostly 0, so the first process must not stand above; the guest raises its programs. */
static int set_oom_score(int pid, int score) {
    char text[16];
    snprintf(text, sizeof text, "%d", score);
    if (may_set_minimum())
        return write_proc(pid, "oom_score_adj", text);
    if (inherited_score() > 0)
        write_proc(pid, "oom_score_adj", "0");
    return 0;
}

/* Returns a descriptor of the child's user namespace, its maps written. */
static int map_ids(const struct request *request, int pid, struct fault *fault) {
    char text[64], path[64];
    snprintf(text, sizeof text, "0 %u %u\n", request->head.uid_base, request->head.uid_count);
    if (write_proc(pid, "uid_map", text) || write_proc(pid, "gid_map", text))
        return fault_at(fault, "id-map");
    if (set_oom_score(pid, request->head.oom_score_adj))
        return fault_at(fault, "oom-score");
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    int userns = open(path, O_RDONLY | O_CLOEXEC);
    return userns < 0 ? fault_at(fault, "user-namespace") : userns;
}

static int make_overlay(const struct request *request, int userns, struct fault *fault) {
    struct overlay_plan plan = {.layers = request->layers,
                                .layer_count = request->head.layers,
                                .writable = request->writable,
                                .userns = userns,
                                .flags = request->head.flags,
                                .root_uid = request->head.uid_base};
    return overlay_make(&plan, fault);
}

/* sysfs belongs to the network namespace of whoever mounts it, and a sandbox may mount it only for its own. */
static int make_sysfs_there(int netns, struct fault *fault) {
    if (syscall(SYS_setns, netns, CLONE_NEWNET))
        return fault_at(fault, "network-namespace");
    int mount = sysfs_make(fault);
    if (syscall(SYS_setns, spawner.own_net, CLONE_NEWNET))
        abort();
    return mount;
}

static int send_go(int link, const int mounts[GO_MOUNTS], struct fault *fault) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int) * GO_MOUNTS)];
    } control = {0};
    struct go_message go = {0};
    int present[GO_MOUNTS], count = 0;
    for (int i = 0; i < GO_MOUNTS; i++)
        if (mounts[i] >= 0) {
            go.mounts |= 1u << i;
            present[count++] = mounts[i];
        }
    struct iovec piece = {&go, sizeof go};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.space};
    message.msg_controllen = (socklen_t)CMSG_SPACE(sizeof(int) * (size_t)count);
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = (socklen_t)CMSG_LEN(sizeof(int) * (size_t)count);
    memcpy(CMSG_DATA(head), present, sizeof(int) * (size_t)count);
    return sendmsg(link, &message, MSG_NOSIGNAL) == sizeof go ? 0 : fault_at(fault, "go");
}

static int furnish(const struct request *request, struct flight *flight, int userns, struct fault *fault) {
    int mounts[GO_MOUNTS] = {-1, -1, -1, -1};
    mounts[GO_OVERLAY] = make_overlay(request, userns, fault);
    flight->reply.us[TIME_OVERLAY] = since(flight->started_us);
    if (!fault->error)
        mounts[GO_DEV] = dev_make(userns, fault);
    if (!fault->error)
        mounts[GO_SHM] = shm_make(request->head.shm_bytes, userns, fault);
    if (!fault->error && request->netns >= 0)
        mounts[GO_SYSFS] = make_sysfs_there(request->netns, fault);
    if (!fault->error)
        send_go(flight->link, mounts, fault);
    for (int i = 0; i < GO_MOUNTS; i++)
        close_fd(mounts[i]);
    flight->reply.us[TIME_GO] = since(flight->started_us);
    return fault->error ? -1 : 0;
}

/* The child must be born in the given network namespace: it has no right to enter one that another owns. */
static int launch_there(const struct request *request, struct flight *flight, struct fault *fault) {
    if (request->netns < 0)
        return launch(request, flight, fault);
    if (syscall(SYS_setns, request->netns, CLONE_NEWNET))
        return fault_at(fault, "network-namespace");
    int result = launch(request, flight, fault);
    if (syscall(SYS_setns, spawner.own_net, CLONE_NEWNET))
        abort();
    return result;
}

static int build(const struct request *request, struct flight *flight, struct fault *fault) {
    if (launch_there(request, flight, fault))
        return -1;
    flight->reply.us[TIME_CLONE] = since(flight->started_us);
    int userns = map_ids(request, flight->pid, fault);
    if (userns < 0)
        return -1;
    flight->reply.us[TIME_MAPS] = since(flight->started_us);
    int result = furnish(request, flight, userns, fault);
    close(userns);
    return result;
}

/* When the child gave up first, its reason is the true one, and ours only that it is gone. */
static void prefer_childs_reason(const struct flight *flight, struct fault *fault) {
    struct child_report report;
    if (flight->link < 0 || recv(flight->link, &report, sizeof report, MSG_DONTWAIT) != sizeof report || !report.error)
        return;
    fault->error = report.error;
    memcpy(fault->step, report.step, sizeof fault->step);
    fault->step[SPAWN_STEP - 1] = 0;
}

static void begin(struct request *request) {
    struct flight *flight = take_flight();
    struct fault fault = {0};
    if (!flight)
        abort(); /* requests are not read while every slot is taken */
    flight->reply.id = request->head.id;
    if (!valid(&request->head, request->count) || !guest_outside_map(&request->head)) {
        errno = EINVAL;
        fault_at(&fault, "request");
    } else {
        name_descriptors(request);
        build(request, flight, &fault);
    }
    if (fault.error) {
        prefer_childs_reason(flight, &fault);
        fail_flight(flight, &fault);
        return;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = flight};
    if (epoll_ctl(spawner.epoll, EPOLL_CTL_ADD, flight->link, &event))
        fail_flight_at(flight, errno, "epoll");
}

/* -1 when the node agent is gone. */
static int serve_request(void) {
    struct request request;
    int got = receive(&request);
    if (got > 0)
        begin(&request);
    for (int i = 0; i < request.count; i++)
        close(request.fds[i]);
    return got < 0 ? -1 : 0;
}

static void end_overdue(void) {
    for (size_t i = 0; i < SPAWN_IN_FLIGHT; i++)
        if (spawner.flights[i].used && since(spawner.flights[i].started_us) > DEADLINE_US)
            fail_flight_at(&spawner.flights[i], ETIMEDOUT, "deadline");
}

static void serve(void) {
    struct epoll_event events[16];
    for (;;) {
        int count = epoll_wait(spawner.epoll, events, 16, spawner.in_flight ? 1000 : -1);
        int asked = 0;
        for (int i = 0; i < count; i++)
            if (events[i].data.ptr)
                hear_child(events[i].data.ptr);
            else
                asked = 1;
        /* With every slot taken requests are not watched: only the other end's hang-up is told then. */
        if (asked && (spawner.in_flight == SPAWN_IN_FLIGHT || serve_request()))
            return;
        end_overdue();
    }
}

/* ---- start ---- */

static int keep_above(int fd) {
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, RESERVED_FDS);
    if (copy >= 0)
        close(fd);
    return copy;
}

/* Descriptors below RESERVED_FDS stay taken: 0 to 2 as given, the others by /dev/null. */
static int reserve_descriptors(void) {
    spawner.control = keep_above(spawner.control);
    spawner.guest = keep_above(spawner.guest);
    if (spawner.control < 0 || spawner.guest < 0)
        return -1;
    for (int fd = 0; fd < RESERVED_FDS; fd++) {
        if (fcntl(fd, F_GETFD) >= 0)
            continue;
        if (open("/dev/null", O_RDWR | (fd > 2 ? O_CLOEXEC : 0)) < 0)
            return -1;
    }
    return 0;
}

/* Stays all-powerful under an id that means nothing: only the id matters to the children's user namespaces. */
static int change_identity(uint32_t id) {
    if (prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP | SECBIT_KEEP_CAPS, 0, 0, 0) || syscall(SYS_setgroups, 0, NULL))
        return -1;
    return become(id);
}

/* All processes of all sandboxes count against this limit of the spawner, at the time of clone. */
static void raise_process_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NPROC, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NPROC, &limit);
    }
}

static int start(struct fault *fault) {
    signal(SIGPIPE, SIG_IGN);
    signal(SIGCHLD, SIG_IGN);
    raise_process_limit();
    if (reserve_descriptors())
        return fault_at(fault, "descriptors");
    if (lean_namespace(fault))
        return -1;
    spawner.own_net = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    spawner.epoll = epoll_create1(EPOLL_CLOEXEC);
    if (spawner.own_net < 0 || spawner.epoll < 0)
        return fault_at(fault, "epoll");
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll_ctl(spawner.epoll, EPOLL_CTL_ADD, spawner.control, &event))
        return fault_at(fault, "socket");
    return change_identity(spawner.guest_uid) ? fault_at(fault, "identity") : 0;
}

static int number(const char *text, long *value) {
    char *end;
    *value = strtol(text, &end, 10);
    return *text && !*end && *value >= 0 && *value < UINT32_MAX ? 0 : -1;
}

static int read_arguments(int count, char **arguments) {
    long value;
    spawner.control = spawner.guest = -1;
    for (int i = 1; i + 1 < count; i += 2) {
        if (number(arguments[i + 1], &value))
            return -1;
        if (!strcmp(arguments[i], "--socket"))
            spawner.control = (int)value;
        else if (!strcmp(arguments[i], "--guest"))
            spawner.guest = (int)value;
        else if (!strcmp(arguments[i], "--guest-uid"))
            spawner.guest_uid = (uint32_t)value;
        else
            return -1;
    }
    return count % 2 == 1 && spawner.control >= 0 && spawner.guest >= 0 && spawner.guest_uid ? 0 : -1;
}

int main(int count, char **arguments) {
    struct fault fault = {0};
    if (read_arguments(count, arguments)) {
        fprintf(stderr, "usage: spawner --socket FD --guest FD --guest-uid N\n");
        return 2;
    }
    if (start(&fault)) {
        fprintf(stderr, "spawner: %s: %s\n", fault.step, strerror(fault.error));
        return 1;
    }
    serve();
    for (size_t i = 0; i < SPAWN_IN_FLIGHT; i++)
        if (spawner.flights[i].used)
            kill_flight(&spawner.flights[i]);
    return 0;
}
