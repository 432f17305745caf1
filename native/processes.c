/* PROCESSES: what /proc says to the caller, with the operation that each process descends from. The guest itself is left out. */
#include "groups.h"
#include "tasks.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct owner {
    int pid;
    uint64_t op;
};

struct scan {
    struct task task;
    DIR *dir;
    struct owner *owners;
    size_t count, room;
    uint64_t op; /* while its group is read */
};

static void add_owner(int pid, void *context) {
    struct scan *t = context;
    if (t->count == t->room) {
        struct owner *grown = realloc(t->owners, (t->room + 64) * sizeof *grown);
        if (!grown)
            return;
        t->owners = grown;
        t->room += 64;
    }
    t->owners[t->count++] = (struct owner){pid, t->op};
}

static uint64_t owner_of(const struct scan *t, int pid) {
    for (size_t i = 0; i < t->count; i++)
        if (t->owners[i].pid == pid)
            return t->owners[i].op;
    return 0;
}

static ssize_t read_file(int proc, int pid, const char *name, char *into, size_t room) {
    char path[48];
    snprintf(path, sizeof path, "%d/%s", pid, name);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return -1;
    ssize_t n = read(fd, into, room - 1);
    close(fd);
    into[n > 0 ? n : 0] = 0;
    return n;
}

static bool send_process(struct op *op, struct scan *t, int pid) {
    char status[4096], argv[ARGV_MAX];
    uint8_t record[PROCESS_MAX];
    struct writer w = writer_of(record, sizeof record);
    ssize_t size = read_file(dirfd(t->dir), pid, "status", status, sizeof status);
    if (size <= 0)
        return true;
    size = read_file(dirfd(t->dir), pid, "cmdline", argv, sizeof argv);
    process_put(&w, pid, owner_of(t, pid), status, argv, size > 0 ? (size_t)size : 0);
    return task_emit(op, record, (uint32_t)(w.at - record));
}

static bool scan_step(struct op *op) {
    struct scan *t = op->state;
    if (task_room(op) < SCRATCH)
        return false;
    errno = 0;
    struct dirent *entry = readdir(t->dir);
    if (!entry && errno) {
        op_fail(op, errno, "list");
        return false;
    }
    if (!entry) {
        task_done(op);
        return false;
    }
    int pid = atoi(entry->d_name);
    return pid <= 0 || pid == getpid() || send_process(op, t, pid);
}

static void scan_close(struct op *op) {
    struct scan *t = op->state;
    closedir(t->dir);
    free(t->owners);
}

struct task *processes_task(struct op *op, const struct request *request) {
    (void)request;
    DIR *dir = opendir("/proc");
    if (!dir) {
        op_fail(op, errno, "open");
        return NULL;
    }
    struct scan *t = task_new(op, sizeof *t, scan_step, scan_close);
    if (!t) {
        closedir(dir);
        return NULL;
    }
    t->dir = dir;
    for (const struct group *g = groups_next(NULL); g; g = groups_next(g)) {
        t->op = g->op;
        group_pids(g, add_owner, t);
    }
    return &t->task;
}
