/* Included before the sources of the link target: the connection is the fuzzer's input. */
#ifndef BARCHAN_FAKE_SOCKET_H
#define BARCHAN_FAKE_SOCKET_H
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

int fake_accept(void);
ssize_t fake_recv(void *into, size_t room);
ssize_t fake_send(const void *data, size_t size);
ssize_t fake_sendmsg(const struct msghdr *message);

#define accept4(fd, address, size, flags) ((void)(fd), fake_accept())
#define recv(fd, into, room, flags) ((void)(fd), fake_recv(into, room))
#define send(fd, data, size, flags) ((void)(fd), fake_send(data, size))
#define sendmsg(fd, message, flags) ((void)(fd), fake_sendmsg(message))
#define shutdown(fd, how) ((void)(fd))
#define setsockopt(fd, level, name, value, size) ((void)(value))
#define fcntl(fd, command, argument) ((fd) + 1)
#define close(fd) ((void)(fd))
#endif
