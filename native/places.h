/* What belongs to one container on the host, made and removed in directories that the spawner was started with. */
#ifndef BARCHAN_PLACES_H
#define BARCHAN_PLACES_H
#include <stdint.h>

#include "mounts.h"
#include "spawn.h"
#include "trees.h"

struct place_directories {
    int ids;           /* src/barchan/kernel/idranges.py: links, named by slot */
    int unified;       /* parent of the cgroup v2 groups */
    int v1[SPAWN_MAX_GROUPS]; /* parents in v1 hierarchies */
    uint32_t v1_count;
    struct tree_directories trees;
    int host, own; /* mount namespaces: of the directories, and the spawner's */
    const char *instance;
    uint32_t uid_first, uid_size, slots, next;
};

struct place {
    uint32_t uid_base, uid_count, guest_uid;
    int listener, writable, cgroup; /* -1: let go of */
    int groups[SPAWN_MAX_GROUPS];
    uint32_t group_count;
};

extern const struct place no_place;

/* `texts`: the name, then limits (spawn.h). -1 with the fault set; then some of it may exist. For a process of id 0; changes
 * its working directory. */
int place_make(struct place_directories *at, const char *const *texts, uint32_t count, uint64_t disk_bytes,
               struct place *place, struct fault *fault);
/* Set limits of one that exists. */
int place_limit(const struct place_directories *at, const char *const *texts, uint32_t count, uint64_t disk_bytes,
                struct fault *fault);
/* Closes what only the making needs; with `all` also what a parked child still waits for. */
void place_let_go(struct place *place, int all);
/* Whether it is wholly gone. Something stays if processes do, or groups that the guest did not make, or if it was not whole. */
int place_remove(struct place_directories *at, const char *name);
#endif
