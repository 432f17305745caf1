/* Input: u8 kind, then the body of a START of that kind. */
#include "../requests.h"
#include "fuzz.h"

#include <string.h>

static bool ends_inside(const char *text, size_t room) {
    return memchr(text, 0, room) != NULL;
}

/* Bytes that the list takes on the wire. */
static size_t list_size(char **list, uint32_t count) {
    size_t size = 4;
    for (uint32_t i = 0; i < count; i++) {
        HOLDS(list[i]);
        size += 4 + strlen(list[i]);
    }
    HOLDS(!list[count]);
    return size;
}

static void check(const struct request *r, size_t size) {
    HOLDS(ends_inside(r->user, sizeof r->user) && ends_inside(r->path, sizeof r->path) && ends_inside(r->to, sizeof r->to));
    HOLDS(!r->path[0] || r->path[0] == '/');
    HOLDS(!r->to[0] || r->to[0] == '/');
    HOLDS(r->offset <= INT64_MAX);
    HOLDS((r->kind == OP_RUN) == (r->command != NULL));
    HOLDS(r->kind != OP_RUN || size == 4 + strlen(r->user) + 24 + 4 + strlen(r->command));
    if (r->kind != OP_EXEC) {
        HOLDS(!r->argv && !r->env);
        return;
    }
    HOLDS(r->argv && r->env && (r->argc || r->flags & EXEC_SHELL));
    size_t rest = 4 + strlen(r->user) + 28 + 4 + strlen(r->path) + list_size(r->argv, r->argc) + list_size(r->env, r->envc);
    HOLDS(rest == size || rest == size + 1); /* one more: the slash that a relative path got */
    for (char **env = r->env; *env; env++)
        HOLDS(**env != '=' && strchr(*env, '='));
}

static bool accepts(uint8_t kind, const uint8_t *data, uint32_t size, struct request *r) {
    uint8_t *copy = malloc(size ? size : 1);
    HOLDS(copy);
    memcpy(copy, data, size);
    bool fine = request_parse(kind, (struct span){copy, size}, r);
    free(copy); /* nothing of a request points into its bytes */
    return fine;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct request r, shorter;
    if (!size)
        return 0;
    if (!accepts(data[0], data + 1, (uint32_t)size - 1, &r)) {
        HOLDS(!r.argv && !r.env && !r.command);
        return 0;
    }
    check(&r, size - 1);
    if (size > 1)
        HOLDS(!accepts(data[0], data + 1, (uint32_t)size - 2, &shorter));
    request_release(&r);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    uint32_t state = seed;
    if (size < 2 || dice(&state, 2))
        return LLVMFuzzerMutate(data, size, most);
    return 1 + mutate_counted(data + 1, size - 1, most - 1, &state);
}
