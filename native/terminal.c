#include "terminal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <termios.h>
#include <unistd.h>

#define DEVPTS_MAGIC 0x1cd1
#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

static int devpts = -1;

void terminal_init(void) {
    struct statfs fs;
    devpts = open("/dev/pts", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (devpts >= 0 && (fstatfs(devpts, &fs) || fs.f_type != DEVPTS_MAGIC)) {
        close(devpts);
        devpts = -1;
    }
}

/* Nothing mounted over it, no link, and the device that it should be. */
static int open_multiplexer(void) {
    const struct open_how how = {.flags = O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK,
                                 .resolve = RESOLVE_BENEATH | RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS};
    struct stat st;
    int fd = (int)syscall(SYS_openat2, devpts, "ptmx", &how, sizeof how);
    if (fd >= 0 && (fstat(fd, &st) || !S_ISCHR(st.st_mode) || st.st_rdev != makedev(5, 2))) {
        close(fd);
        errno = ENODEV;
        return -1;
    }
    return fd;
}

void terminal_resize(int master, uint16_t rows, uint16_t columns) {
    const struct winsize size = {.ws_row = rows, .ws_col = columns};
    ioctl(master, TIOCSWINSZ, &size);
}

static int open_slave(int master) {
    int locked = 0;
    if (ioctl(master, TIOCSPTLCK, &locked))
        return -1;
    int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (slave >= 0)
        fchmod(slave, 0620); /* the mount may say otherwise */
    return slave;
}

int terminal_open(const struct identity *who, uint16_t rows, uint16_t columns, int *slave) {
    if (devpts < 0) {
        errno = ENODEV;
        return -1;
    }
    int error = identity_enter(who); /* the kernel makes the slave a file of whoever opens the multiplexer */
    if (error) {
        errno = error;
        return -1;
    }
    int master = open_multiplexer();
    *slave = master < 0 ? -1 : open_slave(master);
    error = errno;
    identity_leave();
    if (*slave < 0 && master >= 0) {
        close(master);
        master = -1;
    }
    if (master >= 0)
        terminal_resize(master, rows, columns);
    errno = error;
    return master;
}

bool terminal_end_input(int master, bool line_open) {
    struct termios now;
    if (tcgetattr(master, &now) || !(now.c_lflag & ICANON) || now.c_cc[VEOF] == _POSIX_VDISABLE)
        return true;
    char keys[2] = {(char)now.c_cc[VEOF], (char)now.c_cc[VEOF]};
    return write(master, keys, line_open ? 2 : 1) >= 0 || errno != EAGAIN;
}
