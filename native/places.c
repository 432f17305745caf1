#define _GNU_SOURCE
#include "places.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "groups.h"

#define PLACE_SOCKET "s" /* beside u and w: the container sees only what is in u */
#define BACKLOG 8
#define VALUE_ENDS '='

const struct place no_place = {.listener = -1, .writable = -1, .cgroup = -1};

static void let_go(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void place_let_go(struct place *place, int all) {
    let_go(&place->cgroup);
    for (uint32_t i = 0; i < place->group_count; i++)
        let_go(&place->groups[i]);
    place->group_count = 0;
    if (all) {
        let_go(&place->listener);
        let_go(&place->writable);
    }
}

/* ---- ids ---- */

static void slot_name(uint32_t slot, char text[16]) { snprintf(text, 16, "%u", slot); }

static int claim_ids(struct place_directories *at, const char *name, struct place *place) {
    char slot[16], holder[2 * SPAWN_NAME];
    snprintf(holder, sizeof holder, "%s/%s", at->instance, name);
    for (uint32_t step = 0; step < at->slots; step++) {
        uint32_t number = (at->next + step) % at->slots;
        slot_name(number, slot);
        if (symlinkat(holder, at->ids, slot)) {
            if (errno == EEXIST)
                continue;
            return -1;
        }
        at->next = number + 1;
        place->uid_base = at->uid_first + number * at->uid_size;
        place->uid_count = at->uid_size - 1;
        place->guest_uid = place->uid_base + place->uid_count;
        return 0;
    }
    errno = EUSERS;
    return -1;
}

static int read_link(int directory, const char *name, char *text, size_t size) {
    ssize_t got = readlinkat(directory, name, text, size - 1);
    if (got < 0)
        return -1;
    text[got] = 0;
    return 0;
}

/* The slot of a place is written nowhere but in the owner of its group. */
static int slot_of(const struct place_directories *at, const char *name, char slot[16]) {
    struct stat facts;
    if (fstatat(at->unified, name, &facts, AT_SYMLINK_NOFOLLOW) || facts.st_uid < at->uid_first)
        return -1;
    slot_name((facts.st_uid - at->uid_first) / at->uid_size, slot);
    return 0;
}

static int release_ids(const struct place_directories *at, const char *name, const char *slot) {
    char holder[2 * SPAWN_NAME], found[2 * SPAWN_NAME];
    snprintf(holder, sizeof holder, "%s/%s", at->instance, name);
    if (read_link(at->ids, slot, found, sizeof found) || strcmp(found, holder))
        return -1;
    return unlinkat(at->ids, slot, 0);
}

/* ---- groups ---- */

static int write_file(int directory, const char *path, const char *value) {
    int fd = openat(directory, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t size = (ssize_t)strlen(value), done = write(fd, value, (size_t)size);
    int saved = errno;
    close(fd);
    errno = saved;
    return done == size ? 0 : -1;
}

/* The parent that a limit is for; `file` is what follows its number. */
static int hierarchy_of(const struct place_directories *at, const char *text, const char **file) {
    if (!strncmp(text, "v2/", 3)) {
        *file = text + 3;
        return at->unified;
    }
    uint32_t number = (uint32_t)(*text - '0');
    if (number >= at->v1_count || text[1] != '/')
        return -1;
    *file = text + 2;
    return at->v1[number];
}

static int limit_one(const struct place_directories *at, const char *name, const char *text) {
    const char *file = NULL;
    char path[2 * SPAWN_NAME];
    int optional = *text == '?';
    int parent = hierarchy_of(at, text + optional, &file);
    const char *value = parent < 0 ? NULL : strchr(file, VALUE_ENDS);
    if (!value || value == file || memchr(file, '/', (size_t)(value - file)) || value - file >= SPAWN_NAME) {
        errno = EINVAL;
        return -1;
    }
    snprintf(path, sizeof path, "%s/%.*s", name, (int)(value - file), file);
    return write_file(parent, path, value + 1) && !(optional && errno == ENOENT) ? -1 : 0;
}

/* Of two limits of which one must not be above the other, the old values say which one goes first. */
static int limit_groups(const struct place_directories *at, const char *const *texts, uint32_t count) {
    for (uint32_t i = 1; i < count; i++) {
        if (limit_one(at, texts[0], texts[i]) == 0)
            continue;
        if (errno != EINVAL || i + 1 == count || limit_one(at, texts[0], texts[i + 1]) || limit_one(at, texts[0], texts[i]))
            return -1;
    }
    return 0;
}

/* The guest's first process sorts its programs into groups below its own; limits stay root's. */
static int give_group(const struct place_directories *at, const char *name, uint32_t owner) {
    static const char *const given[] = {"", "/cgroup.procs", "/cgroup.subtree_control", "/cgroup.threads"};
    char path[2 * SPAWN_NAME];
    for (size_t i = 0; i < sizeof given / sizeof *given; i++) {
        snprintf(path, sizeof path, "%s%s", name, given[i]);
        if (fchownat(at->unified, path, owner, owner, 0))
            return -1;
    }
    return 0;
}

static int make_directory(int parent, const char *name) { return mkdirat(parent, name, 0700) && errno != EEXIST ? -1 : 0; }

static int make_groups(const struct place_directories *at, const char *const *texts, uint32_t count, struct place *place) {
    char tasks[2 * SPAWN_NAME];
    snprintf(tasks, sizeof tasks, "%s/tasks", texts[0]);
    if (make_directory(at->unified, texts[0]))
        return -1;
    for (uint32_t i = 0; i < at->v1_count; i++)
        if (make_directory(at->v1[i], texts[0]))
            return -1;
    if (limit_groups(at, texts, count) || give_group(at, texts[0], place->guest_uid))
        return -1;
    place->cgroup = openat(at->unified, texts[0], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (place->cgroup < 0)
        return -1;
    for (; place->group_count < at->v1_count; place->group_count++) {
        int fd = openat(at->v1[place->group_count], tasks, O_WRONLY | O_CLOEXEC);
        if (fd < 0)
            return -1;
        place->groups[place->group_count] = fd;
    }
    return 0;
}

/* Gone is gone, whoever removed it. */
static int remove_entry(int directory, const char *name, int flags) {
    return unlinkat(directory, name, flags) && errno != ENOENT ? -1 : 0;
}

/* The guest numbers its groups from 0 and keeps a few of them. */
static int remove_unified(int unified, const char *name) {
    char path[2 * SPAWN_NAME];
    for (uint32_t i = 0; i < GROUPS_KEPT; i++) {
        snprintf(path, sizeof path, "%s/" GROUP_NAME, name, i);
        if (unlinkat(unified, path, AT_REMOVEDIR))
            break;
    }
    return remove_entry(unified, name, AT_REMOVEDIR);
}

static int remove_groups(const struct place_directories *at, const char *name) {
    int failed = remove_unified(at->unified, name);
    for (uint32_t i = 0; i < at->v1_count; i++)
        failed |= remove_entry(at->v1[i], name, AT_REMOVEDIR);
    return failed;
}

/* ---- the writable tree, and the socket in it ---- */

/* Only a member of the mount namespace that a directory is in may clone its mount. */
static int clone_mount(const struct place_directories *at, const char *name) {
    if (syscall(SYS_setns, at->host, CLONE_NEWNS))
        return -1;
    int mount = (int)syscall(SYS_open_tree, at->trees.trees, name, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    int saved = errno;
    if (syscall(SYS_setns, at->own, CLONE_NEWNS))
        _exit(1); /* what follows would happen to the host's mounts */
    errno = saved;
    return mount;
}

/* Bound by its name in the working directory: the address of a socket has 108 bytes, and no path of the host must fit. */
static int make_socket(int tree, struct place *place) {
    const struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = PLACE_SOCKET};
    place->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return place->listener < 0 || fchdir(tree) || bind(place->listener, (const struct sockaddr *)&address, sizeof address) ||
           listen(place->listener, BACKLOG);
}

static int make_tree(struct place_directories *at, const char *name, uint64_t disk_bytes, struct place *place) {
    int tree = tree_make(&at->trees, name, disk_bytes);
    if (tree < 0)
        return -1;
    int failed = make_socket(tree, place), saved = errno;
    close(tree);
    errno = saved;
    place->writable = failed ? -1 : clone_mount(at, name);
    return place->writable < 0 ? -1 : 0;
}

/* ---- all of it ---- */

static int make_parts(struct place_directories *at, const char *const *texts, uint32_t count, uint64_t disk_bytes,
                      struct place *place, struct fault *fault) {
    if (claim_ids(at, texts[0], place))
        return fault_at(fault, "ids");
    if (make_groups(at, texts, count, place))
        return fault_at(fault, "cgroups");
    return make_tree(at, texts[0], disk_bytes, place) ? fault_at(fault, "disk") : 0;
}

int place_make(struct place_directories *at, const char *const *texts, uint32_t count, uint64_t disk_bytes,
               struct place *place, struct fault *fault) {
    *place = no_place;
    umask(022);
    int failed = make_parts(at, texts, count, disk_bytes, place, fault);
    umask(0);
    if (failed)
        place_let_go(place, 1);
    return failed;
}

int place_limit(const struct place_directories *at, const char *const *texts, uint32_t count, uint64_t disk_bytes,
                struct fault *fault) {
    if (limit_groups(at, texts, count))
        return fault_at(fault, "limits");
    return tree_limit(&at->trees, texts[0], disk_bytes) ? fault_at(fault, "limits") : 0;
}

/* The range of ids last: nothing may be left that belongs to it when another gets it. */
int place_remove(struct place_directories *at, const char *name) {
    char slot[16];
    return !(slot_of(at, name, slot) || remove_groups(at, name) || tree_remove(&at->trees, name) || release_ids(at, name, slot));
}
