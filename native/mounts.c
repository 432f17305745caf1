#define _GNU_SOURCE
#include "mounts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#ifndef MNT_DETACH
#define MNT_DETACH 2
#endif
#define QUIET_ATTR (MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC)

int fault_at(struct fault *fault, const char *step) {
    if (fault->error == 0) {
        fault->error = errno ? errno : EIO;
        snprintf(fault->step, sizeof fault->step, "%s", step);
    }
    return -1;
}

int sys_mount(const char *source, const char *target, const char *type, unsigned long flags, const char *data) {
    return (int)syscall(SYS_mount, source, target, type, flags, data);
}

int sys_unmount(const char *target) { return (int)syscall(SYS_umount2, target, MNT_DETACH); }

int sys_attach(int mount, const char *target) {
    return (int)syscall(SYS_move_mount, mount, "", AT_FDCWD, target, MOVE_MOUNT_F_EMPTY_PATH);
}

int sys_move(const char *from, const char *to) {
    return (int)syscall(SYS_move_mount, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int sys_clone_tree(const char *path) {
    return (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
}

static int set_attributes(int mount, uint64_t set, int userns) {
    struct mount_attr attr = {.attr_set = set};
    if (userns >= 0) {
        attr.attr_set |= MOUNT_ATTR_IDMAP;
        attr.userns_fd = (uint64_t)userns;
    }
    return (int)syscall(SYS_mount_setattr, mount, "", AT_EMPTY_PATH, &attr, sizeof attr);
}

static int fs_open(const char *type) { return (int)syscall(SYS_fsopen, type, FSOPEN_CLOEXEC); }

static int fs_string(int context, const char *key, const char *value) {
    return (int)syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, key, value, 0);
}

static int fs_flag(int context, const char *key) {
    return (int)syscall(SYS_fsconfig, context, FSCONFIG_SET_FLAG, key, NULL, 0);
}

static int fs_fd(int context, const char *key, int fd) {
    return (int)syscall(SYS_fsconfig, context, FSCONFIG_SET_FD, key, NULL, fd);
}

/* Creates the superblock and its detached mount; closes the context. */
static int fs_finish(int context, uint64_t attributes) {
    int mount = -1;
    if (syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        mount = (int)syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC, attributes);
    return mount;
}

/* The kernel's messages come one per read; the context's errno must survive. */
static void keep_log(int context, struct fault *fault) {
    size_t used = 0;
    while (used + 1 < sizeof fault->log) {
        ssize_t got = read(context, fault->log + used, sizeof fault->log - used - 1);
        if (got <= 0)
            break;
        used += (size_t)got;
    }
    fault->log[used] = 0;
}

static int fs_fail(int context, struct fault *fault, const char *step) {
    fault_at(fault, step);
    keep_log(context, fault);
    close(context);
    return -1;
}

static int close_keeping(int fd, int result) {
    int saved = errno;
    close(fd);
    errno = saved;
    return result;
}

/* ---- the spawner's own root ---- */

static int lean_devices(void) {
    static const struct {
        const char *path;
        unsigned major, minor;
    } nodes[] = {{LEAN_DEV "/null", 1, 3},   {LEAN_DEV "/zero", 1, 5},    {LEAN_DEV "/full", 1, 7},
                 {LEAN_DEV "/random", 1, 8}, {LEAN_DEV "/urandom", 1, 9}, {LEAN_DEV "/tty", 5, 0}};
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++)
        if (mknod(nodes[i].path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)))
            return -1;
    return mkdir(LEAN_DEV "/pts", 0755) || mkdir(LEAN_DEV "/shm", 01777) || symlink("pts/ptmx", LEAN_DEV "/ptmx") ||
           symlink("/proc/self/fd", LEAN_DEV "/fd") || symlink("/proc/self/fd/0", LEAN_DEV "/stdin") ||
           symlink("/proc/self/fd/1", LEAN_DEV "/stdout") || symlink("/proc/self/fd/2", LEAN_DEV "/stderr");
}

/* Attach points of the reduced path: layer i at /l/<i>, the writable tree at /l/u, the overlay at /l/m. */
static int lean_places(void) {
    char path[24];
    if (mkdir("/l", 0700) || mkdir("/l/u", 0700) || mkdir("/l/m", 0700))
        return -1;
    for (int i = 0; i < SPAWN_MAX_LAYERS; i++) {
        snprintf(path, sizeof path, "/l/%d", i);
        if (mkdir(path, 0700))
            return -1;
    }
    return 0;
}

static int lean_tree(void) {
    if (mkdir("/proc", 0555) || mkdir("/sys", 0555) || mkdir(LEAN_DEV, 0755) || mkdir(LEAN_ROOT, 0755) ||
        mkdir(LEAN_STAGE, 0755) || mkdir(LEAN_STAGE "/proc", 0555) || mkdir(LEAN_STAGE "/sys", 0555) ||
        mkdir(LEAN_STAGE "/dev", 0755) || mkdir("/mask", 0755) || mkdir(LEAN_MASK_DIR, 0555) || mknod(LEAN_MASK_FILE, S_IFREG | 0444, 0))
        return -1;
    return lean_places();
}

static int lean_mounts(void) {
    const unsigned long quiet = MS_NOSUID | MS_NODEV | MS_NOEXEC;
    /* A user namespace may mount proc and sysfs only where its own mount namespace already shows all of them. */
    return sys_mount("proc", "/proc", "proc", quiet, NULL) || sys_mount("sysfs", "/sys", "sysfs", quiet | MS_RDONLY, NULL) ||
           sys_mount("dev", LEAN_DEV, "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,nr_inodes=64,size=64k");
}

static int lean_seal(void) {
    return sys_mount(NULL, LEAN_DEV, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC, NULL) ||
           sys_mount(NULL, "/", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
}

static int lean_pivot(void) {
    int context = fs_open("tmpfs");
    if (context < 0)
        return -1;
    int failed = fs_string(context, "mode", "0755") || fs_string(context, "size", "1m");
    int root = failed ? -1 : fs_finish(context, QUIET_ATTR);
    close_keeping(context, 0);
    /* Any existing directory will do to attach it: the pivot takes it from there. */
    if (root < 0 || sys_attach(root, "/proc") || fchdir(root))
        return -1;
    close(root);
    return syscall(SYS_pivot_root, ".", ".") || sys_unmount(".") || chdir("/");
}

int lean_namespace(struct fault *fault) {
    if (syscall(SYS_unshare, 0x00020000 /* CLONE_NEWNS */) || sys_mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return fault_at(fault, "mount-namespace");
    umask(0);
    if (lean_pivot() || lean_tree() || lean_mounts() || lean_devices() || lean_seal())
        return fault_at(fault, "lean-root");
    return 0;
}

/* ---- per sandbox ---- */

/* tmpfs takes an idmap since Linux 6.3; without it root and nodes show as owned by nobody, and work as well. */
static int idmap_tmpfs(int mount, int userns, struct fault *fault, const char *step) {
    if (set_attributes(mount, 0, userns) == 0 || errno == EINVAL)
        return mount;
    fault_at(fault, step);
    return close_keeping(mount, -1);
}

int dev_make(int userns, struct fault *fault) {
    int tree = sys_clone_tree(LEAN_DEV);
    return tree < 0 ? fault_at(fault, "dev") : idmap_tmpfs(tree, userns, fault, "dev-idmap");
}

int shm_make(uint64_t bytes, int userns, struct fault *fault) {
    char size[32];
    snprintf(size, sizeof size, "%llu", (unsigned long long)bytes);
    int context = fs_open("tmpfs");
    if (context < 0)
        return fault_at(fault, "shm");
    /* Owner global root, seen through the idmap as the sandbox's root: any other owner is printed in /proc/mounts. */
    if (fs_string(context, "source", "shm") || fs_string(context, "mode", "1777") || fs_string(context, "size", size) ||
        fs_string(context, "uid", "0") || fs_string(context, "gid", "0"))
        return fs_fail(context, fault, "shm");
    int mount = fs_finish(context, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    if (mount < 0)
        return fs_fail(context, fault, "shm");
    close(context);
    return idmap_tmpfs(mount, userns, fault, "shm-idmap");
}

int sysfs_make(struct fault *fault) {
    int context = fs_open("sysfs");
    if (context < 0)
        return fault_at(fault, "sysfs");
    int mount = fs_finish(context, QUIET_ATTR | MOUNT_ATTR_RDONLY);
    if (mount < 0)
        return fs_fail(context, fault, "sysfs");
    close(context);
    return mount;
}

static int idmap_all(const struct overlay_plan *plan, struct fault *fault) {
    for (uint32_t i = 0; i < plan->layer_count; i++)
        if (set_attributes(plan->layers[i], MOUNT_ATTR_NODEV | MOUNT_ATTR_RDONLY, plan->userns))
            return fault_at(fault, "layer-idmap");
    if (set_attributes(plan->writable, MOUNT_ATTR_NODEV, plan->userns))
        return fault_at(fault, "writable-idmap");
    return 0;
}

static int overlay_config(int context, const struct overlay_plan *plan, struct fault *fault) {
    for (uint32_t i = 0; i < plan->layer_count; i++)
        if (fs_fd(context, "lowerdir+", plan->layers[i]))
            return fault_at(fault, "overlay-lower");
    int upper = openat(plan->writable, "u", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int work = openat(plan->writable, "w", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int failed = upper < 0 || work < 0 || fs_fd(context, "upperdir", upper) || fs_fd(context, "workdir", work);
    if (failed)
        fault_at(fault, "overlay-upper");
    if (upper >= 0)
        close(upper);
    if (work >= 0)
        close(work);
    if (failed)
        return -1;
    if (fs_string(context, "source", "sandbox") || fs_string(context, "redirect_dir", "on") ||
        fs_string(context, "metacopy", "on") || ((plan->flags & SPAWN_VOLATILE) && fs_flag(context, "volatile")))
        return fault_at(fault, "overlay-options");
    return 0;
}

static int overlay_by_fd(const struct overlay_plan *plan, struct fault *fault) {
    uint64_t attributes = MOUNT_ATTR_NODEV | (plan->flags & SPAWN_SETUID ? 0 : MOUNT_ATTR_NOSUID);
    int context = fs_open("overlay");
    if (context < 0)
        return fault_at(fault, "overlay");
    if (overlay_config(context, plan, fault))
        return fs_fail(context, fault, "overlay-options");
    int mount = fs_finish(context, attributes);
    if (mount < 0)
        return fs_fail(context, fault, "overlay-create");
    close(context);
    return mount;
}

/* The lowest kernels take neither descriptors nor detached mounts: attach, mount by short paths, detach again.
 * Nobody else is in this mount namespace, and no child is cloned meanwhile. */
static int attach_all(const struct overlay_plan *plan, char *lower, size_t size) {
    size_t used = 0;
    for (uint32_t i = 0; i < plan->layer_count; i++) {
        char place[24];
        snprintf(place, sizeof place, "/l/%u", i);
        if (sys_attach(plan->layers[i], place))
            return -1;
        used += (size_t)snprintf(lower + used, size - used, i ? ":%s" : "%s", place);
    }
    return sys_attach(plan->writable, "/l/u");
}

static void detach_all(uint32_t layers) {
    char place[24];
    for (uint32_t i = 0; i < layers; i++) {
        snprintf(place, sizeof place, "/l/%u", i);
        sys_unmount(place);
    }
    sys_unmount("/l/u");
}

static int overlay_by_path(const struct overlay_plan *plan, struct fault *fault) {
    char lower[SPAWN_MAX_LAYERS * 8], data[sizeof lower + 128];
    unsigned long flags = MS_NODEV | (plan->flags & SPAWN_SETUID ? 0 : MS_NOSUID);
    int mount = -1;
    if (attach_all(plan, lower, sizeof lower)) {
        fault_at(fault, "overlay-attach");
        goto out;
    }
    snprintf(data, sizeof data, "lowerdir=%s,upperdir=/l/u/u,workdir=/l/u/w,redirect_dir=on,metacopy=on%s", lower,
             plan->flags & SPAWN_VOLATILE ? ",volatile" : "");
    if (sys_mount("sandbox", "/l/m", "overlay", flags, data)) {
        fault_at(fault, "overlay-create");
        goto out;
    }
    mount = sys_clone_tree("/l/m");
    if (mount < 0)
        fault_at(fault, "overlay-clone");
    sys_unmount("/l/m");
out:
    detach_all(plan->layer_count);
    return mount;
}

/* overlayfs turns read-only without an error when it may not write to its work directory. */
static int check_writable(int mount, struct fault *fault) {
    struct statfs facts;
    if (fstatfs(mount, &facts))
        return fault_at(fault, "overlay-statfs");
    if (facts.f_flags & MS_RDONLY) {
        errno = EROFS;
        return fault_at(fault, "overlay-readonly");
    }
    return 0;
}

int overlay_make(const struct overlay_plan *plan, struct fault *fault) {
    if (idmap_all(plan, fault))
        return -1;
    /* overlayfs writes to its upper layer as whoever mounted it: that must be an id the idmap knows. */
    syscall(SYS_setfsgid, plan->root_uid);
    syscall(SYS_setfsuid, plan->root_uid);
    int mount = plan->flags & SPAWN_REDUCED ? overlay_by_path(plan, fault) : overlay_by_fd(plan, fault);
    syscall(SYS_setfsuid, geteuid());
    syscall(SYS_setfsgid, getegid());
    if (mount >= 0 && check_writable(mount, fault))
        return close_keeping(mount, -1);
    return mount;
}
