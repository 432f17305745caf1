/* The spawner: spawner_arguments.h says how it is started.
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

#include "data_mounts.h"
#include "mounts.h"
#include "places.h"
#include "sandbox_child.h"
#include "spawn_parse.h"
#include "spawner_arguments.h"

#define DEADLINE_US 30000000u
#define KILL_WAIT_MS 1000
#define TCP_ENTRIES "128" /* buckets of a sandbox's table of connections, 8 bytes each */
#define FLIGHTS (SPAWN_IN_FLIGHT + SPAWN_MOST_PARKED)

enum { TIME_CLONE, TIME_MAPS, TIME_OVERLAY, TIME_GO, TIME_CHILD, TIME_EXEC = TIME_CHILD + 3 };

struct flight {
    int used, ready; /* ready: the child reported that only the exec is left */
    int parked;      /* nobody waits for it; kept until it is ordered */
    int link, pidfd, pid, userns;
    uint64_t started_us;
    struct place place;
    struct spawn_request head; /* of the request that made the child */
    struct spawn_reply reply;
};

static struct {
    int control, guest, epoll, own_net;
    uint32_t guest_uid, current_uid;
    unsigned in_flight, parked;
    struct place_directories places; /* trees -1: there are none */
    struct flight flights[FLIGHTS];
} spawner;

static void close_fd(int fd) {
    if (fd >= 0)
        close(fd);
}

static uint32_t since(uint64_t start) { return (uint32_t)(monotonic_us() - start); }

/* ---- requests ---- */

/* 1: a datagram was read, 0: nothing there, -1: the node agent is gone. */
static int receive(struct request *request) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int) * 253)];
    } control;
    struct iovec pieces[2] = {{&request->head, sizeof request->head}, {request->text, sizeof request->text}};
    struct msghdr message = {
        .msg_iov = pieces, .msg_iovlen = 2, .msg_control = control.space, .msg_controllen = sizeof control.space};
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
    if ((size_t)got < sizeof request->head || message.msg_flags & MSG_TRUNC)
        request->head.magic = 0;
    else
        request->text_size = (uint32_t)((size_t)got - sizeof request->head);
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

static void count_flight(void) {
    if (++spawner.in_flight == SPAWN_IN_FLIGHT)
        watch_requests(0);
}

static struct flight *take_flight(void) {
    for (size_t i = 0; i < FLIGHTS; i++)
        if (!spawner.flights[i].used) {
            spawner.flights[i] = (struct flight){.used = 1, .link = -1, .pidfd = -1, .userns = -1, .place = no_place};
            count_flight();
            return &spawner.flights[i];
        }
    return NULL;
}

static void count_landing(void) {
    if (spawner.in_flight-- == SPAWN_IN_FLIGHT)
        watch_requests(1);
}

static void end_flight(struct flight *flight) {
    /* Children that were cloned meanwhile hold copies of the link, so closing it does not take it out of the set. */
    if (flight->link >= 0)
        epoll_ctl(spawner.epoll, EPOLL_CTL_DEL, flight->link, NULL);
    close_fd(flight->link);
    close_fd(flight->pidfd);
    close_fd(flight->userns);
    place_let_go(&flight->place, 1);
    flight->used = 0;
    if (flight->parked)
        spawner.parked--;
    else
        count_landing();
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

static void park(struct flight *flight, const struct child_report *report) {
    if (spawner.parked == SPAWN_MOST_PARKED) {
        fail_flight_at(flight, EAGAIN, "parked");
        return;
    }
    memcpy(flight->reply.us + TIME_CHILD, report->us, sizeof report->us);
    answer(&flight->reply, flight->pidfd);
    flight->parked = 1;
    spawner.parked++;
    count_landing();
}

static void hear_child(struct flight *flight) {
    struct child_report report;
    ssize_t got = recv(flight->link, &report, sizeof report, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got != sizeof report && flight->parked) {
        end_flight(flight); /* it died while nobody waited for it */
    } else if (got != sizeof report) {
        land(flight);
    } else if (report.error) {
        report.step[SPAWN_STEP - 1] = 0;
        fail_flight_at(flight, report.error, report.step);
    } else if (report.parked) {
        park(flight, &report);
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
        struct child_plan plan = {.request = request->head,
                                  .started_us = flight->started_us,
                                  .link = pair[1],
                                  .listener = -1,
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

static int make_overlay(const struct request *request, const struct flight *flight, struct fault *fault) {
    struct overlay_plan plan = {.layers = request->layers,
                                .layer_count = request->head.layers,
                                .writable = request->writable,
                                .userns = flight->userns,
                                .flags = request->head.flags,
                                .root_uid = flight->head.uid_base};
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

static int send_go(const struct flight *flight, const struct spawn_request *order, const int fds[GO_FDS],
                   struct fault *fault) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int) * GO_FDS)];
    } control = {0};
    struct go_message go = {
        .flags = order->flags, .oom_score_adj = order->oom_score_adj, .data = order->data, .started_us = flight->started_us};
    int present[GO_FDS], count = 0;
    memcpy(go.hostname, order->hostname, sizeof go.hostname);
    for (int i = 0; i < GO_FDS; i++)
        if (fds[i] >= 0) {
            go.given |= 1u << i;
            present[count++] = fds[i];
        }
    struct iovec piece = {&go, sizeof go};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.space};
    message.msg_controllen = (socklen_t)CMSG_SPACE(sizeof(int) * (size_t)count);
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = (socklen_t)CMSG_LEN(sizeof(int) * (size_t)count);
    memcpy(CMSG_DATA(head), present, sizeof(int) * (size_t)count);
    return sendmsg(flight->link, &message, MSG_NOSIGNAL) == sizeof go ? 0 : fault_at(fault, "go");
}

/* What the child needs before it knows its files. */
static int equip(const struct request *request, const struct flight *flight, struct fault *fault) {
    int fds[GO_FDS] = {-1, -1, -1, -1, -1};
    fds[GO_DEV] = dev_make(flight->userns, fault);
    if (!fault->error && request->netns >= 0)
        fds[GO_SYSFS] = make_sysfs_there(request->netns, fault);
    if (!fault->error)
        send_go(flight, &request->head, fds, fault);
    close_fd(fds[GO_DEV]);
    close_fd(fds[GO_SYSFS]);
    return fault->error ? -1 : 0;
}

static int furnish(const struct request *request, struct flight *flight, struct fault *fault) {
    int fds[GO_FDS] = {-1, -1, -1, -1, -1};
    fds[GO_OVERLAY] = make_overlay(request, flight, fault);
    flight->reply.us[TIME_OVERLAY] = since(flight->started_us);
    if (!fault->error)
        fds[GO_SHM] = shm_make(request->head.shm_bytes, flight->userns, fault);
    fds[GO_LISTENER] = request->listener;
    if (!fault->error)
        send_go(flight, &request->head, fds, fault);
    for (uint32_t i = 0; !fault->error && i < request->head.data; i++)
        if (data_send(flight->link, request->data[i], request->targets[i]))
            fault_at(fault, "data-mount");
    close_fd(fds[GO_OVERLAY]);
    close_fd(fds[GO_SHM]);
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

static int watch_child(struct flight *flight, struct fault *fault) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = flight};
    return epoll_ctl(spawner.epoll, EPOLL_CTL_ADD, flight->link, &event) ? fault_at(fault, "epoll") : 0;
}

static int build(const struct request *request, struct flight *flight, struct fault *fault) {
    if (launch_there(request, flight, fault) || watch_child(flight, fault))
        return -1;
    flight->reply.us[TIME_CLONE] = since(flight->started_us);
    flight->userns = map_ids(request, flight->pid, fault);
    if (flight->userns < 0)
        return -1;
    flight->reply.us[TIME_MAPS] = since(flight->started_us);
    if (equip(request, flight, fault))
        return -1;
    return request->head.flags & SPAWN_PARK ? 0 : furnish(request, flight, fault);
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

static struct flight *find_parked(uint32_t id) {
    for (size_t i = 0; i < FLIGHTS; i++)
        if (spawner.flights[i].used && spawner.flights[i].parked && spawner.flights[i].head.id == id)
            return &spawner.flights[i];
    return NULL;
}

/* The flight of a request, counted as under way: a new one, or that of the child it orders. */
static struct flight *board(const struct request *request, int good, struct fault *fault) {
    struct flight *flight = good && request->head.parked ? find_parked(request->head.parked) : NULL;
    if (flight) {
        flight->parked = 0;
        spawner.parked--;
        count_flight();
    } else {
        flight = take_flight();
        if (!flight)
            abort(); /* requests are not read while every slot is taken */
        flight->head = request->head;
        if (good && request->head.parked) {
            errno = ESRCH;
            fault_at(fault, "parked");
        }
    }
    flight->started_us = monotonic_us();
    flight->reply = (struct spawn_reply){.id = request->head.id, .pid = flight->pid};
    return flight;
}

/* A place's descriptors stand in for those that the request does not bring. */
static void use_place(struct request *request, struct flight *flight) {
    const struct place *place = &flight->place;
    request->head.uid_base = place->uid_base;
    request->head.uid_count = place->uid_count;
    request->head.guest_uid = place->guest_uid;
    request->head.groups = place->group_count;
    request->groups = place->groups;
    request->cgroup = place->cgroup;
    request->listener = place->listener;
    request->writable = place->writable;
    if (!request->head.parked)
        flight->head = request->head;
}

static int take_place(struct request *request, struct flight *flight, struct fault *fault) {
    const struct spawn_request *head = &request->head;
    int failed;
    if (head->parked)
        failed = head->texts > 1 && place_limit(&spawner.places, request->texts, head->texts, head->disk_bytes, fault);
    else
        failed = become(0) ? fault_at(fault, "guest-uid")
                           : place_make(&spawner.places, request->texts, head->texts, head->disk_bytes, &flight->place, fault);
    if (failed)
        return -1;
    use_place(request, flight);
    return 0;
}

static void make(struct request *request, struct flight *flight, struct fault *fault) {
    if (request->head.flags & SPAWN_PLACE && take_place(request, flight, fault))
        return;
    if (request->head.parked)
        furnish(request, flight, fault);
    else
        build(request, flight, fault);
    place_let_go(&flight->place, !(request->head.flags & SPAWN_PARK));
}

static void begin(struct request *request, int good) {
    struct fault fault = {0};
    struct flight *flight = board(request, good, &fault);
    if (!good) {
        errno = EINVAL;
        fault_at(&fault, "request");
    } else if (!fault.error) {
        make(request, flight, &fault);
    }
    if (fault.error) {
        prefer_childs_reason(flight, &fault);
        fail_flight(flight, &fault);
    }
}

static void remove_places(const struct request *request) {
    struct spawn_reply reply = {.id = request->head.id};
    uint64_t left = 0;
    for (uint32_t i = 0; i < request->head.texts; i++)
        if (!place_remove(&spawner.places, request->texts[i]))
            left |= 1ull << i;
    reply.left = left;
    answer(&reply, -1);
}

static void heed(struct request *request) {
    const uint32_t places = SPAWN_PLACE | SPAWN_REMOVE;
    int good = spawn_parse(request, spawner.guest_uid) && (!(request->head.flags & places) || spawner.places.trees.trees >= 0);
    if (good && request->head.flags & SPAWN_REMOVE)
        remove_places(request);
    else
        begin(request, good);
}

/* -1 when the node agent is gone. */
static int serve_request(void) {
    struct request request;
    int got = receive(&request);
    if (got > 0)
        heed(&request);
    for (int i = 0; i < request.count; i++)
        close(request.fds[i]);
    return got < 0 ? -1 : 0;
}

static void end_overdue(void) {
    for (size_t i = 0; i < FLIGHTS; i++)
        if (spawner.flights[i].used && !spawner.flights[i].parked && since(spawner.flights[i].started_us) > DEADLINE_US)
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
    struct place_directories *places = &spawner.places;
    int *kept[4 + SPAWN_MAX_GROUPS] = {&spawner.control, &spawner.guest, &places->ids, &places->trees.trees};
    int count = 4;
    for (uint32_t i = 0; i < places->v1_count; i++)
        kept[count++] = &places->v1[i];
    for (int i = 0; i < count; i++)
        if (*kept[i] >= 0 && (*kept[i] = keep_above(*kept[i])) < 0)
            return -1;
    if (places->trees.trees >= 0 && (places->unified = keep_above(places->unified)) < 0)
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

/* The end of a network namespace searches the table of TCP connections, and that of the host has hundreds of thousands of
 * entries: 0.4 ms. Namespaces made from this one get a table of their own. Kernels before 6.1 have only the host's. */
static int own_network(struct fault *fault) {
    if (syscall(SYS_unshare, CLONE_NEWNET))
        return fault_at(fault, "network-namespace");
    int fd = open("/proc/sys/net/ipv4/tcp_child_ehash_entries", O_WRONLY | O_CLOEXEC);
    int failed = fd < 0 ? errno != ENOENT : write(fd, TCP_ENTRIES, strlen(TCP_ENTRIES)) < 0;
    close_fd(fd);
    return failed ? fault_at(fault, "network-namespace") : 0;
}

static int start(struct fault *fault) {
    signal(SIGPIPE, SIG_IGN);
    signal(SIGCHLD, SIG_IGN);
    raise_process_limit();
    if (reserve_descriptors())
        return fault_at(fault, "descriptors");
    spawner.places.host = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    if (lean_namespace(fault) || own_network(fault))
        return -1;
    spawner.places.own = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    spawner.own_net = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    spawner.epoll = epoll_create1(EPOLL_CLOEXEC);
    if (spawner.own_net < 0 || spawner.epoll < 0 || spawner.places.host < 0 || spawner.places.own < 0)
        return fault_at(fault, "epoll");
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll_ctl(spawner.epoll, EPOLL_CTL_ADD, spawner.control, &event))
        return fault_at(fault, "socket");
    return change_identity(spawner.guest_uid) ? fault_at(fault, "identity") : 0;
}

int main(int count, char **arguments) {
    struct fault fault = {0};
    struct spawner_arguments given;
    if (read_arguments(count, arguments, &given)) {
        fprintf(stderr, "usage: spawner --socket FD --guest FD --guest-uid N\n");
        return 2;
    }
    spawner.control = given.control;
    spawner.guest = given.guest;
    spawner.guest_uid = given.guest_uid;
    spawner.places = given.places;
    if (start(&fault)) {
        fprintf(stderr, "spawner: %s: %s\n", fault.step, strerror(fault.error));
        return 1;
    }
    serve();
    for (size_t i = 0; i < FLIGHTS; i++)
        if (spawner.flights[i].used)
            kill_flight(&spawner.flights[i]);
    return 0;
}
