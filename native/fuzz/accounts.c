/* Input: the user's name, a line end, then the text of /etc/passwd or /etc/group. */
#include "../identity.h"
#include "fuzz.h"

#include <string.h>

#define NOBODY_ID 0xffffffffu

static void check_account(const struct account *a) {
    HOLDS(memchr(a->name, 0, sizeof a->name) && memchr(a->home, 0, sizeof a->home));
    HOLDS(a->home[0] && a->who.uid != NOBODY_ID && a->who.gid != NOBODY_ID);
}

static void check_groups(const char *text, size_t size, const char *name) {
    struct identity who = {0};
    HOLDS(groups_of(text, size, name, &who));
    HOLDS(who.count <= MAX_GROUPS && (who.count == 0) == (who.groups == NULL));
    for (uint32_t i = 0; i < who.count; i++) {
        HOLDS(who.groups[i] != NOBODY_ID);
        for (uint32_t j = 0; j < i; j++)
            HOLDS(who.groups[i] != who.groups[j]);
    }
    identity_release(&who);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char name[ACCOUNT_NAME];
    const uint8_t *end = size ? memchr(data, '\n', size) : NULL;
    size_t name_size = end ? (size_t)(end - data) : 0;
    if (!end || name_size >= sizeof name || memchr(data, 0, name_size))
        return 0;
    memcpy(name, data, name_size);
    name[name_size] = 0;
    const char *text = (const char *)end + 1;
    size -= name_size + 1;
    struct account *account = calloc(1, sizeof *account);
    HOLDS(account);
    if (passwd_find(text, size, name, account))
        check_account(account);
    check_groups(text, size, name);
    free(account);
    uint32_t gid = 0;
    if (group_find(text, size, name, &gid))
        HOLDS(gid != NOBODY_ID);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    uint32_t state = seed;
    return dice(&state, 2) ? LLVMFuzzerMutate(data, size, most) : mutate_fields(data, size, most, &state);
}
