/* What runs between clone3 and the guest's first instruction, inside the new namespaces. */
#ifndef BARCHAN_SANDBOX_CHILD_H
#define BARCHAN_SANDBOX_CHILD_H
#include <stdint.h>

#include "spawn.h"

#define RESERVED_FDS 10 /* nothing that arrives may land on the guest's descriptors */

/* From the spawner, twice: once the id maps are written (dev, sysfs), and with the order (the others). */
enum go_fd { GO_OVERLAY, GO_DEV, GO_SHM, GO_SYSFS, GO_LISTENER, GO_FDS };
struct go_message {
    uint32_t given; /* bit set of go_fd; descriptors in that order */
    uint32_t flags;
    int32_t oom_score_adj;
    uint32_t data; /* so many messages with mounts of data follow */
    uint32_t reserved;
    uint64_t started_us;
    char hostname[64];
};

/* To the spawner. error 0 and not parked: all is set up, exec comes next; then the end of the socket means it happened. */
struct child_report {
    int32_t error;
    uint32_t parked; /* it waits for its order */
    char step[SPAWN_STEP];
    uint32_t us[3]; /* since the request: cgroups, namespaces, mounts */
};

struct child_plan {
    struct spawn_request request; /* what an order changes is taken from the order */
    uint64_t started_us;
    int link; /* SEQPACKET to the spawner */
    int listener, cgroup, guest;
    const int *groups; /* `tasks` of v1 groups */
};

_Noreturn void sandbox_child(struct child_plan *plan);

uint64_t monotonic_us(void);
#endif
