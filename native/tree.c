/* LIST and GET_TREE: one walk, parents first, one open directory per level, never through a link below the start. */
#include "paths.h"
#include "tasks.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#define LEVELS_MAX 200u

struct level {
    DIR *dir;
    size_t path_size; /* of the directory's own path */
};

struct walk {
    struct task task;
    struct level level[LEVELS_MAX];
    uint32_t levels, depth;
    bool contents, root_sent;
    int root, file; /* root: until its entry was sent; file: being sent */
    uint64_t file_left;
    char path[PATH_LIMIT]; /* of the last entry */
};

static bool fail(struct op *op, const char *step) {
    op_fail(op, errno, step);
    return false;
}

/* ---- contents ---- */

static bool send_piece(struct op *op, struct walk *t) {
    uint32_t room = SCRATCH - 4, size = t->file_left < room ? (uint32_t)t->file_left : room;
    ssize_t n = size ? read(t->file, scratch + 4, size) : 0;
    if (n < 0)
        return fail(op, "read");
    uint32_t head = (uint32_t)n;
    memcpy(scratch, &head, 4);
    t->file_left -= head;
    if (!n) {
        close(t->file);
        t->file = -1;
    }
    return task_emit(op, scratch, head + 4);
}

/* ---- entries ---- */

static bool send_entry(struct op *op, const struct walk *t, uint8_t kind, const struct stat *st, const char *target) {
    uint8_t entry[ENTRY_MAX];
    struct writer w = writer_of(entry, sizeof entry);
    entry_put(&w, t->path, kind, st, target);
    return task_emit(op, entry, (uint32_t)(w.at - entry));
}

static bool descend(struct op *op, struct walk *t, int fd) {
    bool deep = t->levels == LEVELS_MAX;
    DIR *dir = deep ? NULL : fdopendir(fd);
    if (!dir) {
        op_fail(op, deep ? ELOOP : errno, deep ? "depth" : "list");
        close(fd);
        return false;
    }
    t->level[t->levels++] = (struct level){dir, strlen(t->path)};
    return true;
}

/* Takes over `fd`, which is -1 if only the entry is wanted. */
static bool send_opened(struct op *op, struct walk *t, int fd, struct stat *st) {
    mode_t kind = st->st_mode & S_IFMT;
    bool file = fd >= 0 && kind == S_IFREG;
    if (fd >= 0 && (fstat(fd, st) || (st->st_mode & S_IFMT) != kind)) {
        close(fd);
        return true; /* it was replaced meanwhile: as if it was gone */
    }
    if (file)
        t->file = fd;
    t->file_left = (uint64_t)st->st_size;
    if (send_entry(op, t, entry_kind(st->st_mode), st, ""))
        return fd < 0 || file || descend(op, t, fd);
    if (fd >= 0 && !file)
        close(fd);
    return false;
}

static bool send_link(struct op *op, struct walk *t, int parent, const char *name, const struct stat *st) {
    char target[PATH_LIMIT];
    ssize_t n = readlinkat(parent, name, target, sizeof target - 1);
    target[n > 0 ? n : 0] = 0;
    return send_entry(op, t, 'l', st, target);
}

/* What cannot be read is passed by: a listing shows it as what it is, a copy as something that it lacks. EAGAIN: somebody inside
 * holds a lease on it, which ends only when the holder lets go or the host's lease-break-time is over. */
static bool send_closed(struct op *op, struct walk *t, const struct stat *st) {
    if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP)
        return true; /* it went or was replaced meanwhile: as if it had not been there */
    if (errno != EACCES && errno != EAGAIN)
        return fail(op, "open");
    return send_entry(op, t, t->contents ? 'x' : entry_kind(st->st_mode), st, "");
}

static bool send_child(struct op *op, struct walk *t, int parent, const char *name) {
    struct stat st;
    if (fstatat(parent, name, &st, AT_SYMLINK_NOFOLLOW))
        return errno == ENOENT || fail(op, "stat");
    if (S_ISLNK(st.st_mode))
        return send_link(op, t, parent, name, &st);
    int fd = -1;
    bool inside = S_ISDIR(st.st_mode) ? t->levels < t->depth : S_ISREG(st.st_mode) && t->contents;
    if (inside) {
        fd = S_ISDIR(st.st_mode) ? open_child_directory(parent, name) : open_path(parent, name, O_RDONLY | O_NOFOLLOW, 0);
        if (fd < 0)
            return send_closed(op, t, &st);
    }
    return send_opened(op, t, fd, &st);
}

static bool set_path(struct walk *t, const char *name) {
    size_t lead = t->level[t->levels - 1].path_size, size = strlen(name);
    if (lead + size + 2 > PATH_LIMIT) {
        errno = ENAMETOOLONG;
        return false;
    }
    if (lead)
        t->path[lead++] = '/';
    memcpy(t->path + lead, name, size + 1);
    return true;
}

static bool next_child(struct op *op, struct walk *t) {
    DIR *dir = t->level[t->levels - 1].dir;
    errno = 0;
    struct dirent *child = readdir(dir);
    if (!child && errno)
        return fail(op, "list");
    if (!child) {
        closedir(dir);
        t->levels--;
        return true;
    }
    if (!strcmp(child->d_name, ".") || !strcmp(child->d_name, ".."))
        return true;
    if (!set_path(t, child->d_name))
        return fail(op, "list");
    return send_child(op, t, dirfd(dir), child->d_name);
}

static bool send_root(struct op *op, struct walk *t) {
    struct stat st;
    int fd = t->root;
    t->root = -1;
    if (fstat(fd, &st)) {
        close(fd);
        return fail(op, "stat");
    }
    return t->contents ? send_opened(op, t, fd, &st) : descend(op, t, fd);
}

static bool walk_step(struct op *op) {
    struct walk *t = op->state;
    if (task_room(op) < SCRATCH)
        return false;
    if (t->root >= 0)
        return send_root(op, t);
    if (t->file >= 0)
        return send_piece(op, t);
    if (t->levels)
        return next_child(op, t);
    task_done(op);
    return false;
}

static void walk_close(struct op *op) {
    struct walk *t = op->state;
    if (t->root >= 0)
        close(t->root);
    if (t->file >= 0)
        close(t->file);
    while (t->levels)
        closedir(t->level[--t->levels].dir);
}

static int open_root(const struct request *request) {
    struct stat st;
    int fd = open_path(AT_FDCWD, request->path, O_RDONLY, 0);
    if (fd < 0)
        return -1;
    bool copy = request->kind == OP_GET_TREE;
    if (fstat(fd, &st) == 0 && (S_ISDIR(st.st_mode) || (copy && S_ISREG(st.st_mode))))
        return fd;
    close(fd);
    errno = copy ? EINVAL : ENOTDIR;
    return -1;
}

struct task *walk_task(struct op *op, const struct request *request) {
    int root = open_root(request);
    if (root < 0) {
        op_fail(op, errno, "open");
        return NULL;
    }
    struct walk *t = task_new(op, sizeof *t, walk_step, walk_close);
    if (!t) {
        close(root);
        return NULL;
    }
    t->root = root;
    t->file = -1;
    t->contents = request->kind == OP_GET_TREE;
    t->depth = t->contents ? UINT32_MAX : request->depth;
    return &t->task;
}
