/* File operations: the start of each, and those that are one step. */
#include "paths.h"
#include "tasks.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLICE_NS 4000000u

/* ---- tasks ---- */

void *task_new(struct op *op, size_t size, bool (*step)(struct op *), void (*close_)(struct op *)) {
    struct task *task = calloc(1, size);
    if (!task)
        op_fail(op, ENOMEM, "start");
    else {
        task->step = step;
        task->close = close_;
    }
    return task;
}

uint32_t task_room(const struct op *op) {
    return ring_room(&op->out[0].ring);
}

bool task_emit(struct op *op, const void *data, uint32_t size) {
    if (!ring_append(&op->out[0].ring, data, size)) {
        op_fail(op, ENOMEM, "output");
        return false;
    }
    op->out[0].produced += size;
    link_ready(op);
    return true;
}

void task_done(struct op *op) {
    op_finish(op, OUT_EXITED, 0, NULL, 0);
}

static void task_end(struct op *op) {
    struct task *task = op->state;
    if (!task)
        return;
    if (task->close)
        task->close(op);
    identity_release(&task->who);
    free_later(task);
    op->state = NULL;
}

static bool task_step(struct op *op) {
    struct task *task = op->state;
    uint64_t until = monotonic_ns() + SLICE_NS;
    bool more = true;
    int error = identity_enter(&task->who);
    if (error)
        op_fail(op, error, "user");
    while (!op->done && more && monotonic_ns() < until)
        more = task->step(op);
    if (op->done)
        task_end(op);
    identity_leave();
    if (!op->done && op->in.used)
        ops_input_taken(op);
    return more;
}

static void task_cancel(struct op *op) {
    struct task *task = op->state;
    op_finish(op, OUT_CANCELLED, 0, NULL, 0);
    if (task && identity_enter(&task->who) == 0) {
        task_end(op);
        identity_leave();
    }
}

static void task_release(struct op *op) {
    task_end(op);
}

static const struct op_class task_class = {
    .input = ops_wake,
    .space = ops_wake,
    .cancel = task_cancel,
    .step = task_step,
    .release = task_release,
};

/* ---- one step ---- */

static void stat_path(struct op *op, const struct request *request) {
    struct stat st;
    char target[PATH_LIMIT] = "";
    uint8_t detail[ENTRY_MAX];
    struct writer w = writer_of(detail, sizeof detail);
    int fd = open_path(AT_FDCWD, request->path, O_PATH | (request->follow ? 0 : O_NOFOLLOW), 0);
    if (fd < 0 || fstat(fd, &st)) {
        op_fail(op, errno, "stat");
    } else {
        ssize_t n = S_ISLNK(st.st_mode) ? readlinkat(fd, "", target, sizeof target - 1) : 0;
        target[n > 0 ? n : 0] = 0;
        entry_put(&w, "", entry_kind(st.st_mode), &st, target);
        op_finish(op, OUT_EXITED, 0, detail, (uint32_t)(w.at - detail));
    }
    if (fd >= 0)
        close(fd);
}

/* `mkdir a/` and `rm a/` mean a. */
static void trim(char path[PATH_LIMIT], const char *from) {
    size_t size = strlen(from);
    while (size > 1 && from[size - 1] == '/')
        size--;
    memcpy(path, from, size);
    path[size] = 0;
}

static bool is_directory(const char *path) {
    int fd = open_path(AT_FDCWD, path, O_PATH | O_DIRECTORY, 0);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

static int make_directory(const char *path, uint32_t flags, uint32_t mode) {
    char base[NAME_MAX + 1];
    if (flags & MKDIR_PARENTS && make_parents(path))
        return errno;
    int dir = open_parent(path, base);
    int error = dir >= 0 && mkdirat(dir, base, mode & 07777) == 0 ? 0 : errno;
    if (dir >= 0)
        close(dir);
    if ((error == EEXIST || error == EISDIR) && flags & MKDIR_PARENTS && is_directory(path))
        error = 0;
    return error == EISDIR ? EEXIST : error;
}

static void mkdir_path(struct op *op, const struct request *request) {
    char path[PATH_LIMIT];
    trim(path, request->path);
    int error = make_directory(path, request->flags, request->mode);
    if (error)
        op_fail(op, error, "mkdir");
    else
        task_done(op);
}

static void rename_path(struct op *op, const struct request *request) {
    char path[PATH_LIMIT], to[PATH_LIMIT], base[NAME_MAX + 1], to_base[NAME_MAX + 1];
    trim(path, request->path);
    trim(to, request->to);
    int from_dir = open_parent(path, base), to_dir = from_dir < 0 ? -1 : open_parent(to, to_base);
    if (to_dir < 0 || renameat(from_dir, base, to_dir, to_base))
        op_fail(op, errno, "rename");
    else
        task_done(op);
    if (from_dir >= 0)
        close(from_dir);
    if (to_dir >= 0)
        close(to_dir);
}

/* The task that goes on with a directory, or NULL when there is no more to do. */
static struct task *remove_path(struct op *op, const struct request *request) {
    struct stat st;
    struct task *task = NULL;
    char path[PATH_LIMIT], base[NAME_MAX + 1];
    trim(path, request->path);
    int dir = open_parent(path, base);
    bool found = dir >= 0 && fstatat(dir, base, &st, AT_SYMLINK_NOFOLLOW) == 0;
    if (!found && errno == ENOENT && request->flags & REMOVE_MISSING)
        task_done(op);
    else if (!found)
        op_fail(op, errno == EISDIR ? EBUSY : errno, "remove");
    else if (S_ISDIR(st.st_mode) && request->flags & REMOVE_TREE) {
        task = remove_task(op, dir, base);
        dir = -1;
    } else if (unlinkat(dir, base, S_ISDIR(st.st_mode) ? AT_REMOVEDIR : 0))
        op_fail(op, errno, "remove");
    else
        task_done(op);
    if (dir >= 0)
        close(dir);
    return task;
}

/* ---- start ---- */

static struct task *begin(struct op *op, const struct request *request) {
    switch (request->kind) {
    case OP_STAT:
        stat_path(op, request);
        return NULL;
    case OP_MKDIR:
        mkdir_path(op, request);
        return NULL;
    case OP_RENAME:
        rename_path(op, request);
        return NULL;
    case OP_REMOVE:
        return remove_path(op, request);
    case OP_READ:
        return read_task(op, request);
    case OP_WRITE:
        return write_task(op, request);
    case OP_PUT_TREE:
        return put_tree_task(op, request);
    case OP_PROCESSES:
        return processes_task(op, request);
    default:
        return walk_task(op, request);
    }
}

void file_start(struct op *op, const struct request *request) {
    struct account account;
    op->class = &task_class;
    int error = account_find(request->user, &account);
    if (!error && (error = identity_enter(&account.who)))
        identity_release(&account.who);
    if (error) {
        op_fail(op, error, "user");
        return;
    }
    op_started(op, 0);
    struct task *task = begin(op, request);
    identity_leave();
    if (!task) {
        identity_release(&account.who);
        return;
    }
    task->who = account.who;
    op->state = task;
    ops_wake(op);
}
