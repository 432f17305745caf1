/* Input: u8 number of descriptors, then struct spawn_request and the text after it. */
#include "../spawn_parse.h"
#include "fuzz.h"

#include <string.h>

#define GUEST_UID 900000000u

static void check_ids(const struct spawn_request *head) {
    uint64_t guest = head->guest_uid ? head->guest_uid : GUEST_UID, end = (uint64_t)head->uid_base + head->uid_count;
    HOLDS(head->uid_base > 0 && head->uid_count > 0 && end <= UINT32_MAX);
    HOLDS(guest < head->uid_base || guest >= end);
}

static void check_name(const char *name) {
    HOLDS(*name && *name != '.' && !strchr(name, '/') && strlen(name) < SPAWN_NAME);
}

static void check_texts(const struct request *r) {
    const uint32_t names = r->head.flags & SPAWN_REMOVE ? r->head.texts : r->head.texts > 0;
    const char *end = r->text + r->text_size;
    HOLDS(r->head.texts <= SPAWN_MAX_TEXTS && r->head.data <= SPAWN_MAX_DATA);
    for (uint32_t i = 0; i < r->head.data; i++)
        HOLDS(r->targets[i][0] == '/' && strlen(r->targets[i]) > 1 && strlen(r->targets[i]) < SPAWN_TARGET);
    for (uint32_t i = 0; i < r->head.texts; i++) {
        HOLDS(r->texts[i] >= r->text && r->texts[i] < end && strlen(r->texts[i]) < SPAWN_TARGET);
        HOLDS(r->texts[i] + strlen(r->texts[i]) < end);
        if (i < names)
            check_name(r->texts[i]);
    }
}

static void check_removal(const struct request *r) {
    HOLDS(r->head.flags == SPAWN_REMOVE && r->count == 0 && r->head.texts >= 1 && r->head.data == 0);
}

static void check(const struct request *r) {
    const struct spawn_request *head = &r->head;
    int park = (head->flags & SPAWN_PARK) != 0, order = head->parked != 0, place = (head->flags & SPAWN_PLACE) != 0;
    if (!place)
        check_ids(head);
    HOLDS(!place || (!head->uid_base && !head->uid_count && !head->guest_uid && head->texts && head->disk_bytes));
    HOLDS(place || !head->texts);
    HOLDS(!park || !order);
    HOLDS(park ? head->layers == 0 : head->layers >= 1);
    HOLDS(head->layers <= SPAWN_MAX_LAYERS && head->groups <= SPAWN_MAX_GROUPS && !((order || place) && head->groups));
    HOLDS((r->listener >= 0) == (!park && !place) && (r->writable >= 0) == (!park && !place));
    HOLDS((r->cgroup >= 0) == (!order && !place));
    HOLDS(!(park || order || place) || r->netns < 0);
    HOLDS(head->shm_bytes && head->oom_score_adj >= 0 && head->oom_score_adj <= 1000);
    HOLDS(memchr(head->hostname, 0, sizeof head->hostname));
    HOLDS((r->netns >= 0) == ((head->flags & SPAWN_NETNS) != 0));
    HOLDS(r->groups + head->groups == r->layers && r->layers + head->layers == r->data);
    HOLDS(r->data + head->data == r->fds + r->count && !(park && head->data));
    HOLDS(r->count <= FDS_MAX && (r->count == 0 || r->fds[r->count - 1] == 100 + r->count - 1));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct request request;
    memset(&request, 0, sizeof request);
    if (size < 1 + sizeof request.head || size > 1 + sizeof request.head + sizeof request.text)
        return 0;
    memcpy(&request.head, data + 1, sizeof request.head);
    request.text_size = (uint32_t)(size - 1 - sizeof request.head);
    memcpy(request.text, data + 1 + sizeof request.head, request.text_size);
    request.count = data[0] < FDS_MAX ? data[0] : FDS_MAX;
    for (int i = 0; i < request.count; i++)
        request.fds[i] = 100 + i;
    if (!spawn_parse(&request, GUEST_UID))
        return 0;
    check_texts(&request);
    if (request.head.flags & SPAWN_REMOVE)
        check_removal(&request);
    else
        check(&request);
    return 0;
}

/* The head's size is fixed; most fields stand in some relation to another. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    uint32_t state = seed, value, other;
    const size_t head = 1 + sizeof(struct spawn_request);
    if (size < head || most < size)
        return LLVMFuzzerMutate(data, size, most);
    if (dice(&state, 2))
        return head + LLVMFuzzerMutate(data + head, size - head, most - head);
    if (dice(&state, 2)) {
        LLVMFuzzerMutate(data, head, head);
        return size;
    }
    uint8_t *from = data + 1 + 4 * dice(&state, 12), *to = data + 1 + 4 * dice(&state, 12);
    memcpy(&value, from, sizeof value);
    memcpy(&other, data + 1 + 4 * dice(&state, 12), sizeof other);
    value += dice(&state, 3) - 1 + (dice(&state, 2) ? other : 0); /* the end of a range is a sum */
    memcpy(to, &value, sizeof value);
    return size;
}
