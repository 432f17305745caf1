/* Run in a sandbox: makes each call in a harmless form and prints "name errno-number" (0: it worked, -N: killed by signal N). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define BAD ((void *)8)
#define HIGH 0x100000000l /* the kernel ignores it in 32-bit arguments */

static void say(const char *name, long result) { printf("%s %d\n", name, result < 0 ? errno : 0); }
#define CALL(name, ...) (errno = 0, say(#name, syscall(SYS_##name, __VA_ARGS__)))
#define AS(label, number, ...) (errno = 0, say(label, syscall(number, __VA_ARGS__)))

static void kernel_and_mounts(void) {
    CALL(mount, BAD, BAD, BAD, 0, BAD);
    CALL(umount2, BAD, 0);
    CALL(pivot_root, BAD, BAD);
    AS("open_tree", 428, -1, BAD, 0);
    AS("move_mount", 429, -1, BAD, -1, BAD, 0);
    AS("fsopen", 430, BAD, 0);
    AS("fsconfig", 431, -1, 0, BAD, BAD, 0);
    AS("fsmount", 432, -1, 0, 0);
    AS("mount_setattr", 442, -1, BAD, 0, BAD, 0);
    CALL(open_by_handle_at, -1, BAD, 0);
    CALL(setns, -1, 0);
    CALL(bpf, 0, BAD, 0);
    CALL(perf_event_open, BAD, 0, -1, -1, 0);
    CALL(userfaultfd, -1);
    CALL(fanotify_init, 0, 0);
    AS("io_uring_setup", 425, 1, BAD);
    CALL(keyctl, -1, 0, 0, 0, 0);
    CALL(add_key, BAD, BAD, BAD, 0, 0);
    CALL(request_key, BAD, BAD, BAD, 0);
    CALL(kexec_load, 0, 0, BAD, 0);
    CALL(init_module, BAD, 0, BAD);
    CALL(finit_module, -1, BAD, 0);
    CALL(delete_module, BAD, 0);
    CALL(swapon, BAD, 0);
    CALL(swapoff, BAD);
    CALL(reboot, 1, 1, 1, BAD);
    CALL(settimeofday, BAD, BAD);
    CALL(clock_settime, -1, BAD);
    CALL(acct, BAD);
    CALL(quotactl, -1, BAD, 0, BAD);
    CALL(mbind, BAD, 0, 0, BAD, 0, 0);
    CALL(syslog, 10, BAD, 0);
    CALL(sethostname, BAD, 1);
}

static void processes(void) {
    AS("clone3", 435, BAD, 0);
    AS("unknown", 1000, 0);
    AS("io_setup", 206, 1, BAD);
    AS("io_submit", 209, 0, 0, BAD);
    CALL(process_vm_readv, -1, BAD, 0, BAD, 0, 0);
    CALL(process_vm_writev, -1, BAD, 0, BAD, 0, 0);
    CALL(kcmp, getpid(), getpid(), 0, 0, 0);
    AS("pidfd_getfd", 438, -1, 0, 0);
    CALL(ptrace, PTRACE_PEEKUSER, -1, 0, 0);
    AS("unshare_user", SYS_unshare, CLONE_NEWUSER);
    AS("unshare_mount", SYS_unshare, CLONE_NEWNS);
    AS("unshare_time", SYS_unshare, 0x80);
    AS("unshare_files", SYS_unshare, CLONE_FILES);
    AS("clone_user", SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    AS("clone_pid", SYS_clone, CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0);
    AS("personality_query", SYS_personality, 0xffffffff);
    AS("personality_no_random", SYS_personality, 0x40000);
    AS("personality_read_exec", SYS_personality, 0x400000);
    AS("modify_ldt", SYS_modify_ldt, 0, BAD, 0);
}

static void sockets(void) {
    AS("socket_unix", SYS_socket, AF_UNIX, SOCK_STREAM, 0);
    AS("socket_inet", SYS_socket, AF_INET, SOCK_STREAM, 0);
    AS("socket_inet6", SYS_socket, AF_INET6, SOCK_DGRAM, 0);
    AS("socket_route", SYS_socket, AF_NETLINK, SOCK_RAW, 0);
    AS("socket_audit", SYS_socket, AF_NETLINK, SOCK_RAW, 9);
    AS("socket_packet", SYS_socket, 17, SOCK_RAW, 0);
    AS("socket_key", SYS_socket, 15, SOCK_RAW, 2);
    AS("socket_alg", SYS_socket, 38, SOCK_SEQPACKET, 0);
    AS("socket_vsock", SYS_socket, 40, SOCK_STREAM, 0);
    AS("socket_vsock_high", SYS_socket, HIGH | 40, SOCK_STREAM, 0);
    AS("socket_alg_high", SYS_socket, HIGH | 38, SOCK_SEQPACKET, 0);
    AS("socket_raw", SYS_socket, AF_INET, SOCK_RAW, 1);
    AS("socket_inet_high", SYS_socket, HIGH | AF_INET, HIGH | SOCK_DGRAM, HIGH | 17);
    AS("socketpair_unix", SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, BAD);
    AS("socketpair_inet", SYS_socketpair, AF_INET, SOCK_STREAM, 0, BAD);
    AS("socketpair_vsock", SYS_socketpair, 40, SOCK_STREAM, 0, BAD);
}

/* Which types and protocols of a family can be had, as type * 1000 + protocol, and what is refused in another way than it should. */
static void protocols(int family) {
    printf("protocols_%d ", family);
    for (int type = 0; type < 16; type++)
        for (int protocol = -1; protocol < 300; protocol++) {
            int fd = socket(family, type, protocol);
            if (fd >= 0)
                printf("%d,", type * 1000 + protocol);
            else if (errno != (type == SOCK_RAW ? EPERM : EPROTONOSUPPORT))
                printf("%d:%d,", type * 1000 + protocol, errno);
            close(fd);
        }
    printf("\n");
}

/* Options that are answered with EPERM, of the numbers below 70. On no socket: what is let through is EBADF. */
static void options(int level) {
    printf("options_%d ", level);
    for (int option = 0; option < 70; option++)
        if (setsockopt(-1, level, option, BAD, 4) && errno == EPERM)
            printf("%d,", option);
    printf("\n");
}

static void controls(void) {
    static const struct {
        const char *name;
        unsigned command;
    } refused[] = {{"tiocsti", 0x5412},       {"tioclinux", 0x541c},     {"fifreeze", 0xc0045877},   {"fithaw", 0xc0045878},
                   {"xfs_swapext", 0xc0c0586d}, {"btrfs_subvolume", 0x5000940e}, {"setflags", 0x40086602},
                   {"tiocsetd", 0x5423},      {"siocgifbr", 0x8940},     {"siocsifbr", 0x8941},    {"siocbraddbr", 0x89a0},
                   {"siocbrdelbr", 0x89a1},   {"siocgifvlan", 0x8982},   {"siocsifvlan", 0x8983}};
    char label[64];
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        snprintf(label, sizeof label, "ioctl_%s", refused[i].name);
        AS(label, SYS_ioctl, -1, (long)refused[i].command, BAD);
        snprintf(label, sizeof label, "ioctl_%s_high", refused[i].name);
        AS(label, SYS_ioctl, -1, HIGH | (long)refused[i].command, BAD);
    }
    AS("ioctl_other", SYS_ioctl, -1, 0x5401l, BAD);
    AS("ioctl_fsgetxattr", SYS_ioctl, -1, 0x801c581fl, BAD);
    AS("ioctl_xfs_exchange", SYS_ioctl, -1, 0x40285881l, BAD);
}

#if defined __x86_64__
static void other_abi(const char *name, int i386) {
    pid_t pid = fork();
    if (pid == 0) {
        long result = 20; /* getpid of i386 */
        if (i386)
            __asm__ volatile("int $0x80" : "+a"(result)::"memory");
        else
            syscall(0x40000000 | SYS_getpid);
        _exit(0);
    }
    int status;
    waitpid(pid, &status, 0);
    printf("%s %d\n", name, WIFSIGNALED(status) ? -WTERMSIG(status) : 0);
}
#endif

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    kernel_and_mounts();
    processes();
    sockets();
    protocols(AF_INET);
    protocols(AF_INET6);
    options(0);
    options(1);
    options(6);
    options(17);
    options(41);
    controls();
#if defined __x86_64__
    other_abi("abi_x32", 0);
    other_abi("abi_i386", 1);
#endif
    return 0;
}
