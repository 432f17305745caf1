/* The sandbox's own account files as text. Pure: no I/O, no state. */
#include "identity.h"

#include <stdlib.h>
#include <string.h>

#define NOBODY_ID 0xffffffffu

/* The next line without its end; false at the end of the data. */
static bool next_line(const char **at, const char *end, const char **line, size_t *size) {
    if (*at >= end)
        return false;
    const char *stop = memchr(*at, '\n', (size_t)(end - *at));
    *line = *at;
    *size = (size_t)((stop ? stop : end) - *at);
    *at = stop ? stop + 1 : end;
    return true;
}

struct field {
    const char *data;
    size_t size;
};

static int split(const char *line, size_t size, struct field *fields, int max) {
    int n = 0;
    const char *end = line + size;
    while (n < max) {
        const char *stop = memchr(line, ':', (size_t)(end - line));
        fields[n++] = (struct field){line, (size_t)((stop ? stop : end) - line)};
        if (!stop)
            break;
        line = stop + 1;
    }
    return n;
}

static bool number_of(const char *data, size_t size, uint32_t *out) {
    uint64_t value = 0;
    if (!size || size > 10)
        return false;
    for (size_t i = 0; i < size; i++) {
        if (data[i] < '0' || data[i] > '9')
            return false;
        value = value * 10 + (uint64_t)(data[i] - '0');
    }
    *out = (uint32_t)value;
    return value < NOBODY_ID;
}

static bool same(struct field f, const char *text) {
    return f.size == strlen(text) && memcmp(f.data, text, f.size) == 0;
}

static void copy_field(char *into, size_t room, struct field f, const char *fallback) {
    if (f.size == 0 || f.size >= room || memchr(f.data, 0, f.size)) {
        strcpy(into, fallback);
        return;
    }
    memcpy(into, f.data, f.size);
    into[f.size] = 0;
}

static bool passwd_match(const char *data, size_t size, const char *name, const uint32_t *uid, struct account *account) {
    const char *at = data, *line;
    size_t length;
    struct field f[7];
    uint32_t u, g;
    while (next_line(&at, data + size, &line, &length)) {
        if (split(line, length, f, 7) < 6 || !number_of(f[2].data, f[2].size, &u) || !number_of(f[3].data, f[3].size, &g))
            continue;
        if (uid ? u != *uid : !same(f[0], name))
            continue;
        account->who.uid = u;
        account->who.gid = g;
        copy_field(account->name, sizeof account->name, f[0], "");
        copy_field(account->home, sizeof account->home, f[5], "/");
        return true;
    }
    return false;
}

/* root needs no entry: what a sandbox did to its own files must not keep its caller out of it. */
static bool id_of(const char *name, uint32_t *id) {
    *id = 0;
    return !strcmp(name, "root") || number_of(name, strlen(name), id);
}

bool passwd_find(const char *data, size_t size, const char *user, struct account *account) {
    uint32_t uid;
    if (passwd_match(data, size, user, NULL, account))
        return true;
    if (!id_of(user, &uid))
        return false;
    account->who.uid = uid;
    account->who.gid = 0;
    strcpy(account->home, "/");
    passwd_match(data, size, user, &uid, account);
    return true;
}

bool group_find(const char *data, size_t size, const char *name, uint32_t *gid) {
    const char *at = data, *line;
    size_t length;
    struct field f[4];
    while (next_line(&at, data + size, &line, &length))
        if (split(line, length, f, 4) >= 3 && same(f[0], name) && number_of(f[2].data, f[2].size, gid))
            return true;
    return id_of(name, gid);
}

static bool is_member(struct field members, const char *name) {
    const char *at = members.data, *end = at + members.size;
    while (at < end) {
        const char *stop = memchr(at, ',', (size_t)(end - at));
        struct field one = {at, (size_t)((stop ? stop : end) - at)};
        if (same(one, name))
            return true;
        at += one.size + 1;
    }
    return false;
}

static bool add_group(struct identity *who, uint32_t gid) {
    for (uint32_t i = 0; i < who->count; i++)
        if (who->groups[i] == gid)
            return true;
    uint32_t *grown = realloc(who->groups, (who->count + 1) * sizeof *grown);
    if (!grown)
        return false;
    who->groups = grown;
    who->groups[who->count++] = gid;
    return true;
}

bool groups_of(const char *data, size_t size, const char *name, struct identity *who) {
    const char *at = data, *line;
    size_t length;
    struct field f[4];
    uint32_t gid;
    while (who->count < MAX_GROUPS && next_line(&at, data + size, &line, &length))
        if (split(line, length, f, 4) == 4 && number_of(f[2].data, f[2].size, &gid) && is_member(f[3], name) &&
            !add_group(who, gid))
            return false;
    return true;
}

void identity_release(struct identity *who) {
    free(who->groups);
    who->groups = NULL;
    who->count = 0;
}
