#include "spawn_parse.h"

#include <string.h>

/* Parking takes no files, ordering no groups, and neither a network namespace. */
static int consistent(const struct spawn_request *head) {
    int park = (head->flags & SPAWN_PARK) != 0, order = head->parked != 0;
    if ((park || order) && head->flags & SPAWN_NETNS)
        return 0;
    return park ? !order && head->layers == 0 && head->data == 0 : head->layers >= 1 && !(order && head->groups);
}

static int fixed_descriptors(const struct spawn_request *head) {
    if (head->flags & SPAWN_PARK)
        return 1; /* cgroup */
    if (head->parked)
        return 2; /* listener, writable tree */
    return FDS_FIXED + (head->flags & SPAWN_NETNS ? 1 : 0);
}

static int valid(const struct spawn_request *head, int fds) {
    return head->magic == SPAWN_MAGIC && head->data <= SPAWN_MAX_DATA && head->layers <= SPAWN_MAX_LAYERS && head->groups <= SPAWN_MAX_GROUPS &&
           consistent(head) && fds == fixed_descriptors(head) + (int)(head->groups + head->layers + head->data) && head->uid_base != 0 && head->uid_count != 0 &&
           head->shm_bytes != 0 &&
           head->uid_count <= UINT32_MAX - head->uid_base && head->oom_score_adj >= 0 && head->oom_score_adj <= 1000 &&
           memchr(head->hostname, 0, sizeof head->hostname) != NULL;
}

/* An id within the map would put the first process within reach of the sandbox. */
static int guest_outside_map(const struct spawn_request *head, uint32_t guest_uid) {
    uint32_t id = head->guest_uid ? head->guest_uid : guest_uid;
    return id < head->uid_base || id >= head->uid_base + head->uid_count;
}

/* Absolute, neither the root nor longer than it may be; as many as there are mounts, and nothing after them. */
static int name_targets(struct request *request) {
    uint32_t at = 0;
    for (uint32_t i = 0; i < request->head.data; i++) {
        const char *target = request->text + at;
        const char *end = memchr(target, 0, request->text_size - at);
        if (!end || end - target >= SPAWN_TARGET || end - target < 2 || target[0] != '/' || target[1] == '/')
            return 0;
        request->targets[i] = target;
        at = (uint32_t)(end + 1 - request->text);
    }
    return at == request->text_size;
}

int spawn_parse(struct request *request, uint32_t guest_uid) {
    const struct spawn_request *head = &request->head;
    if (!valid(head, request->count) || !guest_outside_map(head, guest_uid) || !name_targets(request))
        return 0;
    const int *next = request->fds;
    request->listener = head->flags & SPAWN_PARK ? -1 : *next++;
    request->writable = head->flags & SPAWN_PARK ? -1 : *next++;
    request->cgroup = head->parked ? -1 : *next++;
    request->netns = head->flags & SPAWN_NETNS ? *next++ : -1;
    request->groups = next;
    request->layers = next + head->groups;
    request->data = request->layers + head->layers;
    return 1;
}
