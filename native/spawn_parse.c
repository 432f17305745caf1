#include "spawn_parse.h"

#include <string.h>

/* Parking takes no files, ordering no groups, and neither a network namespace. A place brings its own groups. */
static int consistent(const struct spawn_request *head) {
    int park = (head->flags & SPAWN_PARK) != 0, order = head->parked != 0, place = (head->flags & SPAWN_PLACE) != 0;
    if ((park || order || place) && head->flags & SPAWN_NETNS)
        return 0;
    if (place ? head->texts == 0 || head->groups || head->disk_bytes == 0 : head->texts)
        return 0;
    return park ? !order && head->layers == 0 && head->data == 0 : head->layers >= 1 && !(order && head->groups);
}

static int fixed_descriptors(const struct spawn_request *head) {
    if (head->flags & SPAWN_PLACE)
        return 0;
    if (head->flags & SPAWN_PARK)
        return 1; /* cgroup */
    if (head->parked)
        return 2; /* listener, writable tree */
    return FDS_FIXED + (head->flags & SPAWN_NETNS ? 1 : 0);
}

static int within_bounds(const struct spawn_request *head) {
    return head->magic == SPAWN_MAGIC && head->data <= SPAWN_MAX_DATA && head->layers <= SPAWN_MAX_LAYERS &&
           head->groups <= SPAWN_MAX_GROUPS && head->texts <= SPAWN_MAX_TEXTS;
}

/* The ids of a place are found by whoever makes it. */
static int good_ids(const struct spawn_request *head) {
    if (head->flags & SPAWN_PLACE)
        return head->uid_base == 0 && head->uid_count == 0 && head->guest_uid == 0;
    return head->uid_base != 0 && head->uid_count != 0 && head->uid_count <= UINT32_MAX - head->uid_base;
}

static int valid(const struct spawn_request *head, int fds) {
    return consistent(head) && fds == fixed_descriptors(head) + (int)(head->groups + head->layers + head->data) &&
           good_ids(head) && head->shm_bytes != 0 && head->oom_score_adj >= 0 && head->oom_score_adj <= 1000 &&
           memchr(head->hostname, 0, sizeof head->hostname) != NULL;
}

/* Only names. */
static int valid_removal(const struct spawn_request *head, int fds) {
    return head->flags == SPAWN_REMOVE && fds == 0 && head->data == 0 && head->texts >= 1;
}

/* An id within the map would put the first process within reach of the sandbox. */
static int guest_outside_map(const struct spawn_request *head, uint32_t guest_uid) {
    uint32_t id = head->guest_uid ? head->guest_uid : guest_uid;
    return id < head->uid_base || id >= head->uid_base + head->uid_count;
}

/* The next `count` texts from `*at` on, each ended within what came and shorter than `most`. */
static int name_texts(const struct request *request, uint32_t *at, uint32_t count, const char **texts, long most) {
    for (uint32_t i = 0; i < count; i++) {
        const char *text = request->text + *at;
        const char *end = memchr(text, 0, request->text_size - *at);
        if (!end || end - text >= most)
            return 0;
        texts[i] = text;
        *at = (uint32_t)(end + 1 - request->text);
    }
    return 1;
}

/* Absolute, not the root. */
static int good_targets(const struct request *request) {
    for (uint32_t i = 0; i < request->head.data; i++) {
        const char *target = request->targets[i];
        if (target[0] != '/' || target[1] == 0 || target[1] == '/')
            return 0;
    }
    return 1;
}

/* One component of a path, and no file that hides. */
static int good_name(const char *name) {
    return name[0] && name[0] != '.' && !strchr(name, '/') && strlen(name) < SPAWN_NAME;
}

static int good_names(const struct request *request) {
    uint32_t names = request->head.flags & SPAWN_REMOVE ? request->head.texts : request->head.texts > 0;
    for (uint32_t i = 0; i < names; i++)
        if (!good_name(request->texts[i]))
            return 0;
    return 1;
}

/* As many as were announced, and nothing after them. */
static int split_text(struct request *request) {
    uint32_t at = 0;
    return name_texts(request, &at, request->head.data, request->targets, SPAWN_TARGET) &&
           name_texts(request, &at, request->head.texts, request->texts, SPAWN_TARGET) && at == request->text_size &&
           good_targets(request) && good_names(request);
}

static void name_descriptors(struct request *request) {
    const struct spawn_request *head = &request->head;
    const int *next = request->fds;
    const int place = (head->flags & SPAWN_PLACE) != 0, park = (head->flags & SPAWN_PARK) != 0;
    request->listener = place || park ? -1 : *next++;
    request->writable = place || park ? -1 : *next++;
    request->cgroup = place || head->parked ? -1 : *next++;
    request->netns = head->flags & SPAWN_NETNS ? *next++ : -1;
    request->groups = next;
    request->layers = next + head->groups;
    request->data = request->layers + head->layers;
}

int spawn_parse(struct request *request, uint32_t guest_uid) {
    const struct spawn_request *head = &request->head;
    if (!within_bounds(head))
        return 0;
    if (head->flags & SPAWN_REMOVE)
        return valid_removal(head, request->count) && split_text(request);
    if (!valid(head, request->count) || !guest_outside_map(head, guest_uid) || !split_text(request))
        return 0;
    name_descriptors(request);
    return 1;
}
