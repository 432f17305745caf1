/* REMOVE of a whole tree of any depth with one descriptor: up again by `..`, checked to be the directory that it came from. */
#include "paths.h"
#include "tasks.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#define ENTRIES_PER_STEP 64

struct crumb {
    dev_t device;
    ino_t inode;
    char *name;
};

struct removal {
    struct task task;
    int top; /* holds the tree */
    DIR *here;
    struct crumb *trail; /* the directories from the tree's root to `here` */
    size_t depth, room;
};

static bool fail(struct op *op, int error) {
    op_fail(op, error, "remove");
    return false;
}

static bool push(struct removal *t, int fd, const char *name) {
    struct stat st;
    if (t->depth == t->room) {
        struct crumb *grown = realloc(t->trail, (t->room + 32) * sizeof *grown);
        if (!grown)
            return false;
        t->trail = grown;
        t->room += 32;
    }
    char *copy = strdup(name);
    DIR *dir = copy && fstat(fd, &st) == 0 ? fdopendir(fd) : NULL;
    if (!dir) {
        free(copy);
        return false;
    }
    if (t->here)
        closedir(t->here);
    t->here = dir;
    t->trail[t->depth++] = (struct crumb){st.st_dev, st.st_ino, copy};
    return true;
}

static bool descend(struct op *op, struct removal *t, int parent, const char *name) {
    int fd = open_child_directory(parent, name);
    if (fd >= 0 && push(t, fd, name))
        return true;
    int error = errno;
    if (fd >= 0)
        close(fd);
    return error == ENOENT || fail(op, error);
}

static int open_above(const struct removal *t) {
    struct stat st;
    const struct crumb *above = &t->trail[t->depth - 2];
    int fd = openat(dirfd(t->here), "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || (fstat(fd, &st) == 0 && st.st_dev == above->device && st.st_ino == above->inode))
        return fd;
    close(fd);
    errno = EAGAIN; /* somebody moved the directory away under our feet */
    return -1;
}

/* `here` is empty: removes it from the directory above, which becomes `here`. */
static bool ascend(struct op *op, struct removal *t) {
    struct crumb last = t->trail[t->depth - 1];
    int above = t->depth > 1 ? open_above(t) : t->top;
    if (above < 0)
        return fail(op, errno);
    int error = unlinkat(above, last.name, AT_REMOVEDIR) ? errno : 0;
    free(last.name);
    t->depth--;
    closedir(t->here);
    t->here = t->depth ? fdopendir(above) : NULL;
    if (error || (t->depth && !t->here)) {
        if (t->depth && !t->here)
            close(above);
        return fail(op, error ? error : ENOMEM);
    }
    if (t->depth)
        return true;
    task_done(op);
    return false;
}

/* True: it is gone. */
static bool unlink_child(int dir, const char *name) {
    if (unlinkat(dir, name, 0) == 0 || errno == ENOENT)
        return true;
    return (errno == EISDIR || errno == EPERM) && unlinkat(dir, name, AT_REMOVEDIR) == 0;
}

static bool remove_step(struct op *op) {
    struct removal *t = op->state;
    for (int i = 0; i < ENTRIES_PER_STEP; i++) {
        errno = 0;
        struct dirent *child = readdir(t->here);
        if (!child)
            return errno ? fail(op, errno) : ascend(op, t);
        if (!strcmp(child->d_name, ".") || !strcmp(child->d_name, "..") || unlink_child(dirfd(t->here), child->d_name))
            continue;
        if (errno == ENOTEMPTY || errno == EEXIST)
            return descend(op, t, dirfd(t->here), child->d_name);
        return fail(op, errno);
    }
    return true;
}

static void remove_close(struct op *op) {
    struct removal *t = op->state;
    if (t->here)
        closedir(t->here);
    while (t->depth)
        free(t->trail[--t->depth].name);
    free(t->trail);
    close(t->top);
}

struct task *remove_task(struct op *op, int parent, const char *name) {
    struct removal *t = task_new(op, sizeof *t, remove_step, remove_close);
    if (!t) {
        close(parent);
        return NULL;
    }
    t->top = parent;
    if (descend(op, t, parent, name) && t->here)
        return &t->task;
    op_fail(op, ENOENT, "remove");
    free(t->trail);
    free(t);
    close(parent);
    return NULL;
}
