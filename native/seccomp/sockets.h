/* What a sandbox may ask of sockets, by argument. By hand, since lists of numbers and ranges of them make long libseccomp programs
 * and the time to set a filter is in the time that a sandbox takes to be made. Compares 32 bits, as the kernel reads these. */
#ifndef BARCHAN_SECCOMP_SOCKETS_H
#define BARCHAN_SECCOMP_SOCKETS_H
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>

enum label { NEXT, PAIR, OPTIONS, INET, STREAM, DATAGRAM, IP, IPV6, TCP, REFUSE, NO_FAMILY, NO_PROTOCOL, END, LABELS };

/* `yes` and `no` are labels; a step with code MARK is the place of label k. */
struct step {
    uint16_t code;
    uint8_t yes, no;
    uint32_t k;
};

#define MARK 0xffff
#define AT(label) {MARK, NEXT, NEXT, label}
#define LOAD(field) {BPF_LD | BPF_W | BPF_ABS, NEXT, NEXT, field}
#define CALL_NUMBER LOAD(offsetof(struct seccomp_data, nr))
#define ARGUMENT(n) LOAD(offsetof(struct seccomp_data, args) + 8 * (n)) /* its lower half: little endian */
#define ONLY(mask) {BPF_ALU | BPF_AND | BPF_K, NEXT, NEXT, mask}
#define EQUAL(value, yes, no) {BPF_JMP | BPF_JEQ | BPF_K, yes, no, value}
#define ANSWER(error) {BPF_RET | BPF_K, NEXT, NEXT, SECCOMP_RET_ERRNO | (error)}
/* Refused from first to last. */
#define RANGE(first, last, beyond) {BPF_JMP | BPF_JGE | BPF_K, NEXT, beyond, first}, {BPF_JMP | BPF_JGT | BPF_K, NEXT, REFUSE, last}
#define ONE(value) EQUAL(value, REFUSE, NEXT)

/* Ranges in rising order: what is below the first of a range is in none. */
static const struct step socket_steps[] = {
    CALL_NUMBER,
    EQUAL(SYS_socket, NEXT, PAIR),
    ARGUMENT(0),
    EQUAL(1, END, NEXT), /* AF_UNIX */
    EQUAL(2, INET, NEXT),
    EQUAL(10, INET, NO_FAMILY), /* AF_INET6. Not AF_NETLINK: what waits in its sockets is charged to nobody */
    AT(INET),
    ARGUMENT(1),
    ONLY(15), /* the type without its flags */
    EQUAL(1, STREAM, NEXT),
    EQUAL(2, DATAGRAM, NEXT),
    EQUAL(3, REFUSE, NO_PROTOCOL), /* raw; for a type or protocol that is not known the kernel starts modprobe on the host */
    AT(STREAM),
    ARGUMENT(2),
    EQUAL(0, END, NEXT),
    EQUAL(6, END, NO_PROTOCOL), /* TCP */
    AT(DATAGRAM), /* not ICMP: what waits in its sockets is charged to nobody */
    ARGUMENT(2),
    EQUAL(0, END, NEXT),
    EQUAL(17, END, NO_PROTOCOL), /* UDP */

    AT(PAIR),
    EQUAL(SYS_socketpair, NEXT, OPTIONS),
    ARGUMENT(0),
    EQUAL(1, END, NO_FAMILY), /* others make both sockets before they find out that they cannot */

    AT(OPTIONS),
    EQUAL(SYS_setsockopt, NEXT, END),
    ARGUMENT(1),
    EQUAL(0, IP, NEXT),
    EQUAL(41, IPV6, NEXT),
    EQUAL(6, TCP, END),
    AT(IP),
    ARGUMENT(2),
    RANGE(35, 48, END), /* groups (IP_ADD_MEMBERSHIP, MCAST_…): charged to nobody, and changed under one lock of the host */
    EQUAL(0, END, END),
    AT(IPV6),
    ARGUMENT(2),
    RANGE(20, 21, END), /* IPV6_JOIN_GROUP, IPV6_LEAVE_GROUP */
    RANGE(27, 28, END), /* IPV6_JOIN_ANYCAST, IPV6_LEAVE_ANYCAST */
    ONE(32),            /* IPV6_FLOWLABEL_MGR: the host has 4096 labels */
    RANGE(42, 48, END), /* MCAST_… */
    EQUAL(0, END, END),
    AT(TCP),
    ARGUMENT(2),
    ONE(14),            /* TCP_MD5SIG: loads the module of a cipher; keys are charged to nobody */
    RANGE(31, 32, END), /* TCP_ULP: TLS in the kernel, and its ciphers; TCP_MD5SIG_EXT */
    RANGE(38, 42, END), /* TCP_AO_ADD_KEY …: load whatever cipher is named */
    EQUAL(0, END, END),

    AT(REFUSE),
    ANSWER(EPERM),
    AT(NO_FAMILY),
    ANSWER(EAFNOSUPPORT),
    AT(NO_PROTOCOL),
    ANSWER(EPROTONOSUPPORT),
    AT(END),
};

/* As a program that goes on after its last step with what it does not refuse; its length. */
static size_t assemble(struct sock_filter *into) {
    size_t at[LABELS] = {0}, count = 0;
    for (size_t i = 0; i < sizeof socket_steps / sizeof *socket_steps; i++)
        if (socket_steps[i].code == MARK)
            at[socket_steps[i].k] = count;
        else
            count++;
    count = 0;
    for (size_t i = 0; i < sizeof socket_steps / sizeof *socket_steps; i++) {
        struct step step = socket_steps[i];
        if (step.code == MARK)
            continue;
        count++;
        into[count - 1] = (struct sock_filter){step.code, (uint8_t)(step.yes ? at[step.yes] - count : 0),
                                               (uint8_t)(step.no ? at[step.no] - count : 0), step.k};
    }
    return count;
}
#endif
