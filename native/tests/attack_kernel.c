/* Every way we know to reach the kernel or the host from a sandbox, in a form that works where nothing forbids it.
 *
 *   attack_kernel [-a] [DIRECTORY]     one line per attack: "name errno" (0: it worked, -N: killed by signal N)
 *
 * Without -a, attacks that would harm the host if they worked are left out. Each runs in a child of its own, at most five
 * seconds, so that what worked does not change the next. Files are made in DIRECTORY (/tmp).
 * ENOENT also stands for a file that is there and empty, or a device that cannot be had: absent. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <linux/fs.h>
#include <linux/keyctl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

static const char *place = "/tmp";

/* ---- pieces ---- */

static const char *in_place(const char *name) {
    static char path[2][PATH_MAX];
    static int turn;
    turn = !turn;
    snprintf(path[turn], sizeof path[turn], "%s/%s.%d", place, name, (int)getpid());
    return path[turn];
}

static int make_file(const char *name) { return open(in_place(name), O_RDWR | O_CREAT | O_CLOEXEC, 0600); }

/* What a control changes is to stay with it: where the namespace is refused, what follows is refused as well. */
static void alone(int namespaces) {
    if (syscall(SYS_unshare, namespaces) == 0 && (namespaces & CLONE_NEWNS))
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL);
}

static long absent(void) {
    errno = ENOENT;
    return -1;
}

static long open_only(const char *path, int flags) { return open(path, flags | O_CLOEXEC | O_NONBLOCK); }

/* An empty file tells nothing. */
static long read_from(const char *path) {
    char bytes[64];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return -1;
    long got = read(fd, bytes, sizeof bytes);
    return got == 0 ? absent() : got;
}

static long write_to(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    return fd < 0 ? -1 : write(fd, text, strlen(text));
}

/* Writes back what is there: no change where it works. */
static long rewrite(const char *path) {
    char bytes[512];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    long got = fd < 0 ? -1 : read(fd, bytes, sizeof bytes - 1);
    if (got < 0)
        return -1;
    bytes[got] = 0;
    return write_to(path, bytes);
}

/* A device by its numbers; opening is enough. */
static long device(mode_t kind, unsigned major, unsigned minor) {
    const char *path = in_place("node");
    if (mknod(path, kind | 0600, makedev(major, minor)))
        return -1;
    long fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int error = errno;
    unlink(path);
    errno = error;
    return fd;
}

/* musl's ioctl takes an int. */
static long control(long fd, unsigned long command, void *argument) { return syscall(SYS_ioctl, fd, command, argument); }

static long terminal(unsigned long command, void *argument) {
    int fd = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC), unlock = 0;
    char other[64];
    if (fd < 0 || ioctl(fd, TIOCSPTLCK, &unlock) || ptsname_r(fd, other, sizeof other))
        return -1;
    setsid();
    int end = open(other, O_RDWR | O_CLOEXEC);
    return control(end, command, argument);
}

static long on_place(unsigned long command, void *argument) {
    int fd = open(place, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? -1 : control(fd, command, argument);
}

static long on_file(unsigned long command, void *argument) {
    int fd = make_file("file");
    unlink(in_place("file"));
    return fd < 0 ? -1 : control(fd, command, argument);
}

static pid_t other_process(void) {
    pid_t pid = fork();
    if (pid == 0)
        pause();
    return pid;
}

static long read_other_memory(void) {
    char byte;
    struct iovec here = {&byte, 1}, there = {&place, 1};
    return syscall(SYS_process_vm_readv, other_process(), &here, 1, &there, 1, 0);
}

/* ---- the attacks ---- */

static long list(const char *path) {
    DIR *directory = opendir(path);
    if (!directory)
        return -1;
    int entries = 0;
    while (readdir(directory))
        entries++;
    closedir(directory);
    return entries > 2 ? entries : absent();
}

static long move_new_mount(void) {
    alone(CLONE_NEWNS);
    int context = (int)syscall(430, "tmpfs", 0);
    if (context >= 0 && syscall(431, context, 6 /* FSCONFIG_CMD_CREATE */, NULL, NULL, 0) == 0)
        context = (int)syscall(432, context, 0, 0);
    return syscall(429, context, "", AT_FDCWD, place, 4 /* MOVE_MOUNT_F_EMPTY_PATH */);
}

/* /dev/shm is a tmpfs, whose files have handles. */
static long open_shm_by_handle(void) {
    struct {
        struct file_handle head;
        unsigned char bytes[128];
    } handle = {.head = {.handle_bytes = sizeof handle.bytes}};
    int id, fd = open("/dev/shm", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (syscall(SYS_name_to_handle_at, AT_FDCWD, "/dev/shm", &handle, &id, 0))
        return -1;
    return syscall(SYS_open_by_handle_at, fd, &handle, O_RDONLY);
}

/* "Shocker": the root of a disk has inode 2 on ext4; ESTALE means that the kernel looked it up. */
static long open_inode_2(int mount) {
    struct {
        struct file_handle head;
        uint32_t bytes[2];
    } handle = {.head = {8, 1}, .bytes = {2, 0}};
    long fd = syscall(SYS_open_by_handle_at, mount, &handle, O_RDONLY);
    return fd < 0 && errno != ESTALE ? -1 : 0;
}

static long raw_clone(unsigned long flags) {
    long pid = syscall(SYS_clone, flags, NULL, NULL, NULL, NULL);
    if (pid == 0)
        _exit(0);
    return pid;
}

static long load_bpf(void) {
    static const uint64_t program[] = {0xb7, 0x95}; /* r0 = 0; exit */
    struct {
        uint32_t type, count;
        uint64_t steps, licence, rest[12];
    } request = {1, 2, (uint64_t)(uintptr_t)program, (uint64_t)(uintptr_t) "GPL", {0}};
    return syscall(SYS_bpf, 5, &request, sizeof request);
}

/* A file without the header of a swap area: EINVAL comes after the check. */
static long swap_on(void) {
    int fd = make_file("swap");
    if (fd < 0 || ftruncate(fd, 1 << 20))
        return -1;
    return swapon(in_place("swap"), 0) < 0 && errno != EINVAL ? -1 : 0;
}

static long sched_set(int policy, int priority) {
    return syscall(SYS_sched_setscheduler, 0, policy, &(struct sched_param){.sched_priority = priority});
}

static long set_flags(void) {
    int none = 0, immutable = 0x10, fd = make_file("immutable");
    long done = control(fd, 0x40086602 /* FS_IOC_SETFLAGS */, &immutable);
    if (done == 0)
        control(fd, 0x40086602, &none);
    return done;
}

static long set_project(void) {
    struct {
        uint32_t flags, extent, extents, project, cow;
        char pad[8];
    } facts = {.project = 77};
    return control(make_file("project"), 0x401c5820 /* FS_IOC_FSSETXATTR */, &facts);
}

static long interface_down(void) {
    struct ifreq request = {.ifr_name = "lo"};
    return control(socket(AF_INET, SOCK_DGRAM, 0), SIOCSIFFLAGS, &request);
}

static long new_bridge(void) { return control(socket(AF_INET, SOCK_DGRAM, 0), 0x89a0 /* SIOCBRADDBR */, "attack0"); }

static long sign_segments(void) {
    struct {
        struct sockaddr_storage peer;
        uint8_t flags, prefix;
        uint16_t size;
        uint32_t device;
        uint8_t key[80];
    } key = {.peer = {.ss_family = AF_INET}, .size = 1, .key = "k"};
    return setsockopt(socket(AF_INET, SOCK_STREAM, 0), 6, 14 /* TCP_MD5SIG */, &key, sizeof key);
}

/* Answers to requests that are none, each with the request in it. 0 when more than half of them wait to be read. */
static long keep_replies(void) {
    struct {
        uint32_t size;
        uint16_t type, flags;
        uint32_t sequence, port;
        char rest[30000];
    } request = {.size = sizeof request, .type = 16 /* RTM_NEWLINK */, .flags = 1 /* NLM_F_REQUEST */};
    int queued = 0, fd = socket(AF_NETLINK, SOCK_RAW, 0);
    if (fd < 0)
        return -1;
    for (int i = 0; i < 4; i++)
        send(fd, &request, sizeof request, MSG_DONTWAIT);
    while (recv(fd, &request, sizeof request, MSG_DONTWAIT) > 20000)
        queued++;
    return queued > 2 ? 0 : absent();
}

static long set_file_policy(void) {
    int fd = (int)syscall(SYS_memfd_create, "attack", 0);
    if (fd < 0 || ftruncate(fd, 1 << 20))
        return -1;
    void *shared = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return syscall(SYS_mbind, shared, 4096, 2 /* MPOL_BIND */, &(unsigned long){1}, 64, 0);
}

static long join_group(void) {
    struct ip_mreqn request = {.imr_multiaddr.s_addr = htonl(0xe0000105), .imr_ifindex = 1};
    return setsockopt(socket(AF_INET, SOCK_DGRAM, 0), 0, 35 /* IP_ADD_MEMBERSHIP */, &request, sizeof request);
}

/* Opened and closed: what an opened file would take is not tried. */
static unsigned openable;
static int try_to_open(const char *path, const struct stat *facts, int kind, struct FTW *at) {
    (void)at;
    if (kind == FTW_F && S_ISREG(facts->st_mode) && (facts->st_mode & 0222)) {
        int fd = open(path, O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
        if (fd >= 0) {
            openable++;
            fprintf(stderr, "%s\n", path);
            close(fd);
        }
    }
    return openable > 20;
}

static long open_for_writing(const char *path) {
    nftw(path, try_to_open, 16, FTW_PHYS | FTW_MOUNT);
    errno = EACCES;
    return openable ? (long)openable : -1;
}

/* ---- the table ---- */

#define SAFE(name, expression) \
    static long do_##name(void) { return (long)(expression); }
#define HARM SAFE
#include "attack_table.h"
#undef SAFE
#undef HARM
#define SAFE(name, expression) {#name, do_##name, 0},
#define HARM(name, expression) {#name, do_##name, 1},
static const struct {
    const char *name;
    long (*attempt)(void);
    int harmful;
} attacks[] = {
#include "attack_table.h"
};

static int in_child(long (*attempt)(void)) {
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        setsid();
        alarm(5);
        errno = 0;
        long result = attempt();
        _exit(result < 0 ? errno & 0xff : 0);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        return -1000;
    kill(-pid, SIGKILL);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

int main(int count, char **arguments) {
    int all = count > 1 && strcmp(arguments[1], "-a") == 0;
    if (count > 1 + all)
        place = arguments[1 + all];
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < sizeof attacks / sizeof *attacks; i++)
        if (all || !attacks[i].harmful)
            printf("%s %d\n", attacks[i].name, in_child(attacks[i].attempt));
    return 0;
}
