/* PUT_TREE: items from the input become files below one directory. What an item names is reached component by component
 * without following links; directories get their owner, mode and time at the end, deepest last come first. Files and links
 * are made under another name and renamed: what is replaced stays until its successor is whole. */
#include "paths.h"
#include "tasks.h"
#include "temporary.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define DIRECTORIES_MAX (32u << 20) /* bytes of memory for what directories are still to get */

struct directory {
    struct directory *before;
    uint32_t mode, uid, gid;
    int64_t mtime_ns;
    char path[];
};

enum state { ITEM, PIECE, BODY, FINISHING };

struct putting {
    struct task task;
    enum state state;
    int root, parent, file; /* parent: the directory last used, -1 none */
    uint32_t uid, gid, left;
    size_t remembered;
    struct directory *last;
    struct entry entry; /* of `file`; its spans are not valid any more */
    char parent_path[PATH_LIMIT];
    char name[NAME_MAX + 1], temporary[TEMPORARY_MAX]; /* of `file`, in `parent` */
};

static bool fail(struct op *op, int error, const char *step) {
    op_fail(op, error, step);
    return false;
}

static uint32_t owner_of(uint32_t forced, uint32_t item) {
    return forced != KEEP ? forced : item;
}

/* An ordinary user cannot give files away; without being asked to, it does not try. */
static bool gives_owner(const struct putting *t) {
    return t->task.who.uid == 0 || t->uid != KEEP || t->gid != KEEP;
}

static void times_of(int64_t mtime_ns, struct timespec times[2]) {
    int64_t seconds = mtime_ns / 1000000000, rest = mtime_ns % 1000000000;
    if (rest < 0) {
        rest += 1000000000;
        seconds--;
    }
    times[0] = (struct timespec){0, UTIME_OMIT};
    times[1] = (struct timespec){seconds, rest};
}

static int dress(const struct putting *t, int fd, uint32_t mode, uint32_t uid, uint32_t gid, int64_t mtime_ns) {
    struct timespec times[2];
    times_of(mtime_ns, times);
    if (gives_owner(t) && fchown(fd, owner_of(t->uid, uid), owner_of(t->gid, gid)))
        return errno;
    return fchmod(fd, mode) || futimens(fd, times) ? errno : 0;
}

/* ---- where ---- */

/* The directory `path` below the root, opened without links; the caller closes it. */
static int open_below(int root, const char *path) {
    char name[NAME_MAX + 1];
    int dir = fcntl(root, F_DUPFD_CLOEXEC, 0);
    while (dir >= 0 && *path) {
        size_t size = strcspn(path, "/");
        memcpy(name, path, size);
        name[size] = 0;
        int next = open_child_directory(dir, name), error = errno;
        close(dir);
        errno = error == ELOOP ? ENOTDIR : error;
        dir = next;
        path += size + (path[size] == '/');
    }
    return dir;
}

/* Points t->parent at the directory of `path`, which was checked; the name in it. */
static const char *reach(struct putting *t, const char *path) {
    const char *slash = strrchr(path, '/');
    size_t size = slash ? (size_t)(slash - path) : 0;
    if (t->parent >= 0 && strlen(t->parent_path) == size && !memcmp(t->parent_path, path, size))
        return slash ? slash + 1 : path;
    if (t->parent >= 0)
        close(t->parent);
    memcpy(t->parent_path, path, size);
    t->parent_path[size] = 0;
    t->parent = open_below(t->root, t->parent_path);
    if (t->parent < 0)
        return NULL;
    return slash ? slash + 1 : path;
}

/* ---- items ---- */

static int remember(struct putting *t, const struct entry *e, const char *path) {
    size_t size = sizeof(struct directory) + strlen(path) + 1;
    struct directory *d = t->remembered + size <= DIRECTORIES_MAX ? malloc(size) : NULL;
    if (!d)
        return ENOMEM;
    *d = (struct directory){t->last, e->mode, e->uid, e->gid, e->mtime_ns};
    strcpy(d->path, path);
    t->last = d;
    t->remembered += size;
    return 0;
}

static int put_directory(struct putting *t, const struct entry *e, const char *path) {
    if (*path) {
        const char *name = reach(t, path);
        if (!name || (mkdirat(t->parent, name, 0700) && errno != EEXIST))
            return errno;
        int fd = open_child_directory(t->parent, name);
        if (fd < 0)
            return errno == ELOOP ? ENOTDIR : errno;
        close(fd);
    }
    return remember(t, e, path);
}

/* Before anything is made, so that a caller need not send a file that has no place. */
static int check_place(int dir, const char *name) {
    struct stat st;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW))
        return errno == ENOENT ? 0 : errno;
    return S_ISDIR(st.st_mode) ? EISDIR : 0;
}

static int make_link(struct putting *t, const struct entry *e, const char *temporary, const char *name) {
    char target[PATH_LIMIT];
    struct timespec times[2];
    memcpy(target, e->target.data, e->target.size);
    target[e->target.size] = 0;
    times_of(e->mtime_ns, times);
    if (symlinkat(target, t->parent, temporary))
        return errno;
    bool owned = !gives_owner(t) || !fchownat(t->parent, temporary, owner_of(t->uid, e->uid), owner_of(t->gid, e->gid),
                                              AT_SYMLINK_NOFOLLOW);
    if (owned && !utimensat(t->parent, temporary, times, AT_SYMLINK_NOFOLLOW) &&
        !renameat(t->parent, temporary, t->parent, name))
        return 0;
    int error = errno;
    unlinkat(t->parent, temporary, 0);
    return error;
}

static int put_link(struct putting *t, const struct entry *e, const char *path) {
    char temporary[TEMPORARY_MAX];
    const char *name = reach(t, path);
    int error = name ? check_place(t->parent, name) : errno;
    if (error)
        return error;
    return temporary_name(temporary) ? make_link(t, e, temporary, name) : errno;
}

static int put_file(struct putting *t, const struct entry *e, const char *path) {
    const char *name = reach(t, path);
    int error = name ? check_place(t->parent, name) : errno;
    if (error)
        return error;
    t->file = open_temporary(t->parent, t->temporary);
    if (t->file < 0)
        return errno;
    strcpy(t->name, name);
    t->entry = *e;
    return 0;
}

static void drop_file(struct putting *t) {
    close(t->file);
    t->file = -1;
    unlinkat(t->parent, t->temporary, 0);
}

static int put_item(struct putting *t, const struct entry *e) {
    char path[PATH_LIMIT];
    bool itself = !e->path.size && e->kind == 'd';
    if (!itself && !entry_path_is_safe(e->path))
        return EINVAL;
    if (e->path.size)
        memcpy(path, e->path.data, e->path.size);
    path[e->path.size] = 0;
    switch (e->kind) {
    case 'd':
        return put_directory(t, e, path);
    case 'l':
        return e->target.size ? put_link(t, e, path) : EINVAL;
    case 'f':
        t->state = PIECE;
        return put_file(t, e, path);
    default:
        return 0;
    }
}

static bool end_of_input(struct op *op, struct putting *t) {
    if (!op->in.eof)
        return false;
    if (op->in.ring.used || t->state != ITEM)
        return fail(op, EINVAL, "item");
    t->state = FINISHING;
    return true;
}

static bool step_item(struct op *op, struct putting *t) {
    uint8_t head[ENTRY_MAX];
    struct entry e;
    uint32_t have = ring_peek(&op->in.ring, head, sizeof head);
    long size = have ? entry_parse(head, have, &e) : 0;
    if (size < 0)
        return fail(op, EINVAL, "item");
    if (size == 0)
        return end_of_input(op, t);
    ring_consume(&op->in.ring, (uint32_t)size);
    int error = put_item(t, &e);
    if (!error)
        return true;
    return fail(op, error, error == EINVAL ? "item" : e.kind == 'd' ? "mkdir" : e.kind == 'l' ? "symlink" : "create");
}

static bool end_file(struct op *op, struct putting *t) {
    const struct entry *e = &t->entry;
    int error = dress(t, t->file, e->mode, e->uid, e->gid, e->mtime_ns);
    if (error)
        return fail(op, error, "owner");
    if (renameat(t->parent, t->temporary, t->parent, t->name))
        return fail(op, errno, "rename");
    close(t->file);
    t->file = -1;
    t->state = ITEM;
    return true;
}

static bool step_piece(struct op *op, struct putting *t) {
    if (op->in.ring.used < sizeof t->left)
        return end_of_input(op, t);
    ring_peek(&op->in.ring, &t->left, sizeof t->left);
    ring_consume(&op->in.ring, sizeof t->left);
    if (!t->left)
        return end_file(op, t);
    t->state = BODY;
    return true;
}

static bool step_body(struct op *op, struct putting *t) {
    if (!op->in.ring.used)
        return end_of_input(op, t);
    ssize_t n = ring_write(&op->in.ring, t->file, t->left);
    if (n < 0)
        return fail(op, errno, "write");
    t->left -= (uint32_t)n;
    if (!t->left)
        t->state = PIECE;
    return true;
}

/* ---- the end ---- */

static bool step_finish(struct op *op, struct putting *t) {
    struct directory *d = t->last;
    if (!d) {
        task_done(op);
        return false;
    }
    int fd = open_below(t->root, d->path);
    int error = fd < 0 ? errno : dress(t, fd, d->mode, d->uid, d->gid, d->mtime_ns);
    if (fd >= 0)
        close(fd);
    t->last = d->before;
    free(d);
    return !error || fail(op, error, "owner");
}

static bool put_step(struct op *op) {
    struct putting *t = op->state;
    switch (t->state) {
    case ITEM:
        return step_item(op, t);
    case PIECE:
        return step_piece(op, t);
    case BODY:
        return step_body(op, t);
    default:
        return step_finish(op, t);
    }
}

static void put_close(struct op *op) {
    struct putting *t = op->state;
    for (struct directory *d = t->last, *before; d; d = before) {
        before = d->before;
        free(d);
    }
    if (t->file >= 0)
        drop_file(t);
    if (t->parent >= 0)
        close(t->parent);
    close(t->root);
}

static int open_target(const struct request *request) {
    int fd = open_path(AT_FDCWD, request->path, O_RDONLY | O_DIRECTORY, 0);
    if (fd >= 0 || errno != ENOENT || !(request->flags & PUT_PARENTS))
        return fd;
    char path[PATH_LIMIT + 1];
    size_t size = strlen(request->path);
    memcpy(path, request->path, size);
    strcpy(path + size, "/");
    return make_parents(path) ? -1 : open_path(AT_FDCWD, request->path, O_RDONLY | O_DIRECTORY, 0);
}

struct task *put_tree_task(struct op *op, const struct request *request) {
    int root = open_target(request);
    if (root < 0) {
        op_fail(op, errno, "open");
        return NULL;
    }
    struct putting *t = task_new(op, sizeof *t, put_step, put_close);
    if (!t) {
        close(root);
        return NULL;
    }
    t->root = root;
    t->parent = t->file = -1;
    t->uid = request->uid;
    t->gid = request->gid;
    return &t->task;
}
