#define _GNU_SOURCE
#include "sandbox_child.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "data_mounts.h"
#include "mounts.h"
#include "no_clone3.h"
#include "seccomp_filters.h"

#define BIT(n) (1ull << (n))
#define COUNT(array) (sizeof(array) / sizeof *(array))
#define CAPS_KEPT                                                                                             \
    (BIT(CAP_CHOWN) | BIT(CAP_DAC_OVERRIDE) | BIT(CAP_FSETID) | BIT(CAP_FOWNER) | BIT(CAP_SETGID) |           \
     BIT(CAP_SETUID) | BIT(CAP_SETFCAP) | BIT(CAP_SETPCAP) | BIT(CAP_NET_BIND_SERVICE) | BIT(CAP_SYS_CHROOT) | \
     BIT(CAP_KILL) | BIT(CAP_AUDIT_WRITE))

/* Covered by an empty file or directory; what this kernel lacks is skipped. The reason for each: docs/reference/isolation.md */
static const char *const masked_files[] = {
    "proc/kcore",         "proc/kallsyms",   "proc/keys",       "proc/key-users",  "proc/kmsg",       "proc/kpagecount",
    "proc/kpageflags",    "proc/kpagecgroup", "proc/interrupts", "proc/timer_list", "proc/timer_stats", "proc/sched_debug",
    "proc/latency_stats", "proc/sysrq-trigger", "proc/swaps",    "proc/cmdline",    "proc/vmallocinfo", "proc/slabinfo",
    "sys/kernel/vmcoreinfo", "sys/kernel/notes", "proc/config.gz",
};
static const char *const masked_directories[] = {
    "proc/acpi",         "proc/asound", "proc/fs",        "proc/scsi",           "sys/firmware",   "sys/fs",    "sys/kernel/debug",
    "sys/kernel/tracing", "sys/kernel/security", "sys/kernel/slab",    "sys/kernel/btf", "sys/module", "sys/power",
    "sys/devices/virtual/powercap", "sys/block", "sys/class/block", "sys/devices/virtual/block", "sys/kernel/irq",
};
static const char *const read_only[] = {"proc/bus", "proc/irq", "proc/sys"};

/* Namespaces that the sandbox's user namespace may create: none. */
static const char *const frozen_limits[] = {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"};

uint64_t monotonic_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

_Noreturn static void fail(const struct child_plan *plan, const char *step) {
    struct child_report report = {.error = errno ? errno : EIO};
    snprintf(report.step, sizeof report.step, "%s", step);
    send(plan->link, &report, sizeof report, MSG_NOSIGNAL);
    _exit(111);
}

static void require(const struct child_plan *plan, int result, const char *step) {
    if (result)
        fail(plan, step);
}

static uint32_t lap(const struct child_plan *plan) { return (uint32_t)(monotonic_us() - plan->started_us); }

/* ---- before the id maps are written ---- */

/* Copies of what belongs to other containers: a parked child would keep them open, and with them their links. */
static void close_others(const struct child_plan *plan) {
    int keep[3 + SPAWN_MAX_GROUPS] = {plan->link, plan->cgroup, plan->guest};
    uint32_t count = 3, from = RESERVED_FDS;
    for (uint32_t i = 0; i < plan->request.groups; i++)
        keep[count++] = plan->groups[i];
    for (;;) {
        uint32_t next = UINT32_MAX;
        for (uint32_t i = 0; i < count; i++)
            if ((uint32_t)keep[i] >= from && (uint32_t)keep[i] < next)
                next = (uint32_t)keep[i];
        if (next > from)
            syscall(SYS_close_range, from, next - 1, 0);
        if (next == UINT32_MAX)
            return;
        from = next + 1;
    }
}

/* A thread that moves itself through `tasks` skips the lock that a move through cgroup.procs waits a grace period for. */
static void join_groups(const struct child_plan *plan) {
    for (uint32_t i = 0; i < plan->request.groups; i++)
        if (write(plan->groups[i], "0", 1) != 1)
            fail(plan, "cgroup");
}

static int loopback_up(void) {
    struct ifreq request = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    request.ifr_flags = IFF_UP;
    int result = ioctl(fd, SIOCSIFFLAGS, &request);
    close(fd);
    return result;
}

/* A cgroup namespace made before the v1 moves would show host paths in /proc/self/cgroup. */
static void own_namespaces(const struct child_plan *plan) {
    int own_net = !(plan->request.flags & SPAWN_NETNS);
    require(plan, (int)syscall(SYS_unshare, CLONE_NEWCGROUP | (own_net ? CLONE_NEWNET : 0)), "namespaces");
    if (own_net)
        require(plan, loopback_up(), "loopback");
}

/* Descriptors by go_fd, -1 where there is none. */
static struct go_message await_go(const struct child_plan *plan, int fds[GO_FDS]) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int) * GO_FDS)];
    } control;
    struct go_message go = {0};
    struct iovec piece = {&go, sizeof go};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
    if (recvmsg(plan->link, &message, MSG_CMSG_CLOEXEC) != sizeof go)
        _exit(112); /* the spawner is gone: nobody wants this sandbox */
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    const unsigned char *next = head ? CMSG_DATA(head) : NULL;
    for (int i = 0; i < GO_FDS; i++) {
        fds[i] = -1;
        if (next && (go.given & (1u << i))) {
            memcpy(&fds[i], next, sizeof(int));
            next += sizeof(int);
        }
    }
    return go;
}

static void await_maps(const struct child_plan *plan, int fds[GO_FDS]) { await_go(plan, fds); }

static void await_order(struct child_plan *plan, int fds[GO_FDS]) {
    struct go_message go = await_go(plan, fds);
    plan->listener = fds[GO_LISTENER];
    plan->started_us = go.started_us;
    plan->request.flags = go.flags;
    plan->request.oom_score_adj = go.oom_score_adj;
    plan->request.data = go.data;
    memcpy(plan->request.hostname, go.hostname, sizeof plan->request.hostname);
}

/* Files made meanwhile belong to the sandbox's root. */
static void files_as_root(void) {
    syscall(SYS_setfsgid, 0);
    syscall(SYS_setfsuid, 0);
}

/* The process's own id has no number here, so setfsuid cannot name it; this does. Left different, it would make the
 * exec look like one of a setgid program, which clears the ambient capabilities. */
static void files_as_self(const struct child_plan *plan) {
    require(plan, (int)syscall(SYS_setregid, -1, -1), "file-group");
    require(plan, (int)syscall(SYS_setreuid, -1, -1), "file-user");
}

/* ---- the file system: proc, sys and dev are made ready aside, then moved into the new root ---- */

/* The image is not trusted: a link in place of /proc would have the mount land elsewhere. */
static void mount_point(const struct child_plan *plan, const char *name, mode_t mode) {
    struct stat facts;
    if (mkdir(name, mode) && errno != EEXIST)
        fail(plan, "image-mkdir");
    require(plan, fstatat(AT_FDCWD, name, &facts, AT_SYMLINK_NOFOLLOW), "image-stat");
    if (!S_ISDIR(facts.st_mode)) {
        errno = ENOTDIR;
        fail(plan, name);
    }
}

static void enter_root(const struct child_plan *plan, int overlay) {
    require(plan, sys_attach(overlay, LEAN_ROOT), "attach-root");
    require(plan, chdir(LEAN_ROOT), "enter-root");
    umask(0);
    mount_point(plan, "proc", 0555);
    mount_point(plan, "sys", 0555);
    mount_point(plan, "dev", 0755);
    mkdir("tmp", 01777);
}

static void mount_sys(const struct child_plan *plan, int sysfs) {
    const unsigned long flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY;
    if (sysfs >= 0)
        require(plan, sys_attach(sysfs, "sys"), "sysfs");
    else
        require(plan, sys_mount("sysfs", "sys", "sysfs", flags, NULL), "sysfs");
}

static void mount_aside(const struct child_plan *plan, const int fds[GO_FDS]) {
    const unsigned long quiet = MS_NOSUID | MS_NODEV | MS_NOEXEC;
    require(plan, chdir(LEAN_STAGE), "enter-stage");
    require(plan, sys_mount("proc", "proc", "proc", quiet, NULL), "proc");
    mount_sys(plan, fds[GO_SYSFS]);
    require(plan, sys_attach(fds[GO_DEV], "dev"), "dev");
    /* No gid=5: /proc/mounts would show it as a host id. A limit, because the host's is shared by all. */
    const char *pts = "newinstance,ptmxmode=0666,mode=0620,max=32";
    require(plan, sys_mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, pts), "devpts");
}

static void move_in(const struct child_plan *plan, int shm) {
    require(plan, sys_move(LEAN_STAGE "/proc", "proc"), "proc");
    require(plan, sys_move(LEAN_STAGE "/sys", "sys"), "sysfs");
    require(plan, sys_move(LEAN_STAGE "/dev", "dev"), "dev");
    require(plan, sys_attach(shm, "dev/shm"), "shm");
}

static int cover(const char *source, const char *target) {
    return sys_mount(source, target, NULL, MS_BIND, NULL) && errno != ENOENT;
}

static int make_read_only(const char *path) {
    const unsigned long flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC;
    if (sys_mount(path, path, NULL, MS_BIND, NULL))
        return errno != ENOENT;
    return sys_mount(NULL, path, NULL, flags, NULL);
}

/* /proc/sys/user shows the limits of the caller's user namespace. */
static void forbid_namespaces(const struct child_plan *plan) {
    char name[64];
    int directory = open("proc/sys/user", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0)
        fail(plan, "namespace-limits");
    for (size_t i = 0; i < COUNT(frozen_limits); i++) {
        snprintf(name, sizeof name, "max_%s_namespaces", frozen_limits[i]);
        int fd = openat(directory, name, O_WRONLY | O_CLOEXEC);
        if (fd < 0 && errno == ENOENT)
            continue; /* time namespaces are newer than some kernels */
        if (fd < 0 || write(fd, "0", 1) != 1)
            fail(plan, "namespace-limits");
        close(fd);
    }
    close(directory);
}

static void mask_all(const struct child_plan *plan) {
    for (size_t i = 0; i < COUNT(masked_files); i++)
        require(plan, cover(LEAN_MASK_FILE, masked_files[i]), masked_files[i]);
    for (size_t i = 0; i < COUNT(masked_directories); i++)
        require(plan, cover(LEAN_MASK_DIR, masked_directories[i]), masked_directories[i]);
    for (size_t i = 0; i < COUNT(read_only); i++)
        require(plan, make_read_only(read_only[i]), read_only[i]);
}

static void pivot(const struct child_plan *plan) {
    require(plan, (int)syscall(SYS_pivot_root, ".", "."), "pivot");
    require(plan, sys_unmount("."), "leave-old-root");
    require(plan, chdir("/"), "enter-new-root");
}

static void name_host(const struct child_plan *plan) {
    const char *name = plan->request.hostname;
    require(plan, sethostname(name, strlen(name)), "hostname");
    require(plan, (int)syscall(SYS_setdomainname, "(none)", 6), "domainname");
}

/* ---- the process ---- */

static void place_descriptor(const struct child_plan *plan, int from, int to) {
    if (dup2(from, to) < 0)
        fail(plan, "descriptors");
}

static void place_descriptors(const struct child_plan *plan) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0)
        fail(plan, "dev-null");
    for (int fd = 0; fd <= 2; fd++)
        place_descriptor(plan, null, fd);
    place_descriptor(plan, plan->listener, SPAWN_LISTENER);
    place_descriptor(plan, plan->cgroup, SPAWN_CGROUP);
}

static uint64_t kept_capabilities(uint32_t flags, int last) {
    if (flags & SPAWN_ALL_CAPS)
        return BIT(last + 1) - 1;
    return CAPS_KEPT | (flags & SPAWN_PTRACE ? BIT(CAP_SYS_PTRACE) : 0);
}

static int last_capability(void) {
    int cap = CAP_LAST_CAP;
    while (prctl(PR_CAPBSET_READ, cap + 1, 0, 0, 0) >= 0)
        cap++;
    while (prctl(PR_CAPBSET_READ, cap, 0, 0, 0) < 0)
        cap--;
    return cap;
}

static void set_filter(const struct child_plan *plan) {
    struct sock_fprog program = {COUNT(seccomp_plain), (struct sock_filter *)(uintptr_t)seccomp_plain};
    if (plan->request.flags & SPAWN_PTRACE)
        program = (struct sock_fprog){COUNT(seccomp_ptrace), (struct sock_filter *)(uintptr_t)seccomp_ptrace};
    if (!(plan->request.flags & SPAWN_SETUID))
        require(plan, prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no-new-privs");
    require(plan, (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program), "seccomp");
    if (plan->request.flags & SPAWN_SETUID)
        require(plan, forbid_clone3(), "seccomp");
}

/* The guest's id is not 0 in any namespace, so only ambient capabilities survive the exec. */
static void set_capabilities(const struct child_plan *plan, uint64_t kept, int last) {
    const uint32_t low = (uint32_t)kept, high = (uint32_t)(kept >> 32);
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{low, low, low}, {high, high, high}};
    require(plan, (int)syscall(SYS_capset, &head, data), "capset");
    for (int cap = 0; cap <= last; cap++)
        if (kept & BIT(cap))
            require(plan, prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap, 0, 0), "ambient");
}

static void give_up_privileges(const struct child_plan *plan) {
    const int last = last_capability();
    const uint64_t kept = kept_capabilities(plan->request.flags, last);
    for (int cap = 0; cap <= last; cap++)
        if (!(kept & BIT(cap)))
            require(plan, prctl(PR_CAPBSET_DROP, cap, 0, 0, 0), "bounding-set");
    set_filter(plan);
    set_capabilities(plan, kept, last);
}

static void reset_signals(void) {
    sigset_t none;
    sigemptyset(&none);
    signal(SIGCHLD, SIG_DFL);
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

_Noreturn static void start_guest(const struct child_plan *plan, const struct child_report *report) {
    char *arguments[] = {"init", NULL};
    char score[32];
    char *environment[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", score, NULL};
    snprintf(score, sizeof score, "OOM_SCORE_ADJ=%d", plan->request.oom_score_adj);
    if (send(plan->link, report, sizeof *report, MSG_NOSIGNAL) != sizeof *report)
        _exit(112);
    syscall(SYS_execveat, plan->guest, "", arguments, environment, AT_EMPTY_PATH);
    fail(plan, "exec");
}

/* The sandbox but for its files. */
static void make_ready(const struct child_plan *plan, struct child_report *report) {
    int fds[GO_FDS];
    join_groups(plan);
    report->us[0] = lap(plan);
    own_namespaces(plan);
    report->us[1] = lap(plan);
    await_maps(plan, fds);
    files_as_root();
    mount_aside(plan, fds);
    forbid_namespaces(plan);
    mask_all(plan);
}

static void say_parked(const struct child_plan *plan, struct child_report *report) {
    report->parked = 1;
    report->us[2] = lap(plan);
    if (send(plan->link, report, sizeof *report, MSG_NOSIGNAL) != sizeof *report)
        _exit(112);
    memset(report, 0, sizeof *report);
}

_Noreturn void sandbox_child(struct child_plan *plan) {
    struct child_report report = {0};
    int fds[GO_FDS];
    reset_signals();
    close_others(plan);
    make_ready(plan, &report);
    if (plan->request.flags & SPAWN_PARK)
        say_parked(plan, &report);
    await_order(plan, fds);
    enter_root(plan, fds[GO_OVERLAY]);
    move_in(plan, fds[GO_SHM]);
    require(plan, data_attach(plan->link, plan->request.data), "data-mount");
    if (plan->request.flags & SPAWN_HOSTS)
        require(plan, hosts_make(plan->request.hostname), "hosts");
    pivot(plan);
    name_host(plan);
    files_as_self(plan);
    report.us[2] = lap(plan);
    place_descriptors(plan);
    give_up_privileges(plan);
    start_guest(plan, &report);
}
