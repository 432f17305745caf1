/* Included before the sources of the tree target: their calls on files end in its fake of a file system. */
#ifndef BARCHAN_FAKE_FILES_H
#define BARCHAN_FAKE_FILES_H
#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

int fake_fcntl(int fd, int command, int argument);
int fake_close(int fd);
int fake_mkdirat(int dir, const char *name, mode_t mode);
int fake_unlinkat(int dir, const char *name, int flags);
int fake_renameat(int from_dir, const char *from, int to_dir, const char *to);
int fake_fstatat(int dir, const char *name, struct stat *st, int flags);
ssize_t fake_getrandom(void *into, size_t size, unsigned flags);
int fake_symlinkat(const char *target, int dir, const char *name);
int fake_fchownat(int dir, const char *name, uid_t uid, gid_t gid, int flags);
int fake_utimensat(int dir, const char *name, const struct timespec times[2], int flags);
int fake_fchown(int fd, uid_t uid, gid_t gid);
int fake_fchmod(int fd, mode_t mode);
int fake_futimens(int fd, const struct timespec times[2]);
ssize_t fake_writev(int fd, const struct iovec *piece, int count);

#define fcntl(fd, command, argument) fake_fcntl(fd, command, argument)
#define close(fd) fake_close(fd)
#define mkdirat(dir, name, mode) fake_mkdirat(dir, name, mode)
#define unlinkat(dir, name, flags) fake_unlinkat(dir, name, flags)
#define renameat(from_dir, from, to_dir, to) fake_renameat(from_dir, from, to_dir, to)
#define fstatat(dir, name, st, flags) fake_fstatat(dir, name, st, flags)
#define getrandom(into, size, flags) fake_getrandom(into, size, flags)
#define symlinkat(target, dir, name) fake_symlinkat(target, dir, name)
#define fchownat(dir, name, uid, gid, flags) fake_fchownat(dir, name, uid, gid, flags)
#define utimensat(dir, name, times, flags) fake_utimensat(dir, name, times, flags)
#define fchown(fd, uid, gid) fake_fchown(fd, uid, gid)
#define fchmod(fd, mode) fake_fchmod(fd, mode)
#define futimens(fd, times) fake_futimens(fd, times)
#define writev(fd, piece, count) fake_writev(fd, piece, count)
#endif
