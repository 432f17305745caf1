/* What runs between clone3 and the guest's first instruction, inside the new namespaces. */
#ifndef BARCHAN_SANDBOX_CHILD_H
#define BARCHAN_SANDBOX_CHILD_H
#include <stdint.h>

#include "spawn.h"

/* "Go" from the spawner: sent once the id maps are written, with the descriptors of the mounts that are present. */
enum go_mount { GO_OVERLAY, GO_DEV, GO_SHM, GO_SYSFS, GO_MOUNTS };
struct go_message {
    uint32_t mounts; /* bit set of go_mount; descriptors in that order */
};

/* To the spawner. error 0: all is set up, exec comes next; then the end of the socket means it happened. */
struct child_report {
    int32_t error;
    char step[SPAWN_STEP];
    uint32_t us[3]; /* since the request: cgroups, namespaces, mounts */
};

struct child_plan {
    const struct spawn_request *request;
    uint64_t started_us;
    int link; /* SEQPACKET to the spawner */
    int listener, cgroup, guest;
    const int *groups; /* `tasks` of v1 groups */
};

_Noreturn void sandbox_child(const struct child_plan *plan);

uint64_t monotonic_us(void);
#endif
