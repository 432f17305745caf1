/* Included before the sources of the shell target: its pipes, its counters and its signals are the fuzzer's. */
#ifndef BARCHAN_FAKE_SHELL_H
#define BARCHAN_FAKE_SHELL_H
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

ssize_t fake_read(int fd, void *into, size_t room);
ssize_t fake_write(int fd, const void *data, size_t size);
ssize_t fake_pread(int fd, void *into, size_t room);
int fake_openat(int dir);
int fake_close(int fd);
int fake_kill(int pid, int number);

#define read(fd, into, room) fake_read(fd, into, room)
#define write(fd, data, size) fake_write(fd, data, size)
#define pread(fd, into, room, at) fake_pread(fd, into, room)
#define openat(dir, name, flags) fake_openat(dir)
#define close(fd) fake_close(fd)
#define kill(pid, number) fake_kill(pid, number)
#define fcntl(fd, command, argument) ((void)(fd))
#endif
