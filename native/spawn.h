/* The node agent's request to the spawner: one SEQPACKET datagram with file descriptors. Both ends run on the same host
 * from the same build, so the layout is this struct (src/barchan/backends/spawner.py packs it). */
#ifndef BARCHAN_SPAWN_H
#define BARCHAN_SPAWN_H
#include <stdint.h>

#define SPAWN_MAGIC 0x314e5053u /* "SPN1" */
#define SPAWN_MAX_LAYERS 120
#define SPAWN_MAX_GROUPS 8
#define SPAWN_STEP 32
#define SPAWN_LOG 256
#define SPAWN_TIMES 8
#define SPAWN_IN_FLIGHT 64 /* further requests wait in the socket */
#define SPAWN_MAX_DATA 17 /* what a sandbox may ask for, and the network's */
#define SPAWN_TARGET 1025 /* bytes of one target of data, its end included */
#define SPAWN_MOST_PARKED 64
#define SPAWN_MAX_TEXTS 64
#define SPAWN_NAME 96     /* bytes of the name of a place, its end included */
#define SPAWN_LISTENER 3  /* descriptors of the guest: its listening socket, */
#define SPAWN_CGROUP 4    /* its cgroup v2 directory */

enum spawn_flag {
    SPAWN_NETNS = 1,      /* a network namespace is among the descriptors; otherwise a new one is made */
    SPAWN_SETUID = 2,     /* no_new_privs and nosuid stay off; then the guest cannot set filters, and clone3 is refused to it, too */
    SPAWN_PTRACE = 4,     /* SYS_PTRACE stays in the bounding set, ptrace in the filter */
    SPAWN_VOLATILE = 8,   /* overlay volatile: no sync of the upper file system at unmount */
    SPAWN_REDUCED = 16,   /* kernel < 6.13: overlayfs takes no descriptors; attach the layers, name them by short paths */
    SPAWN_ALL_CAPS = 32,  /* tests only: keep every capability of the namespace */
    SPAWN_PARK = 64,      /* make the child and let it wait for an order: see below */
    SPAWN_PLACE = 128,    /* make its place as well: see below */
    SPAWN_REMOVE = 256,   /* remove places; nothing else is asked */
    SPAWN_HOSTS = 512,    /* an /etc/hosts for an image that has none */
};

/* A container can be made in two requests. SPAWN_PARK makes a child in all its namespaces and groups, with /proc, /sys and
 * /dev ready; its descriptors are only the cgroup directory and `groups`, and `layers` is 0. The answer comes when it waits.
 * A request whose `parked` is the id of that one orders the child: its descriptors are listener, writable tree, layers, and
 * `groups` is 0; ids are those of the parked one. A parked child ends with the spawner. */

/* A place is what belongs to one container on the host and is found by its name: a range of ids, groups, a writable tree with
 * the guest's socket in it. With SPAWN_PLACE the spawner makes it in the directories it was started with, and the request brings only `layers`
 * and `data`; ids are 0. Its texts are the name, then limits: "N/FILE=VALUE", where N is the number of a v1 hierarchy or
 * "v2", and "?" before it says that the file may be missing. With `parked` they are set anew. What a failure leaves is for the asker to remove.
 * SPAWN_REMOVE takes names and kills nothing: where processes are left, so are their groups. */

/* Descriptors, in this order: listening socket for the guest, detached mount of the writable tree (holds directories
 * "u" and "w" owned by canonical 0:0), cgroup v2 directory, [network namespace], `groups` open `tasks` files of v1 groups
 * (the child writes 0 into each; cgroup.procs does as well, but waits for an RCU grace period, up to 30 ms), `layers` detached
 * read-only mounts, top layer first, `data` detached mounts of directories or files for inside. The targets of these follow the struct in the same
 * datagram: absolute paths, each ended by a zero byte; then `texts` of the same form. */
struct spawn_request {
    uint32_t magic, id;
    uint32_t uid_base, uid_count;
    uint32_t flags, layers, groups;
    int32_t oom_score_adj;        /* >= 0 */
    uint32_t guest_uid;           /* host id of the first process, outside the map; 0: the spawner's --guest-uid */
    uint32_t parked;              /* id of the request that parked the child to use; 0: make one */
    uint32_t data;
    uint32_t texts;
    uint64_t shm_bytes;           /* > 0: 0 would be no limit */
    uint64_t disk_bytes;          /* limit of a place's tree */
    char hostname[64];
};

/* On success one descriptor comes with it: the pidfd of the container's first process. */
struct spawn_reply {
    uint32_t magic, id;
    int32_t pid;
    int32_t error;                /* errno of the step that failed, 0 on success */
    char step[SPAWN_STEP];
    char log[SPAWN_LOG];          /* what the kernel's mount context said */
    uint64_t left;                /* SPAWN_REMOVE: bit i: the place of text i is not wholly gone */
    uint32_t us[SPAWN_TIMES];     /* since the request: clone, maps, overlay, go; in the child: cgroups, namespaces,
                                   * mounts; exec */
};
#endif
