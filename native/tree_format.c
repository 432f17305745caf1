#include "tasks.h"

#include <limits.h>

uint8_t entry_kind(mode_t mode) {
    switch (mode & S_IFMT) {
    case S_IFDIR:
        return 'd';
    case S_IFLNK:
        return 'l';
    case S_IFIFO:
        return 'p';
    case S_IFSOCK:
        return 's';
    case S_IFCHR:
        return 'c';
    case S_IFBLK:
        return 'b';
    default:
        return 'f';
    }
}

void entry_put(struct writer *w, const char *path, uint8_t kind, const struct stat *st, const char *target) {
    int64_t mtime = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
    put_bytes(w, path, (uint32_t)strlen(path));
    put_u32(w, kind);
    put_u32(w, st->st_mode & 07777);
    put_u32(w, st->st_uid);
    put_u32(w, st->st_gid);
    put_u32(w, (uint32_t)st->st_nlink);
    put_u64(w, (uint64_t)st->st_size);
    put_u64(w, (uint64_t)mtime);
    put_bytes(w, target, (uint32_t)strlen(target));
}

/* A string shorter than PATH_LIMIT; false as soon as its length says otherwise, complete or not. */
static bool get_short(struct reader *r, struct span *out) {
    uint32_t size = 0;
    if (reader_left(r) >= 4)
        memcpy(&size, r->at, 4);
    if (size >= PATH_LIMIT)
        return false;
    *out = get_bytes(r);
    return !out->size || !memchr(out->data, 0, out->size);
}

long entry_parse(const uint8_t *data, size_t size, struct entry *out) {
    struct reader r = reader_of(data, size);
    memset(out, 0, sizeof *out);
    if (!get_short(&r, &out->path))
        return -1;
    uint32_t kind = get_u32(&r);
    out->kind = (uint8_t)kind;
    out->mode = get_u32(&r) & 07777;
    out->uid = get_u32(&r);
    out->gid = get_u32(&r);
    out->nlink = get_u32(&r);
    out->size = get_u64(&r);
    out->mtime_ns = (int64_t)get_u64(&r);
    if (r.bad)
        return 0;
    if (kind > 0x7f || !kind || !strchr("fdlpscbx", (int)kind) || !get_short(&r, &out->target))
        return -1;
    return r.bad ? 0 : (long)(r.at - data);
}

bool entry_path_is_safe(struct span path) {
    const uint8_t *at = path.data, *end = at + path.size;
    if (!path.size || path.size >= PATH_LIMIT || memchr(path.data, 0, path.size))
        return false;
    while (at <= end) {
        const uint8_t *slash = at < end ? memchr(at, '/', (size_t)(end - at)) : NULL;
        size_t size = (size_t)((slash ? slash : end) - at);
        bool dots = (size == 1 && at[0] == '.') || (size == 2 && at[0] == '.' && at[1] == '.');
        if (!size || size > NAME_MAX || dots)
            return false;
        if (!slash)
            return true;
        at = slash + 1;
    }
    return false;
}
