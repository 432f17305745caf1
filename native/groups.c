#include "groups.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

static int base = -1;
static struct group *pool, *busy, *lingering;
static uint32_t pooled, numbered;

bool groups_init(int fd) {
    struct statfs fs;
    if (fstatfs(fd, &fs) || fs.f_type != CGROUP2_SUPER_MAGIC)
        return false;
    base = fd;
    return true;
}

bool groups_available(void) {
    return base >= 0;
}

static void name_of(uint32_t number, char name[16]) {
    snprintf(name, 16, GROUP_NAME, number);
}

static struct group *discard(struct group *g) {
    char name[16];
    int error = errno;
    name_of(g->number, name);
    if (g->procs >= 0)
        close(g->procs);
    if (g->dir >= 0)
        close(g->dir);
    unlinkat(base, name, AT_REMOVEDIR);
    free(g);
    errno = error;
    return NULL;
}

static struct group *create(void) {
    char name[16];
    struct group *g = malloc(sizeof *g);
    if (!g)
        return NULL;
    *g = (struct group){.dir = -1, .procs = -1, .number = numbered++};
    name_of(g->number, name);
    if (mkdirat(base, name, 0700) && errno != EEXIST)
        return discard(g);
    g->dir = openat(base, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    g->procs = g->dir < 0 ? -1 : openat(g->dir, "cgroup.procs", O_RDWR | O_CLOEXEC);
    return g->procs < 0 ? discard(g) : g;
}

struct group *group_take(uint64_t op) {
    struct group *g = pool;
    if (g) {
        pool = g->next;
        pooled--;
    } else if (!(g = create()))
        return NULL;
    g->op = op;
    g->next = busy;
    busy = g;
    return g;
}

/* After cgroup.kill a group is of no more use: kernels since 6.12 also kill what is later cloned into it, because they
 * compare its count of kills with that of the parent's group (seen on 6.18). */
static void retire(struct group *g) {
    if (pooled >= GROUPS_KEPT || g->killed) {
        discard(g);
        return;
    }
    g->op = 0;
    g->next = pool;
    pool = g;
    pooled++;
}

void group_give(struct group *group) {
    struct group **at = &busy;
    while (*at != group)
        at = &(*at)->next;
    *at = group->next;
    if (!group_alive(group)) {
        retire(group);
        return;
    }
    group->next = lingering;
    lingering = group;
}

void groups_sweep(void) {
    for (struct group **at = &lingering; *at;) {
        struct group *g = *at;
        if (group_alive(g)) {
            at = &g->next;
            continue;
        }
        *at = g->next;
        retire(g);
    }
}

bool group_kill(struct group *group) {
    int fd = openat(group->dir, "cgroup.kill", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool told = write(fd, "1", 1) == 1;
    group->killed |= told;
    close(fd);
    return told;
}

/* An unreadable group counts as alive: it is never used again by mistake. */
bool group_alive(const struct group *group) {
    char byte;
    return pread(group->procs, &byte, 1, 0) != 0;
}

int group_pids(const struct group *group, void (*each)(int pid, void *context), void *context) {
    char text[4096];
    uint32_t total = 0, partial = 0;
    off_t at = 0;
    ssize_t n;
    while ((n = pread(group->procs, text, sizeof text, at)) > 0) {
        at += n;
        total += pids_parse(text, (size_t)n, &partial, each, context);
    }
    return n < 0 ? -1 : (int)total;
}

const struct group *groups_next(const struct group *after) {
    if (!after)
        return busy ? busy : lingering;
    if (after->next)
        return after->next;
    for (const struct group *g = lingering; g; g = g->next)
        if (g == after)
            return NULL;
    return lingering;
}
