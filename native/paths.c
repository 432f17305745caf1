#include "paths.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define PROC_MAGIC 0x9fa0

static int refuse(int fd, int error) {
    close(fd);
    errno = error;
    return -1;
}

/* /proc/<pid>/…, by the name that the kernel gives the open file: links such as /proc/self are resolved in it. */
static bool names_process(const char *path) {
    while (*path) {
        path += strspn(path, "/");
        size_t size = strcspn(path, "/");
        if (size && strspn(path, "0123456789") >= size)
            return true;
        path += size;
    }
    return false;
}

/* The descriptor shows a process of procfs. */
static bool is_process_file(int fd) {
    struct statfs fs;
    char link[32], path[PATH_MAX];
    if (fstatfs(fd, &fs) == 0 && fs.f_type != PROC_MAGIC)
        return false;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0)
        return true;
    path[n] = 0;
    return names_process(path);
}

/* The pid-numbered directories of procfs that a path walks through are caught after the open, by is_process_file; magic
 * links, which would lead elsewhere, by the kernel. Without openat2 every link of procfs is refused with them. */
static int open_anything(int dir, const char *path, int flags, unsigned mode) {
    bool creates = (flags & (O_CREAT | O_TMPFILE)) != 0;
    struct open_how how = {.flags = (unsigned)flags, .mode = creates ? mode : 0, .resolve = RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, dir, path, &how, sizeof how);
}

int open_path(int dir, const char *path, int flags, unsigned mode) {
    flags |= O_CLOEXEC;
    if (!(flags & O_PATH))
        flags |= O_NONBLOCK | O_NOCTTY;
    int fd = open_anything(dir, path, flags, mode);
    if (fd >= 0 && is_process_file(fd))
        return refuse(fd, EACCES);
    return fd;
}

int open_regular(const char *path, int flags, unsigned mode, struct stat *st) {
    int fd = open_path(AT_FDCWD, path, flags, mode);
    if (fd < 0)
        return -1;
    if (fstat(fd, st))
        return refuse(fd, errno);
    if (S_ISDIR(st->st_mode))
        return refuse(fd, EISDIR);
    return S_ISREG(st->st_mode) ? fd : refuse(fd, EINVAL);
}

int open_parent(const char *path, char base[NAME_MAX + 1]) {
    char above[PATH_MAX];
    const char *slash = strrchr(path, '/');
    size_t lead = (size_t)(slash - path) + 1, size = strlen(slash + 1);
    if (!size || !strcmp(slash + 1, ".") || !strcmp(slash + 1, "..")) {
        errno = EISDIR;
        return -1;
    }
    if (size > NAME_MAX || lead >= sizeof above) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(base, slash + 1, size + 1);
    memcpy(above, path, lead);
    above[lead] = 0;
    return open_path(AT_FDCWD, above, O_PATH | O_DIRECTORY, 0);
}

int open_child_directory(int dir, const char *name) {
    return open_path(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
}

static int enter_or_make(int dir, const char *name) {
    int fd = open_path(dir, name, O_PATH | O_DIRECTORY, 0);
    if (fd >= 0 || errno != ENOENT)
        return fd;
    if (mkdirat(dir, name, 0755) && errno != EEXIST)
        return -1;
    return open_path(dir, name, O_PATH | O_DIRECTORY, 0);
}

int make_parents(const char *path) {
    char name[NAME_MAX + 1];
    int dir = open_path(AT_FDCWD, "/", O_PATH | O_DIRECTORY, 0);
    for (const char *slash; dir >= 0 && (slash = strchr(path, '/')); path = slash + 1) {
        size_t size = (size_t)(slash - path);
        if (!size)
            continue;
        if (size > NAME_MAX)
            return refuse(dir, ENAMETOOLONG);
        memcpy(name, path, size);
        name[size] = 0;
        int next = enter_or_make(dir, name), error = errno;
        close(dir);
        errno = error;
        dir = next;
    }
    if (dir < 0)
        return -1;
    close(dir);
    return 0;
}
