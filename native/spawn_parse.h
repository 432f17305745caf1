/* The node agent's request as the spawner uses it. Pure: no I/O, no state. */
#ifndef BARCHAN_SPAWN_PARSE_H
#define BARCHAN_SPAWN_PARSE_H
#include "spawn.h"

#define FDS_FIXED 3 /* listener, writable tree, cgroup */
#define FDS_MAX (FDS_FIXED + 1 + SPAWN_MAX_GROUPS + SPAWN_MAX_LAYERS + SPAWN_MAX_DATA)

struct request {
    struct spawn_request head;
    int fds[FDS_MAX];
    int count;
    const int *groups, *layers, *data;
    char text[SPAWN_MAX_DATA * SPAWN_TARGET]; /* what followed the head */
    uint32_t text_size;
    const char *targets[SPAWN_MAX_DATA], *texts[SPAWN_MAX_TEXTS];
    int listener, writable, cgroup, netns; /* -1: not among them */
};

/* Checks `head` and `count`, and names the descriptors; 0 if anything is wrong. `guest_uid` is the spawner's own. */
int spawn_parse(struct request *request, uint32_t guest_uid);
#endif
