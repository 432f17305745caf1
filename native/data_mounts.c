#define _GNU_SOURCE
#include "data_mounts.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawn.h"

union descriptor {
    struct cmsghdr align;
    char space[CMSG_SPACE(sizeof(int))];
};

int data_send(int link, int mount, const char *target) {
    union descriptor control = {0};
    struct iovec piece = {(void *)(uintptr_t)target, strlen(target) + 1};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &mount, sizeof mount);
    return sendmsg(link, &message, MSG_NOSIGNAL) == (ssize_t)piece.iov_len ? 0 : -1;
}

/* Returns the mount's descriptor. */
static int receive(int link, char target[SPAWN_TARGET]) {
    union descriptor control;
    struct iovec piece = {target, SPAWN_TARGET};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
    int mount = -1;
    if (recvmsg(link, &message, MSG_CMSG_CLOEXEC) <= 0)
        return -1;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (head && head->cmsg_type == SCM_RIGHTS)
        memcpy(&mount, CMSG_DATA(head), sizeof mount);
    else
        errno = EPROTO;
    return mount;
}

/* No mount is crossed: /proc, /sys, /dev and what other data covers stay out of reach, whatever links the image has. */
static int open_inside(const char *path) {
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS};
    int root = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        return -1;
    int fd = (int)syscall(SYS_openat2, root, path, &how, sizeof how), saved = errno;
    close(root);
    errno = saved;
    return fd;
}

/* The directory `path[:end]`, made if it is missing; the one above exists. */
static int enter_or_make(char *path, size_t end, size_t name) {
    char kept = path[end];
    path[end] = 0;
    int fd = open_inside(path);
    if (fd < 0 && errno == ENOENT) {
        char first = path[name];
        path[name] = 0;
        int above = open_inside(name > 1 ? path : "/");
        path[name] = first;
        if (above >= 0 && (mkdirat(above, path + name, 0755) == 0 || errno == EEXIST))
            fd = open_inside(path);
        if (above >= 0)
            close(above);
    }
    path[end] = kept;
    return fd;
}

static int open_target(char *path) {
    int fd = -1;
    for (size_t name = 1; path[name];) {
        size_t end = name + strcspn(path + name, "/");
        if (fd >= 0)
            close(fd);
        fd = enter_or_make(path, end, name);
        if (fd < 0)
            return -1;
        name = path[end] ? end + 1 : end;
    }
    return fd;
}

/* The file `name`, made empty if it is missing. A link is not followed: it is itself what gets covered. */
static int open_file(int directory, const char *name) {
    const int flags = O_PATH | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(directory, name, flags);
    if (fd >= 0 || errno != ENOENT)
        return fd;
    int made = openat(directory, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (made < 0)
        return -1;
    close(made);
    return openat(directory, name, flags);
}

/* The directory that `path` ends in, made if it is missing; `path` keeps its length. */
static int open_parent(char *path, char *slash) {
    if (slash == path)
        return open_inside("/");
    *slash = 0;
    int fd = open_target(path);
    *slash = '/';
    return fd;
}

static int open_file_target(char *path) {
    char *slash = strrchr(path, '/');
    int directory = open_parent(path, slash), fd = directory < 0 ? -1 : open_file(directory, slash + 1), saved = errno;
    if (directory >= 0)
        close(directory);
    errno = saved;
    return fd;
}

static int open_place(int mount, char *target) {
    struct stat facts;
    if (fstat(mount, &facts))
        return -1;
    return S_ISDIR(facts.st_mode) ? open_target(target) : open_file_target(target);
}

static int attach(int link) {
    char target[SPAWN_TARGET];
    int mount = receive(link, target), place = mount < 0 ? -1 : open_place(mount, target), result = -1;
    if (place >= 0)
        result = (int)syscall(SYS_move_mount, mount, "", place, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
    int saved = errno;
    if (place >= 0)
        close(place);
    if (mount >= 0)
        close(mount);
    errno = saved;
    return result;
}

int data_attach(int link, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (attach(link))
            return -1;
    return 0;
}

/* The network's numbers are not in it: it stays in the writable tree, and is part of what is made from that. */
int hosts_make(const char *hostname) {
    char text[160], path[] = "/etc";
    int directory = open_target(path);
    if (directory < 0)
        return -1;
    int fd = openat(directory, "hosts", O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644), saved = errno;
    close(directory);
    if (fd < 0) {
        errno = saved;
        return saved == EEXIST ? 0 : -1;
    }
    int size = snprintf(text, sizeof text, "127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\t%s\n", hostname);
    ssize_t written = write(fd, text, (size_t)size);
    close(fd);
    return written == size ? 0 : -1;
}
