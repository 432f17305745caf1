/* Included before the sources of the paths target: what they open and make is a fake's. */
#ifndef BARCHAN_FAKE_PATHS_H
#define BARCHAN_FAKE_PATHS_H
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

int fake_openat2(int dir, const char *path, const struct open_how *how);
int fake_fstatfs(int fd, struct statfs *fs);
ssize_t fake_readlink(const char *link, char *into, size_t room);
int fake_mkdirat(int dir, const char *name, mode_t mode);
int fake_close(int fd);

#define syscall(number, dir, path, how, size) fake_openat2(dir, path, how)
#define fstatfs(fd, fs) fake_fstatfs(fd, fs)
#define readlink(link, into, room) fake_readlink(link, into, room)
#define mkdirat(dir, name, mode) fake_mkdirat(dir, name, mode)
#define close(fd) fake_close(fd)
#endif
