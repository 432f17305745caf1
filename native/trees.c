/* Deleting a subvolume and making another costs the kernel more than emptying one does, most of it half a minute later, and with
 * writes for whatever it held in between. So one that held little is emptied, and waits under another name for the next
 * container. Nothing of a container outlives that: the directories themselves go, too. What its files used may be charged
 * until the next commit; the kernel makes one before it says that a quota is exceeded. */
#define _GNU_SOURCE
#include "trees.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define SPARES 64u               /* the bits of `no_spare` */
#define SPARE_NAME ".spare-%u"   /* a place's name begins with no dot */
#define MOST_DEPTH 24
#define MOST_ENTRIES 512
#define MOST_BLOCKS (8u << 11)   /* 8 MiB in blocks of 512 bytes: how long removing its files may take */

struct room {
    uint32_t entries, blocks;
};

static int let_go(int fd, int failed) {
    int saved = errno;
    close(fd);
    errno = saved;
    return failed;
}

static int open_tree_of(const struct tree_directories *at, const char *name) {
    return openat(at->trees, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* ---- emptying ---- */

static int empty(int directory, struct room *room, int depth);

static int empty_below(int parent, const char *name, struct room *room, int depth) {
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd < 0 || empty(fd, room, depth) || unlinkat(parent, name, AT_REMOVEDIR) ? -1 : 0;
}

/* A file with many extents takes long to remove. One that another name remains of is not freed, and counts all the same. */
static int remove_file(int parent, const char *name, struct room *room) {
    struct stat facts;
    if (fstatat(parent, name, &facts, AT_SYMLINK_NOFOLLOW) || facts.st_blocks > room->blocks)
        return -1;
    room->blocks -= (uint32_t)facts.st_blocks;
    return unlinkat(parent, name, 0);
}

static int remove_child(int parent, const struct dirent *child, struct room *room, int depth) {
    if (!strcmp(child->d_name, ".") || !strcmp(child->d_name, ".."))
        return 0;
    if (!room->entries || !depth)
        return -1;
    room->entries--;
    return child->d_type == DT_DIR ? empty_below(parent, child->d_name, room, depth - 1)
                                   : remove_file(parent, child->d_name, room);
}

/* Takes the descriptor over. -1: it is not empty, whatever the reason. */
static int empty(int directory, struct room *room, int depth) {
    DIR *here = fdopendir(directory);
    if (!here)
        return let_go(directory, -1);
    struct dirent *child;
    int failed = 0;
    while (!failed && (errno = 0, child = readdir(here)))
        failed = remove_child(directory, child, room, depth);
    failed |= errno;
    closedir(here);
    return failed ? -1 : 0;
}

/* ---- spare ones ---- */

static void spare_name(uint32_t number, char name[32]) { snprintf(name, 32, SPARE_NAME, number); }

static int keep_spare(struct tree_directories *at, const char *name) {
    struct room room = {.entries = MOST_ENTRIES, .blocks = MOST_BLOCKS};
    char spare[32];
    int tree = at->no_spare ? open_tree_of(at, name) : -1;
    if (tree < 0 || empty(tree, &room, MOST_DEPTH))
        return -1;
    uint32_t number = (uint32_t)__builtin_ctzll(at->no_spare);
    spare_name(number, spare);
    if (renameat(at->trees, name, at->trees, spare))
        return -1;
    at->no_spare &= ~(1ull << number);
    return 0;
}

/* At first every spare may be there, left by another spawner. */
static int take_spare(struct tree_directories *at, const char *name) {
    char spare[32];
    for (uint32_t number = 0; number < SPARES; number++) {
        if (at->no_spare >> number & 1)
            continue;
        spare_name(number, spare);
        int failed = renameat(at->trees, spare, at->trees, name);
        if (failed && errno != ENOENT)
            return -1;
        at->no_spare |= 1ull << number;
        if (!failed)
            return 0;
    }
    return -1;
}

/* ---- trees ---- */

static int subvolume(int parent, unsigned long what, const char *name) {
    struct btrfs_ioctl_vol_args arguments = {.fd = 0};
    strncpy(arguments.name, name, sizeof arguments.name - 1);
    return ioctl(parent, (int)what, &arguments);
}

static int limit(int tree, uint64_t disk_bytes) {
    struct btrfs_ioctl_qgroup_limit_args wanted = {.lim = {.flags = BTRFS_QGROUP_LIMIT_MAX_RFER, .max_rfer = disk_bytes}};
    return ioctl(tree, (int)BTRFS_IOC_QGROUP_LIMIT, &wanted);
}

/* Written in place: compression, which kernel threads would do outside of every limit, is then not possible. */
static int fill(int tree, uint64_t disk_bytes) {
    int flags = FS_NOCOW_FL;
    return ioctl(tree, (int)FS_IOC_SETFLAGS, &flags) || mkdirat(tree, "u", 0755) || mkdirat(tree, "w", 0755) ||
           limit(tree, disk_bytes);
}

int tree_make(struct tree_directories *at, const char *name, uint64_t disk_bytes) {
    if (faccessat(at->trees, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0) {
        errno = EEXIST; /* a rename would replace an empty one */
        return -1;
    }
    if (take_spare(at, name) && subvolume(at->trees, BTRFS_IOC_SUBVOL_CREATE, name))
        return -1;
    int tree = open_tree_of(at, name);
    return tree < 0 || fill(tree, disk_bytes) == 0 ? tree : let_go(tree, -1);
}

int tree_limit(const struct tree_directories *at, const char *name, uint64_t disk_bytes) {
    int tree = open_tree_of(at, name);
    return tree < 0 ? -1 : let_go(tree, limit(tree, disk_bytes));
}

int tree_remove(struct tree_directories *at, const char *name) {
    if (keep_spare(at, name) == 0)
        return 0;
    return subvolume(at->trees, BTRFS_IOC_SNAP_DESTROY, name) && errno != ENOENT ? -1 : 0;
}
