/* READ and WRITE of one file. */
#include "paths.h"
#include "tasks.h"
#include "temporary.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PIECE (256u << 10)
#define LINKS_MAX 40

/* ---- read ---- */

struct reading {
    struct task task;
    int fd;
    uint64_t left;
};

static bool read_step(struct op *op) {
    struct reading *t = op->state;
    struct ring *ring = &op->out[0].ring;
    uint32_t want = t->left < PIECE ? (uint32_t)t->left : PIECE;
    if (!want) {
        task_done(op);
        return false;
    }
    if (!ring_reserve(ring, want) && !ring->cap) {
        op_fail(op, ENOMEM, "read");
        return false;
    }
    if (ring->cap == ring->used)
        return false;
    ssize_t n = ring_read(ring, t->fd, want);
    if (n < 0) {
        op_fail(op, errno, "read");
        return false;
    }
    if (n == 0) {
        task_done(op);
        return false;
    }
    op->out[0].produced += (uint64_t)n;
    t->left -= (uint64_t)n;
    link_ready(op);
    return true;
}

static void read_close(struct op *op) {
    close(((struct reading *)op->state)->fd);
}

struct task *read_task(struct op *op, const struct request *request) {
    struct stat st;
    int fd = open_regular(request->path, O_RDONLY, 0, &st);
    if (fd < 0 || (request->offset && lseek(fd, (off_t)request->offset, SEEK_SET) < 0)) {
        op_fail(op, errno, "open");
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    struct reading *t = task_new(op, sizeof *t, read_step, read_close);
    if (!t) {
        close(fd);
        return NULL;
    }
    t->fd = fd;
    t->left = request->length;
    return &t->task;
}

/* ---- write ---- */

struct writing {
    struct task task;
    int dir, fd; /* dir: -1 when appending */
    uint32_t mode, uid, gid;
    bool keep_owner, exclusive, renamed;
    char base[NAME_MAX + 1], temporary[TEMPORARY_MAX];
};

static bool take(struct op *op, int fd) {
    if (ring_write(&op->in.ring, fd, op->in.ring.used) >= 0)
        return true;
    op_fail(op, errno, "write");
    return false;
}

/* Owner before mode: chown clears the set-id bits. Who cannot keep a foreign owner becomes the owner, as with any rename. */
static int dress(const struct writing *t) {
    if ((t->uid != KEEP || t->gid != KEEP) && fchown(t->fd, t->uid, t->gid) && !(t->keep_owner && errno == EPERM))
        return -1;
    return t->mode == KEEP ? 0 : fchmod(t->fd, t->mode);
}

static void write_finish(struct op *op, struct writing *t) {
    if (dress(t)) {
        op_fail(op, errno, "owner");
        return;
    }
    unsigned flags = t->exclusive ? RENAME_NOREPLACE : 0;
    if (t->dir >= 0 && syscall(SYS_renameat2, t->dir, t->temporary, t->dir, t->base, flags)) {
        op_fail(op, errno, "rename");
        return;
    }
    t->renamed = true;
    task_done(op);
}

static bool write_step(struct op *op) {
    struct writing *t = op->state;
    if (op->in.ring.used)
        return take(op, t->fd);
    if (op->in.eof)
        write_finish(op, t);
    return false;
}

static void write_close(struct op *op) {
    struct writing *t = op->state;
    close(t->fd);
    if (t->dir < 0)
        return;
    if (!t->renamed)
        unlinkat(t->dir, t->temporary, 0);
    close(t->dir);
}

/* `path` with its last component replaced by where the link there leads; false with errno. */
static bool follow(char path[PATH_LIMIT], int dir, const char *base) {
    char target[PATH_LIMIT];
    ssize_t n = readlinkat(dir, base, target, sizeof target);
    size_t lead = (size_t)(strrchr(path, '/') - path) + 1;
    if (n <= 0)
        return false;
    if (target[0] == '/')
        lead = 0;
    if (lead + (size_t)n >= PATH_LIMIT) {
        errno = ENAMETOOLONG;
        return false;
    }
    memcpy(path + lead, target, (size_t)n);
    path[lead + (size_t)n] = 0;
    return true;
}

/* Directory and name of the file itself behind links; `st` of what is there, st_nlink 0 if nothing. */
static int locate(const char *from, bool exclusive, char base[NAME_MAX + 1], struct stat *st) {
    char path[PATH_LIMIT];
    strcpy(path, from);
    for (int i = 0; i < LINKS_MAX; i++) {
        int dir = open_parent(path, base);
        if (dir < 0)
            return -1;
        bool found = fstatat(dir, base, st, AT_SYMLINK_NOFOLLOW) == 0;
        if (!found)
            memset(st, 0, sizeof *st);
        if (found && exclusive)
            errno = EEXIST;
        else if (!found && errno == ENOENT)
            return dir;
        else if (found && !S_ISLNK(st->st_mode))
            return dir;
        if ((found && exclusive) || !found || !follow(path, dir, base)) {
            int error = errno;
            close(dir);
            errno = error;
            return -1;
        }
        close(dir);
    }
    errno = ELOOP;
    return -1;
}

/* What is there must be a file that the caller may write, as with a program that opens it. A running program may be replaced,
 * and what somebody holds a lease on (EAGAIN): both are found out after the permission. */
static int check_existing(int dir, const char *base, const struct stat *st) {
    if (!st->st_nlink)
        return 0;
    if (!S_ISREG(st->st_mode))
        return S_ISDIR(st->st_mode) ? EISDIR : EINVAL;
    int fd = open_path(dir, base, O_WRONLY | O_NOFOLLOW, 0);
    if (fd < 0)
        return errno == ETXTBSY || errno == EAGAIN ? 0 : errno;
    close(fd);
    return 0;
}

static void settle_mode(struct writing *t, const struct request *request, const struct stat *st) {
    bool exists = st->st_nlink != 0;
    t->mode = request->mode != KEEP ? request->mode & 07777 : exists ? st->st_mode & 07777 : 0644;
    t->keep_owner = exists && request->uid == KEEP && request->gid == KEEP;
    t->uid = t->keep_owner ? st->st_uid : request->uid;
    t->gid = t->keep_owner ? st->st_gid : request->gid;
}

static int open_replacing(struct writing *t, const struct request *request) {
    struct stat st;
    t->dir = locate(request->path, t->exclusive, t->base, &st);
    if (t->dir < 0)
        return errno;
    int error = check_existing(t->dir, t->base, &st);
    settle_mode(t, request, &st);
    if (!error && (t->fd = open_temporary(t->dir, t->temporary)) < 0)
        error = errno;
    if (error)
        close(t->dir);
    return error;
}

static int open_appending(struct writing *t, const struct request *request) {
    struct stat st;
    uint32_t mode = request->mode == KEEP ? 0644 : request->mode & 07777;
    t->mode = request->mode == KEEP ? KEEP : mode;
    t->uid = request->uid;
    t->gid = request->gid;
    t->fd = open_regular(request->path, O_WRONLY | O_APPEND | O_CREAT | (t->exclusive ? O_EXCL : 0), mode, &st);
    return t->fd < 0 ? errno : 0;
}

struct task *write_task(struct op *op, const struct request *request) {
    if (request->flags & WRITE_PARENTS && make_parents(request->path)) {
        op_fail(op, errno, "mkdir");
        return NULL;
    }
    struct writing *t = task_new(op, sizeof *t, write_step, write_close);
    if (!t)
        return NULL;
    t->dir = t->fd = -1;
    t->exclusive = request->flags & WRITE_EXCLUSIVE;
    int error = request->flags & WRITE_APPEND ? open_appending(t, request) : open_replacing(t, request);
    if (!error)
        return &t->task;
    op_fail(op, error, "open");
    free(t);
    return NULL;
}
