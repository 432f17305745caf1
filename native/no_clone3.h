/* One filter more than the sandbox's own: clone3 is answered with ENOSYS, as its flags lie in memory that no filter can read.
 * The guest sets it on each program, and so keeps clone3 for itself; the spawner sets it on a whole sandbox where the guest could
 * not: without no_new_privs only SYS_ADMIN may set filters. */
#ifndef BARCHAN_NO_CLONE3_H
#define BARCHAN_NO_CLONE3_H
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

/* For the calling process and its children, for good; -1 with errno. */
static inline int forbid_clone3(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
}
#endif
