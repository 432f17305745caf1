#include "requests.h"

#include <stdlib.h>

static void get_text(struct reader *r, char *into, size_t room, const char *prefix) {
    struct span s = get_bytes(r);
    size_t lead = strlen(prefix);
    if (r->bad || s.size + lead >= room || (s.size && memchr(s.data, 0, s.size))) {
        r->bad = true;
        return;
    }
    memcpy(into, prefix, lead);
    if (s.size)
        memcpy(into + lead, s.data, s.size);
    into[lead + s.size] = 0;
}

static void get_path(struct reader *r, char into[PATH_LIMIT]) {
    bool absolute = reader_left(r) > 4 && r->at[4] == '/';
    get_text(r, into, PATH_LIMIT, absolute ? "" : "/");
}

static void get_flags(struct reader *r, struct request *out, uint32_t known) {
    out->flags = get_u32(r);
    r->bad |= (out->flags & ~known) != 0;
}

static bool env_is_sound(char **env) {
    for (; *env; env++)
        if (**env == '=' || !strchr(*env, '='))
            return false;
    return true;
}

/* A shell session reads /dev/null and has no terminal; only it may leave its program to the guest. */
static bool exec_is_sound(const struct request *request) {
    if (request->flags & EXEC_SHELL)
        return !(request->flags & (EXEC_STDIN | EXEC_TTY));
    return request->argc > 0;
}

static void get_exec(struct reader *r, struct request *out) {
    get_flags(r, out, EXEC_STDIN | EXEC_MERGE | EXEC_KEEP_BACKGROUND | EXEC_TTY | EXEC_SHELL);
    out->timeout_ms = get_u32(r);
    out->grace_ms = get_u32(r);
    out->output_limit = get_u64(r);
    out->nofile = get_u32(r);
    uint32_t size = get_u32(r);
    out->rows = (uint16_t)size;
    out->columns = (uint16_t)(size >> 16);
    get_path(r, out->path);
    out->argv = get_strings(r, &out->argc);
    out->env = get_strings(r, &out->envc);
    r->bad |= !out->argv || !exec_is_sound(out) || !out->env || !env_is_sound(out->env);
}

static void get_run(struct reader *r, struct request *out) {
    out->shell = get_u64(r);
    out->timeout_ms = get_u32(r);
    out->grace_ms = get_u32(r);
    out->output_limit = get_u64(r);
    struct span s = get_bytes(r);
    if (r->bad || (s.size && memchr(s.data, 0, s.size)) || !(out->command = malloc(s.size + 1u))) {
        r->bad = true;
        return;
    }
    if (s.size)
        memcpy(out->command, s.data, s.size);
    out->command[s.size] = 0;
}

static void get_write(struct reader *r, struct request *out) {
    get_path(r, out->path);
    get_flags(r, out, WRITE_PARENTS | WRITE_APPEND | WRITE_EXCLUSIVE);
    out->mode = get_u32(r);
    out->uid = get_u32(r);
    out->gid = get_u32(r);
}

static void get_put_tree(struct reader *r, struct request *out) {
    get_path(r, out->path);
    get_flags(r, out, PUT_PARENTS);
    out->uid = get_u32(r);
    out->gid = get_u32(r);
}

static void get_read(struct reader *r, struct request *out) {
    get_path(r, out->path);
    out->offset = get_u64(r);
    out->length = get_u64(r);
    r->bad |= out->offset > INT64_MAX;
}

static void get_fields(struct reader *r, struct request *out) {
    switch (out->kind) {
    case OP_EXEC:
        get_exec(r, out);
        return;
    case OP_RUN:
        get_run(r, out);
        return;
    case OP_STAT:
        get_path(r, out->path);
        out->follow = get_u8(r) != 0;
        return;
    case OP_LIST:
        get_path(r, out->path);
        out->depth = get_u32(r);
        r->bad |= out->depth == 0;
        return;
    case OP_READ:
        get_read(r, out);
        return;
    case OP_WRITE:
        get_write(r, out);
        return;
    case OP_MKDIR:
        get_path(r, out->path);
        get_flags(r, out, MKDIR_PARENTS);
        out->mode = get_u32(r);
        return;
    case OP_REMOVE:
        get_path(r, out->path);
        get_flags(r, out, REMOVE_TREE | REMOVE_MISSING);
        return;
    case OP_RENAME:
        get_path(r, out->path);
        get_path(r, out->to);
        return;
    case OP_GET_TREE:
        get_path(r, out->path);
        return;
    case OP_PUT_TREE:
        get_put_tree(r, out);
        return;
    case OP_PROCESSES:
        return;
    default:
        r->bad = true;
    }
}

bool request_parse(uint8_t kind, struct span body, struct request *out) {
    struct reader r = reader_of(body.data, body.size);
    memset(out, 0, offsetof(struct request, user));
    *out->user = *out->path = 0;
    out->kind = kind;
    get_text(&r, out->user, sizeof out->user, "");
    get_fields(&r, out);
    if (!r.bad && reader_left(&r) == 0)
        return true;
    request_release(out);
    return false;
}

void request_release(struct request *request) {
    free(request->argv);
    free(request->env);
    free(request->command);
    request->argv = request->env = NULL;
    request->command = NULL;
}
