/* Writes the seccomp programs as a C header: generate DIRECTORY > seccomp_filters.h
 *
 * seccomp_plain, seccomp_ptrace: first a filter by name (allow.txt, guest.txt, refuse.txt, ptrace.txt; everything else ENOSYS), then
 * the sockets (sockets.h), then one by argument, whose default is to allow. A libseccomp rule cannot say "all but these values",
 * so they are made apart and joined: where one would allow, it goes on to the next. One program costs the kernel less than two. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <seccomp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sockets.h"

#define LOW32 0xffffffffull

static const char *directory;
static int skipped;

static void check(int result, const char *what) {
    if (result < 0) {
        fprintf(stderr, "generate: %s: %s\n", what, strerror(-result));
        exit(1);
    }
}

static void add(scmp_filter_ctx filter, uint32_t action, const char *name, unsigned count, struct scmp_arg_cmp *tests) {
    int number = seccomp_syscall_resolve_name(name);
    if (number < 0) {
        fprintf(stderr, "generate: %s is not known here, left out\n", name);
        skipped++;
        return;
    }
    check(seccomp_rule_add_array(filter, action, number, count, tests), name);
}

static void add_list(scmp_filter_ctx filter, const char *file, uint32_t action) {
    char path[4096], line[256];
    snprintf(path, sizeof path, "%s/%s", directory, file);
    FILE *list = fopen(path, "re");
    if (!list)
        check(-errno, path);
    while (fgets(line, sizeof line, list)) {
        line[strcspn(line, " #\n")] = 0;
        if (line[0])
            add(filter, action, line, 0, NULL);
    }
    fclose(list);
}

/* Not SCMP_A0 and its like: libseccomp 2.6's leave a field out, which is a warning. */
static struct scmp_arg_cmp when(unsigned argument, enum scmp_compare how, uint64_t first, uint64_t second) {
    struct scmp_arg_cmp test;
    memset(&test, 0, sizeof test);
    test.arg = argument;
    test.op = how;
    test.datum_a = first;
    test.datum_b = second;
    return test;
}

static scmp_filter_ctx begin(uint32_t otherwise) {
    scmp_filter_ctx filter = seccomp_init(otherwise);
    if (!filter)
        check(-ENOMEM, "seccomp_init");
    /* Another ABI (i386, x32) numbers calls differently: a program of one ends at its first call. */
    check(seccomp_attr_set(filter, SCMP_FLTATR_ACT_BADARCH, SCMP_ACT_KILL_PROCESS), "bad arch");
    check(seccomp_attr_set(filter, SCMP_FLTATR_CTL_OPTIMIZE, 2), "binary tree");
    return filter;
}

struct program {
    struct sock_filter steps[BPF_MAXINSNS];
    size_t count;
};

static void export(scmp_filter_ctx filter, struct program *program) {
    int fd = memfd_create("bpf", MFD_CLOEXEC);
    check(fd < 0 ? -errno : 0, "memfd");
    check(seccomp_export_bpf(filter, fd), "export");
    seccomp_release(filter);
    ssize_t size = pread(fd, program->steps, sizeof program->steps, 0);
    check(size <= 0 ? -EIO : 0, "read");
    program->count = (size_t)size / sizeof *program->steps;
    close(fd);
}

static void print_step(struct sock_filter step) {
    printf("    {0x%04x, %u, %u, 0x%08x},\n", step.code, step.jt, step.jf, step.k);
}

static void emit(const char *name, const struct program *first, const struct program *sockets, const struct program *second) {
    printf("static const struct sock_filter %s[] = {\n", name);
    for (size_t i = 0; i < first->count; i++) {
        struct sock_filter step = first->steps[i];
        if (step.code == (BPF_RET | BPF_K) && step.k == SECCOMP_RET_ALLOW)
            step = (struct sock_filter)BPF_STMT(BPF_JMP | BPF_JA, (uint32_t)(first->count - i - 1));
        print_step(step);
    }
    for (size_t i = 0; i < sockets->count; i++)
        print_step(sockets->steps[i]);
    for (size_t i = 0; i < second->count; i++)
        print_step(second->steps[i]);
    printf("};\n");
}

static void add_personality(scmp_filter_ctx filter) {
    /* PER_LINUX, PER_LINUX32, UNAME26 with each, ADDR_NO_RANDOMIZE (debuggers, sanitizers), the query. */
    static const uint64_t harmless[] = {0, 8, 0x20000, 0x20008, 0x40000, 0xffffffff};
    for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++) {
        struct scmp_arg_cmp test = when(0, SCMP_CMP_EQ, harmless[i], 0);
        add(filter, SCMP_ACT_ALLOW, "personality", 1, &test);
    }
}

static void by_name(struct program *program, uint32_t debugging) {
    scmp_filter_ctx filter = begin(SCMP_ACT_ERRNO(ENOSYS));
    add_list(filter, "allow.txt", SCMP_ACT_ALLOW);
    add_list(filter, "guest.txt", SCMP_ACT_ALLOW);
    add_list(filter, "refuse.txt", SCMP_ACT_ERRNO(EPERM));
    add_list(filter, "ptrace.txt", debugging);
    add_personality(filter);
    export(filter, program);
}

static void refuse_namespaces(scmp_filter_ctx filter) {
    /* mount, cgroup, uts, ipc, user, pid, net; and time, which only unshare takes (in clone the bit is part of a signal). */
    static const uint64_t kinds[] = {0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x80};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        struct scmp_arg_cmp test = when(0, SCMP_CMP_MASKED_EQ, kinds[i], kinds[i]);
        add(filter, SCMP_ACT_ERRNO(EPERM), "unshare", 1, &test);
        if (kinds[i] != 0x80)
            add(filter, SCMP_ACT_ERRNO(EPERM), "clone", 1, &test);
    }
}

static void limit_ioctl(scmp_filter_ctx filter) {
    static const uint32_t refused[] = {
        0x5412,     /* TIOCSTI: types into a terminal */
        0x541c,     /* TIOCLINUX: pastes into a console */
        0x541d,     /* TIOCCONS: takes the console's output */
        0x5423,     /* TIOCSETD: loads modules of line disciplines */
        0x8940,     /* SIOCGIFBR and the next three: load the module of bridges before they look who asks */
        0x8941,     /* SIOCSIFBR */
        0x89a0,     /* SIOCBRADDBR */
        0x89a1,     /* SIOCBRDELBR */
        0x8982,     /* SIOCGIFVLAN and the next: load the module of VLANs */
        0x8983,     /* SIOCSIFVLAN */
        0x5000940f, /* BTRFS_IOC_SNAP_DESTROY */
        0x5000940e, /* BTRFS_IOC_SUBVOL_CREATE: a subvolume has a quota of its own */
        0x50009401, /* BTRFS_IOC_SNAP_CREATE */
        0x50009417, /* BTRFS_IOC_SNAP_CREATE_V2 */
        0x50009418, /* BTRFS_IOC_SUBVOL_CREATE_V2 */
        0x40086602, /* FS_IOC_SETFLAGS: immutable, append-only, no copy-on-write */
        0x40046602, /* FS_IOC32_SETFLAGS */
        0x800c6613, /* FS_IOC_SET_ENCRYPTION_POLICY */
        0x40806685, /* FS_IOC_ENABLE_VERITY */
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        /* The kernel reads 32 bits of the command; so must the filter. */
        struct scmp_arg_cmp test = when(1, SCMP_CMP_MASKED_EQ, LOW32, refused[i]);
        add(filter, SCMP_ACT_ERRNO(EPERM), "ioctl", 1, &test);
    }
}

/* Type 'X': freezing, trimming, project ids, and all of XFS's own (exchanging the contents of files, opening by handle,
 * shutting down …) whatever will be added. Left is FS_IOC_FSGETXATTR: refused is each number with a bit that it has not. */
static void refuse_type_x(scmp_filter_ctx filter) {
    const uint64_t type = 0x5800, left = 31;
    for (uint64_t bit = 1; bit < 256; bit <<= 1) {
        struct scmp_arg_cmp test = when(1, SCMP_CMP_MASKED_EQ, 0xff00 | bit, type | (bit & ~left));
        add(filter, SCMP_ACT_ERRNO(EPERM), "ioctl", 1, &test);
    }
}

static void by_argument(struct program *program) {
    scmp_filter_ctx filter = begin(SCMP_ACT_ALLOW);
    refuse_namespaces(filter);
    limit_ioctl(filter);
    refuse_type_x(filter);
    export(filter, program);
}

int main(int count, char **arguments) {
    if (count != 2)
        return 2;
    directory = arguments[1];
    printf("/* Generated by native/seccomp/generate.c. */\n#include <linux/filter.h>\n");
    static struct program plain, debugging, sockets, arguments_too;
    by_name(&plain, SCMP_ACT_ERRNO(EPERM));
    by_name(&debugging, SCMP_ACT_ALLOW);
    by_argument(&arguments_too);
    sockets.count = assemble(sockets.steps);
    emit("seccomp_plain", &plain, &sockets, &arguments_too);
    emit("seccomp_ptrace", &debugging, &sockets, &arguments_too);
    printf("/* %d names unknown to this libseccomp were left out. */\n", skipped);
    return 0;
}
