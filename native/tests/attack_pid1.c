/* Run as root of a sandbox: every way known to reach into PID 1. One line per way, "name verdict":
 * refused (EPERM, EACCES, ENOSYS), or reached with what came of it. Anything but a refusal counts as reached: EFAULT from
 * process_vm_readv means that the access check passed. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif
#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif

static void verdict(const char *name, long result) {
    int error = errno;
    if (result >= 0)
        printf("%s reached\n", name);
    else if (error == EPERM || error == EACCES || error == ENOSYS)
        printf("%s refused %s\n", name, strerror(error));
    else
        printf("%s reached %s\n", name, strerror(error));
}

static long read_some(const char *path) {
    char byte;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    long got = read(fd, &byte, 1);
    close(fd);
    return got;
}

/* Opening is where the kernel checks the memory file; a read at address 0 would fail for another reason. */
static long just_open(const char *path, int flags) {
    int fd = open(path, flags | O_CLOEXEC);
    if (fd >= 0)
        close(fd);
    return fd;
}

static long write_text(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    long done = write(fd, text, strlen(text));
    close(fd);
    return done;
}

static long follow(const char *path) {
    char target[256];
    return readlink(path, target, sizeof target);
}

static long list(const char *path) {
    DIR *directory = opendir(path);
    if (!directory)
        return -1;
    errno = 0;
    struct dirent *entry = readdir(directory);
    closedir(directory);
    return entry ? 0 : -1;
}

static void files(const char *base) {
    static const char *const readable[] = {"maps", "smaps", "smaps_rollup", "numa_maps", "environ", "auxv", "syscall",
                                           "stack", "pagemap", "personality", "io"};
    static const char *const links[] = {"exe", "cwd", "root", "fd/0", "fd/3", "fd/4", "ns/mnt", "ns/pid", "ns/user", "ns/net",
                                        "ns/cgroup"};
    static const char *const writable[] = {"oom_score_adj", "clear_refs", "coredump_filter", "uid_map", "setgroups", "projid_map", "comm",
                                           "attr/current", "sched", "autogroup", "mem"};
    static const char *const directories[] = {"fd", "fdinfo", "map_files", "ns"};
    char path[128];
#define AT(entry) snprintf(path, sizeof path, "%s/%s", base, entry)
    for (size_t i = 0; i < sizeof readable / sizeof *readable; i++) {
        AT(readable[i]);
        if (access(path, F_OK) == 0) /* not every kernel has all, nor task/ */
            verdict(path, read_some(path));
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        AT(links[i]);
        verdict(path, follow(path));
    }
    for (size_t i = 0; i < sizeof writable / sizeof *writable; i++) {
        AT(writable[i]);
        if (access(path, F_OK) == 0)
            verdict(path, write_text(path, "1"));
    }
    AT("mem");
    verdict(path, just_open(path, O_RDWR));
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++) {
        AT(directories[i]);
        if (access(path, F_OK) == 0)
            verdict(path, list(path));
    }
    AT("root/.");
    verdict(path, just_open(path, O_RDONLY));
    AT("exe");
    verdict("open_exe", just_open(path, O_RDONLY));
#undef AT
}

static void memory(void) {
    char buffer[16] = {0};
    struct iovec here = {buffer, sizeof buffer}, there = {(void *)0x400000, sizeof buffer};
    verdict("process_vm_readv", process_vm_readv(1, &here, 1, &there, 1, 0));
    verdict("process_vm_writev", process_vm_writev(1, &here, 1, &there, 1, 0));
    verdict("ptrace_seize", ptrace(0x4206 /* PTRACE_SEIZE */, 1, NULL, NULL));
    verdict("ptrace_attach", ptrace(PTRACE_ATTACH, 1, NULL, NULL));
    int pidfd = (int)syscall(SYS_pidfd_open, 1, 0);
    verdict("pidfd_getfd", syscall(SYS_pidfd_getfd, pidfd, 3, 0));
    verdict("process_madvise", syscall(SYS_process_madvise, pidfd, &there, 1, 20 /* MADV_COLD */, 0));
    verdict("kcmp", syscall(SYS_kcmp, 1, getpid(), 0, 3, 0));
    verdict("move_pages", syscall(SYS_move_pages, 1, 0, NULL, NULL, NULL, 0));
    close(pidfd);
}

static void priorities(void) {
    struct rlimit limit = {64, 64};
    struct sched_param parameters = {0};
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(0, &cpus);
    verdict("prlimit_get", syscall(SYS_prlimit64, 1, RLIMIT_NOFILE, NULL, &limit));
    verdict("prlimit_set", syscall(SYS_prlimit64, 1, RLIMIT_NOFILE, &limit, NULL));
    verdict("setpriority", setpriority(PRIO_PROCESS, 1, 19));
    verdict("sched_setaffinity", syscall(SYS_sched_setaffinity, 1, sizeof cpus, &cpus));
    verdict("sched_setscheduler", syscall(SYS_sched_setscheduler, 1, 5 /* SCHED_IDLE */, &parameters));
    verdict("timerslack", read_some("/proc/1/timerslack_ns"));
    verdict("ioprio_set", syscall(SYS_ioprio_set, 1, 1, 3 << 13));
}

/* PID 1 of a namespace gets no signal from inside that it has not asked for; the test looks whether it lives on. */
static void signals(void) {
    static const int numbers[] = {SIGKILL, SIGSTOP, SIGSEGV, SIGTERM, SIGABRT, SIGSYS, SIGHUP, SIGINT, SIGPIPE, SIGUSR1, SIGALRM};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        kill(1, numbers[i]);
        syscall(SYS_tgkill, 1, 1, numbers[i]);
    }
    printf("signals sent\n");
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    files("/proc/1");
    files("/proc/1/task/1");
    memory();
    priorities();
    signals();
    return 0;
}
